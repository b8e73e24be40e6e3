"""Native choice of tokens: the torch sampler's answers on every tier, and one answer everywhere."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.grammar_rows import TokenMasks
from engine.kernels.cpu.library import KernelError, available_tiers, load_library
from engine.logprobs import Logprobs
from engine.native_sampling import Floats, NativeChooser, chooser_alone
from engine.sampler import Sampler, Samples
from engine.torch_sampling import TorchSampling
from scheduler.types import Admission, SamplingParams
from tests.engine.test_sampler import CPU, DISTRIBUTIONS, GREEDY, VOCAB, Row, filtered, sample, zoo

pytestmark = pytest.mark.skipif(
    not available_tiers(), reason="the native kernels are not built here"
)


@pytest.fixture
def chooser(kernels: ctypes.CDLL) -> NativeChooser:
    return chooser_alone(kernels)


def random_sampling(pick: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=pick.choice([0.0, 1e-3, 0.5, 1.0, 2.0, 50.0]),
        top_k=pick.choice([0, 1, 3, 40, 500, vocab - 1, vocab, vocab + 9]),
        top_p=pick.choice([0.0, 0.1, 0.9, 0.999, 1 - 1e-9, 1.0]),
        min_p=pick.choice([0.0, 0.0, 0.05, 1.0]),
        seed=pick.randrange(-(2**63), 2**63),
        num_logprobs=pick.choice([None, 0, 5, 20, 3000]),
    )


def random_rows(seed: int) -> tuple[list[Row], int]:
    """Rows of one vocabulary, and the number of its ids that are no padding."""
    pick = random.Random(seed)
    vocab = pick.choice([3, 12, 100, 1023, 1025, 3000, 5000])
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(12):
        logits = torch.randn(vocab, generator=generator) * pick.choice([0.0, 0.1, 1.0, 3.0, 10.0])
        kind = pick.randrange(4)
        if kind == 0:
            logits = logits.round()  # ties
        elif kind == 1 and vocab > 12:
            logits[torch.randint(1, vocab, (vocab // 2,), generator=generator)] = -torch.inf
        elif kind == 2:
            logits[pick.randrange(vocab)] = 80.0  # one hot
        rows.append(Row(logits, random_sampling(pick, vocab), output=(1,) * pick.randrange(5)))
    return rows, max(1, vocab - pick.randrange(3))


def assert_same(actual: Samples, expected: Samples) -> None:
    """To the last bit."""
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert torch.equal(actual.peaks, expected.peaks)
    assert actual.logprob_rows == expected.logprob_rows
    assert (actual.logprobs is None) == (expected.logprobs is None)
    if actual.logprobs is None:
        return
    assert torch.equal(actual.logprobs.chosen, expected.logprobs.chosen)
    for row, count in enumerate(actual.num_top):
        for ours, theirs in (
            (actual.logprobs.top, expected.logprobs.top),
            (actual.logprobs.top_ids, expected.logprobs.top_ids),
        ):
            assert torch.equal(ours[row, :count], theirs[row, :count])


@pytest.mark.parametrize("seed", range(25))
def test_choices_equal_the_torch_sampler(chooser: NativeChooser, seed: int) -> None:
    """B032 B034: draws could differ within 1e-7 of a border between tokens; these do not."""
    rows, limit = random_rows(seed)
    actual = sample(rows, vocab_limit=limit, chooser=chooser)
    expected = sample(rows, vocab_limit=limit)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(actual.peaks, expected.peaks)
    assert actual.logprob_rows == expected.logprob_rows
    if expected.logprobs is None:
        return
    torch.testing.assert_close(
        actual.logprobs.chosen, expected.logprobs.chosen, rtol=1e-6, atol=1e-5
    )
    for row, count in enumerate(expected.num_top):
        ours, theirs = (of.logprobs.top_ids[row, :count] for of in (actual, expected))
        assert ours.tolist() == theirs.tolist()
        ours, theirs = (of.logprobs.top[row, :count] for of in (actual, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("sampling", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_frequencies_follow_the_exact_distribution(
    chooser: NativeChooser, sampling: SamplingParams
) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    expected = filtered(logits, sampling)
    draws = 4000
    rows = [Row(logits, replace(sampling, seed=seed)) for seed in range(draws)]
    tokens = sample(rows, chooser=chooser).token_ids
    counts = torch.bincount(tokens, minlength=12).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    degrees = int(possible.sum()) - 1
    wanted = expected[possible] * draws
    chi_square = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees) + 4


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 127, 2500, 20000])
def test_large_vocabularies_and_flat_distributions(
    chooser: NativeChooser, top_k: int, top_p: float
) -> None:
    """Thousands of candidates, ties among them, a masked half: as the torch sampler ranks them."""
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(49157, generator=generator) * 0.5
    tied = flat.mul(8).round().div(8)
    masked = flat.clone()
    masked[::2] = -torch.inf
    rows = [
        Row(logits, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
        for seed, logits in enumerate([flat, tied, masked, torch.zeros_like(flat)] * 2)
    ]
    actual = sample(rows, chooser=chooser).token_ids
    assert actual.tolist() == sample(rows).token_ids.tolist()


def random_masks(pick: random.Random, num_rows: int, vocab: int) -> TokenMasks:
    """Of some rows, down to one: some of all tokens, some of none, others of any share of them."""
    rows = sorted(pick.sample(range(num_rows), pick.randint(1, num_rows)))
    generator = np.random.default_rng(pick.randrange(1 << 32))
    num_words = -(-vocab // 32) + pick.randrange(2)
    bits = np.zeros((len(rows), 32 * num_words), dtype=np.bool_)
    for row in bits:
        row[:vocab] = generator.random(vocab) < pick.choice([0.0, 0.01, 0.5, 0.99, 1.0])
        row[generator.integers(vocab)] |= pick.random() < 0.8
        row[vocab:] = generator.random(len(row) - vocab) < 0.5  # of no token
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return TokenMasks(np.array(rows), words)


def masked(logits: Floats, masks: TokenMasks) -> Floats:
    """The oracle: a nan stays one, and infinity less infinity becomes one."""
    result = logits.copy()
    for row, words in zip(masks.rows, masks.words, strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                result[row, token] += -np.inf
    return result


def parameters_of(samplings: list[SamplingParams]) -> np.ndarray:
    sampler = Sampler(
        num_slots=len(samplings), vocab_size=VOCAB, vocab_limit=VOCAB, device=None, chooser=None
    )
    for slot, sampling in enumerate(samplings):
        sampler.admit(Admission(slot, (1,), 1, sampling, ()))
    return sampler._table


def same_bits(actual: Floats, expected: Floats) -> bool:
    """But for nans, and for zeros where the other form adds one."""
    return np.array_equal(actual, expected, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore:invalid value")
def test_masks_are_put_on_their_rows(chooser: NativeChooser, seed: int) -> None:
    """B035: as the oracle does, whatever the width; then the choice is that of masked logits."""
    pick = random.Random(seed)
    rows, limit = random_rows(seed)
    whole = np.stack([row.logits.numpy() for row in rows])
    for value in (np.nan, np.inf, -0.0):
        whole[pick.randrange(len(rows)), pick.randrange(limit)] = value
    masks = random_masks(pick, len(rows), limit)
    columns = parameters_of([row.sampling for row in rows])
    indices = np.arange(len(rows))
    expected_logits = whole.copy()
    expected_logits[:, :limit] = masked(whole[:, :limit], masks)
    expected = chooser.choose(expected_logits[:, :limit], columns, indices)
    of_torch = torch.from_numpy(whole[:, :limit].copy())
    TorchSampling(vocab_size=limit, device=CPU).choose(of_torch, columns, indices, masks)
    actual = chooser.choose(whole[:, :limit], columns, indices, masks)
    assert same_bits(whole, expected_logits)
    assert same_bits(of_torch.numpy(), expected_logits[:, :limit])
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert same_bits(actual.peaks, expected.peaks)
    if expected.logprobs is not None:
        num_top = columns["num_logprobs"][columns["num_logprobs"] >= 0]
        assert same_bits(actual.logprobs.chosen, expected.logprobs.chosen)
        for row, count in enumerate(np.minimum(num_top, limit)):
            assert same_bits(actual.logprobs.top[row, :count], expected.logprobs.top[row, :count])
            ids = [of.logprobs.top_ids[row, :count].tolist() for of in (actual, expected)]
            assert ids[0] == ids[1]


def test_masks_mean_the_same_on_all_tiers_and_with_any_number_of_threads() -> None:
    rows, limit = random_rows(102)
    logits = np.stack([row.logits.numpy() for row in rows])[:, :limit]
    masks = random_masks(random.Random(1), len(rows), limit)
    columns = parameters_of([row.sampling for row in rows])
    results = []
    for chooser in choosers():
        copy = logits.copy()
        choice = chooser.choose(copy, columns, np.arange(len(rows)), masks)
        results.append((copy.tobytes(), choice.token_ids.tolist(), choice.peaks.tobytes()))
    assert all(result == results[0] for result in results)


def test_tokens_of_no_weight_are_never_drawn(chooser: NativeChooser) -> None:
    """Whole ranges of the vocabulary far below the best, or masked, around the only likely one."""
    logits = np.full((40, 9000), -200.0, dtype=np.float32)
    logits[:, 5000] = 3.0
    logits[20:, :4096] = -np.inf
    samplings = [SamplingParams(temperature=0.5 + row / 40, seed=row) for row in range(40)]
    columns = parameters_of([replace(sampling, num_logprobs=1) for sampling in samplings])
    choice = chooser.choose(logits, columns, np.arange(40))
    assert choice.token_ids.tolist() == [5000] * 40
    assert choice.logprobs.chosen.tolist() == [0.0] * 40


def company() -> list[Row]:
    rows = zoo()
    masked = torch.full((3000,), -torch.inf)
    masked[[17, 400]] = torch.tensor([-3.0, -2.0])
    return [*rows, Row(masked, replace(GREEDY, num_logprobs=3)), Row(masked, SamplingParams())]


def choosers() -> Iterator[NativeChooser]:
    for tier in available_tiers():
        for num_threads in (1, 2, 3):
            yield chooser_alone(load_library(tier), num_threads=num_threads)


def test_one_answer_on_all_tiers_and_with_any_number_of_threads() -> None:
    first, *others = choosers()
    for rows, limit in [random_rows(100), random_rows(101), (company(), 3000)]:
        expected = sample(rows, vocab_limit=limit, chooser=first)
        for other in others:
            assert_same(sample(rows, vocab_limit=limit, chooser=other), expected)


def test_row_alone_equals_row_in_any_batch(chooser: NativeChooser) -> None:
    """B082 B083 B088: tokens and logprobs to the last bit, in every order of the batch."""
    rows = company()
    alone = [sample([row], chooser=chooser) for row in rows]
    shuffle = random.Random(1)
    for _ in range(10):
        order = shuffle.choices(range(len(rows)), k=shuffle.randint(2, 50))
        batch = sample([rows[i] for i in order], chooser=chooser)
        assert batch.token_ids.tolist() == [alone[i].token_ids.item() for i in order]
        wanted = [i for i in order if rows[i].sampling.num_logprobs is not None]
        for place, i in enumerate(wanted):
            expected, count = alone[i].logprobs, rows[i].sampling.num_logprobs
            assert batch.logprobs.chosen[place] == expected.chosen[0]
            assert torch.equal(batch.logprobs.top[place, :count], expected.top[0])
            assert torch.equal(batch.logprobs.top_ids[place, :count], expected.top_ids[0])


@pytest.mark.parametrize("place", [5, 1023, 2999])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_row_is_told_apart_and_harms_nobody(
    chooser: NativeChooser, value: float, place: int
) -> None:
    healthy = company()
    expected = sample(healthy, chooser=chooser).token_ids.tolist()
    broken = healthy[0].logits.clone()
    broken[place] = value
    if value == -torch.inf:
        broken[:] = value
    for sampling in (GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=9)):
        row = Row(broken, replace(sampling, num_logprobs=2))
        result = sample([row, *healthy], chooser=chooser)
        assert not result.peaks[0].isfinite()
        assert result.peaks[1:].isfinite().all()
        assert result.token_ids[1:].tolist() == expected
        assert 0 <= result.token_ids[0] < 3000


def test_padded_ids_are_beyond_every_choice(chooser: NativeChooser) -> None:
    """B026"""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    logits[2000:] += 100
    logits[2500:] = torch.nan
    rows = [Row(logits, replace(row.sampling, num_logprobs=20)) for row in zoo()]
    result = sample(rows, vocab_limit=2000, chooser=chooser)
    assert result.peaks.isfinite().all()
    assert result.token_ids.max() < 2000
    assert result.logprobs.top_ids.max() < 2000


def scores(of: NativeChooser | type[Logprobs], logits: Tensor, ids: Tensor) -> Logprobs:
    if isinstance(of, type):
        return of.of(logits, ids, num_top=4)
    return Logprobs(
        *map(torch.from_numpy, astuple(of.logprobs(logits.numpy(), ids.numpy(), num_top=4)))
    )


def test_given_tokens_are_scored(chooser: NativeChooser) -> None:
    """B077: a masked token has minus infinity and spoils no other."""
    logits = torch.randn((70, 1500), generator=torch.Generator().manual_seed(2)) * 4
    logits[:, 9] = -torch.inf
    ids = torch.arange(70)
    actual, expected = scores(chooser, logits, ids), scores(Logprobs, logits, ids)
    assert actual.chosen[9] == -torch.inf
    torch.testing.assert_close(actual.chosen, expected.chosen, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(actual.top, expected.top, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual.top_ids, expected.top_ids)


def test_log_probabilities_of_a_row_sum_to_one(chooser: NativeChooser) -> None:
    logits = torch.randn((3, 4000), generator=torch.Generator().manual_seed(2)) * 3
    every = chooser.logprobs(logits.numpy(), np.zeros(3, dtype=np.int64), num_top=4000)
    np.testing.assert_allclose(np.exp(every.top.astype(np.float64)).sum(1), 1, atol=1e-5)
    assert (np.sort(every.top_ids, axis=1) == np.arange(4000)).all()


def test_impossible_calls_are_refused(chooser: NativeChooser) -> None:
    logits = np.zeros((2, 8), dtype=np.float32)
    with pytest.raises(KernelError, match="out of range"):
        chooser.logprobs(logits, np.array([0, 8]), num_top=0)
    with pytest.raises(KernelError, match="shape"):
        chooser.logprobs(logits[:, :0], np.array([0, 0]), num_top=0)
    columns = parameters_of([GREEDY, GREEDY])
    masks, wide = TokenMasks(np.array([0]), np.zeros((1, 1), dtype=np.uint32)), np.zeros((2, 33))
    with pytest.raises(KernelError, match="shape"):
        chooser.choose(wide.astype(np.float32), columns, np.arange(2), masks)
    assert len(chooser.logprobs(logits[:0], np.empty(0, dtype=np.int64), num_top=3).top) == 0
