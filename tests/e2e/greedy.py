"""Greedy answers of the reference path against transformers, token for token.

`python -m tests.e2e.greedy --full` compares all prompts with 64 tokens each and prints figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler.types import Request, SamplingParams
from tests.e2e.engines import BLOCK_SIZE, MAX_MODEL_LEN, default_model_path, make_engine, serve
from tests.e2e.prompts import prompt_ids
from tests.support.default_model import transformers_model

FULL_TOKENS = 64
# Prompts in one batch of transformers: of like length, so that little is padding.
BATCH = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    num_prompts: int
    num_tokens: int
    different: tuple[int, ...]  # indices of prompts
    expected_seconds: float
    our_seconds: float


def compare(prompts: Sequence[tuple[int, ...]], num_tokens: int) -> Comparison:
    """All prompts in one batch on either side, each for num_tokens tokens, end or no end."""
    begin = time.perf_counter()
    expected = transformers_answers(prompts, num_tokens)
    middle = time.perf_counter()
    requests = [
        Request(str(index), prompt, num_tokens, sampling=SamplingParams(temperature=0.0))
        for index, prompt in enumerate(prompts)
    ]
    engine = make_engine("reference", num_blocks=len(prompts) * MAX_MODEL_LEN // BLOCK_SIZE)
    ours = serve(engine, requests).token_ids
    different = tuple(i for i in range(len(prompts)) if ours[str(i)] != expected[i])
    end = time.perf_counter()
    return Comparison(len(prompts), num_tokens, different, middle - begin, end - middle)


def transformers_answers(prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[list[int]]:
    """Greedy, in batches padded on the left, with transformers' own KV cache."""
    model = transformers_model()
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        longest = max(len(prompts[index]) for index in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(batch):
            ids[row, longest - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, longest - len(prompts[index]) :] = 1
        with torch.inference_mode():
            tokens = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        for row, index in enumerate(batch):
            answers[index] = [int(token) for token in tokens[row, longest:]]
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="32 prompts x 64 tokens")
    full = parser.parse_args().full
    prompts = prompt_ids(default_model_path())
    result = compare(prompts if full else prompts[::4], FULL_TOKENS if full else 24)
    print(
        f"{result.num_prompts} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} "
        f"tokens x {result.num_tokens} greedy tokens: "
        f"{result.num_prompts - len(result.different)} equal transformers' token for token "
        f"(transformers {result.expected_seconds:.0f} s, ours {result.our_seconds:.0f} s)"
    )
    for index in result.different:
        print(f"prompt {index} differs")
    return 1 if result.different else 0


if __name__ == "__main__":
    sys.exit(main())
