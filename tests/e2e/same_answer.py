"""The same requests in every way to serve them give the same tokens, greedy and seeded.

`python -m tests.e2e.same_answer` compares 32 requests x 64 tokens on both CPU engines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.loop import Engine
from scheduler.types import Request, SamplingParams
from tests.e2e.engines import BLOCK_SIZE, Served, default_model_path, make_engine, serve
from tests.e2e.prompts import prompt_ids

KINDS = ("reference", "native", "native, int16 KV")
POOL_BLOCKS = 512
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=42),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, top_p=0.9, seed=7),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02, presence_penalty=0.5, seed=3),
)


def make_requests(prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[Request]:
    """Lengths of answers differ, so that requests leave the batch one after another."""
    return [
        Request(
            str(index),
            prompt,
            num_tokens - index % (num_tokens // 2),
            sampling=_SAMPLINGS[index % len(_SAMPLINGS)],
        )
        for index, prompt in enumerate(prompts)
    ]


def _again(requests: Sequence[Request]) -> list[Request]:
    return [replace(request, id=f"again {request.id}") for request in requests]


def alone(engine: Engine, requests: Sequence[Request], depth: int) -> Served:
    return serve(engine, *([request] for request in requests), depth=depth)


def together(engine: Engine, requests: Sequence[Request], depth: int) -> Served:
    served = serve(engine, requests, depth=depth)
    assert served.most_running == len(requests)
    return served


def in_chunks(engine: Engine, requests: Sequence[Request], depth: int) -> Served:
    return serve(engine, requests, depth=depth, max_chunk_tokens=16)


def cached(engine: Engine, requests: Sequence[Request], depth: int) -> Served:
    """What is asked for a second time finds its prompt in the cache."""
    served = serve(engine, requests, _again(requests), depth=depth, prefix_caching=True)
    assert served.prefix_hits >= sum(
        (len(request.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for request in requests
    )
    return served


def preempted(engine: Engine, requests: Sequence[Request], depth: int) -> Served:
    """For an engine whose pool is too small for all."""
    served = serve(engine, requests, depth=depth, watermark_blocks=0)
    assert served.num_preemptions
    return served


Way = Callable[[Engine, Sequence[Request], int], Served]
WAYS: dict[str, Way] = {
    "alone": alone,
    "in one batch": together,
    "16-token chunks": in_chunks,
    "prefix cached": cached,
    "preempted": preempted,
}


def small_pool(requests: Sequence[Request]) -> int:
    """Blocks for the longest request and a spare one, and for under half of all as they end."""
    blocks = [-(-(len(r.prompt) + r.max_tokens) // BLOCK_SIZE) for r in requests]
    return max(max(blocks) + 1, sum(blocks) * 2 // 5)


def differences(kind: str, requests: Sequence[Request]) -> dict[str, list[str]]:
    """By way and depth: the requests whose tokens differ from those of each alone at depth 0."""
    engine = make_engine(kind, num_blocks=POOL_BLOCKS)
    expected = alone(engine, requests, 0).token_ids
    found = {}
    for depth in (0, 1):
        for name, way in WAYS.items():
            if name == "preempted":
                served = way(make_engine(kind, num_blocks=small_pool(requests)), requests, depth)
            elif (name, depth) == ("alone", 0):
                continue
            else:
                served = way(engine, requests, depth)
            found[f"{name}, depth {depth}"] = [
                name
                for name, token_ids in served.token_ids.items()
                if token_ids != expected[name.removeprefix("again ")]
            ]
    return found


def main() -> int:
    different = False
    for kind in KINDS:
        begin = time.perf_counter()
        requests = make_requests(prompt_ids(default_model_path()), 64)
        for way, names in differences(kind, requests).items():
            print(f"{kind}, {way}: {len(requests)} requests, {len(names)} differ", *names)
            different |= bool(names)
        print(f"{kind}: {time.perf_counter() - begin:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
