"""The fused draw and the penalties in the interpreter: the tokens of the sampler in torch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.triton.penalties import penalise
from engine.kernels.triton.sampling import draw
from engine.random import uniform
from engine.sampler import Sampler
from engine.torch_sampling import TorchSampling
from scheduler.types import Admission, SamplingParams

CPU = torch.device("cpu")
FULL = os.environ.get("KERNEL_TESTS") == "all"  # `make test-kernels`


def sampler_with(params: list[SamplingParams], vocab: int, prompts: list[list[int]]) -> Sampler:
    sampler = Sampler(
        num_slots=len(params),
        vocab_size=vocab,
        vocab_limit=vocab,
        device=CPU,
        chooser=TorchSampling(vocab_size=vocab, device=CPU),
    )
    for slot, (sampling, prompt) in enumerate(zip(params, prompts, strict=True)):
        sampler.admit(Admission(slot, tuple(prompt), max(1, len(prompt) - 3), sampling, ()))
    return sampler


def both_draws(logits: Tensor, params: list[SamplingParams]) -> tuple[list[int], list[int]]:
    """The tokens of the kernel and of engine.draw, for row i with params[i]."""
    sampler = sampler_with(params, logits.shape[1], [[0]] * len(params))
    rows = np.arange(len(params))
    peaks, token_ids = logits.max(1)
    columns, indices = sampler._table[rows], rows % 5
    twin = sampler._chooser._draw(logits.clone(), peaks, columns, indices)
    draw(logits, peaks, token_ids, columns, rows=rows, indices=indices)
    return token_ids.tolist(), twin.tolist()


def random_logits(rows: int, vocab: int, *, seed: int = 0, step: float = 0.0) -> Tensor:
    """`step` > 0 makes equal logits common."""
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return (logits / step).round() * step if step else logits


FILTERS = [
    {},
    {"min_p": 0.1},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.2},
    {"top_p": 0.99, "min_p": 0.3},
    {"top_k": 7, "min_p": 1.0},
]


@pytest.mark.parametrize("step", [0.0, 0.5, 4.0])
def test_draws_equal_the_sorting_twin(step: float) -> None:
    """Every filter, at low and high temperatures, with few and with many equal logits."""
    params = [
        SamplingParams(temperature=(0.3, 1.0, 5.0)[i % 3], seed=17 * i + int(step), **filters)
        for i, filters in enumerate(FILTERS)
    ]
    actual, expected = both_draws(random_logits(len(params), 1100, step=step), params)
    assert actual == expected


@pytest.mark.parametrize("seed", range(40 if FULL else 1))
def test_random_draws_equal_the_sorting_twin(seed: int) -> None:
    random = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=float(random.choice([0.05, 0.5, 1.0, 3.0])),
            top_k=int(random.choice([0, 1, 3, 50, 1000, 5000])),
            top_p=float(random.choice([1.0, 0.999, 0.9, 0.5, 0.01])),
            min_p=float(random.choice([0.0, 0.0, 0.05, 0.5])),
            seed=int(random.integers(-(2**62), 2**62)),
        )
        for _ in range(6)
    ]
    vocab, step = int(random.integers(2, 9000)), float(random.choice([0.0, 0.25, 3.0]))
    actual, expected = both_draws(random_logits(6, vocab, seed=seed, step=step), params)
    assert actual == expected


def test_masked_tokens_and_a_single_candidate() -> None:
    logits = torch.full((4, 300), -torch.inf)
    logits[:, 77] = -3.0
    logits[2:, 200] = -3.0
    params = [
        SamplingParams(),
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=9, top_p=0.99, seed=1),
    ]
    actual, expected = both_draws(logits, params)
    assert actual == expected
    assert actual[:3] == [77, 77, 77]
    assert actual[3] in (77, 200)


def test_seeds_at_the_ends_of_their_range_draw_like_the_twin() -> None:
    params = [SamplingParams(seed=seed) for seed in (0, -1, 2**63 - 1, -(2**63), 2**64 - 1)]
    actual, expected = both_draws(random_logits(len(params), 900, seed=3), params)
    assert actual == expected


def test_frequencies_of_draws_are_the_distribution() -> None:
    """Over 4 tokens, against their probabilities: chi-squared below its 1e-6 quantile."""
    count = 1000 if FULL else 120
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(count, 1)
    actual, _ = both_draws(logits, [SamplingParams(seed=seed) for seed in range(count)])
    expected = logits[0].softmax(0).numpy() * count
    counts = np.bincount(actual, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 30.7


def test_a_draw_does_not_depend_on_its_batch_mates() -> None:
    logits = random_logits(3, 800, seed=5)
    params = [SamplingParams(top_p=0.9, seed=4), SamplingParams(top_k=3), SamplingParams(min_p=0.2)]
    sampler = sampler_with(params, 800, [[0]] * 3)
    peaks, greedy = logits.max(1)
    together = greedy.clone()
    draw(
        logits, peaks, together, sampler._table[:3], rows=np.arange(3), indices=np.array([6, 0, 1])
    )
    alone = greedy[:1].clone()
    draw(logits[:1], peaks[:1], alone, sampler._table[:1], rows=np.arange(1), indices=np.array([6]))
    assert together[0] == alone[0]
    assert uniform(torch.tensor([4]), torch.tensor([6])).item() < 1


def test_a_broken_row_keeps_its_token_and_rows_not_drawn_keep_theirs() -> None:
    logits = random_logits(3, 100)
    logits[1] = torch.nan
    sampler = sampler_with([SamplingParams()] * 3, 100, [[0]] * 3)
    token_ids = torch.tensor([-1, -1, -1])
    draw(
        logits,
        logits.max(1).values,
        token_ids,
        sampler._table[:2],
        rows=np.array([1, 2]),
        indices=np.array([0, 0]),
    )
    assert token_ids[:2].tolist() == [-1, -1]
    assert token_ids[2] >= 0


def test_penalties_equal_the_twin() -> None:
    """Prompt and output counted apart, tokens that repeat, a row without penalties left alone."""
    vocab = 1100
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 40, (3, 2000), generator=generator)
    table[:, 5] = vocab - 1
    params = [
        SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=-0.25),
        SamplingParams(),
        SamplingParams(frequency_penalty=0.3),
    ]
    lengths = np.array([1500, 9, 6])
    prompts = [[1] * 700, [1], [1] * 5]
    sampler = sampler_with(params, vocab, prompts)
    logits = random_logits(3, vocab, seed=2)
    expected, actual = logits.clone(), logits.clone()
    rows = np.array([0, 2])
    sampler._chooser.penalise(
        expected, table, sampler._table[rows], rows=rows, slots=rows, lengths=lengths[rows]
    )
    penalise(actual, table, sampler._table[rows], rows=rows, slots=rows, lengths=lengths[rows])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual[1], logits[1])
