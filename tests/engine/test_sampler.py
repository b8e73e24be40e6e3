"""Sampler: exact distributions, each row its own business, and every parameter's edges."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import astuple, dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.logprobs import Logprobs, ranked_ids, row_sums
from engine.random import uniform
from engine.sampler import Chooser, Sampler, Samples
from engine.torch_sampling import TorchSampling
from scheduler.types import Admission, SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
VOCAB = 3000  # more than one width of every sum and of the first ranking


@dataclass(frozen=True)
class Row:
    """One sequence about to sample: its logits, parameters, prompt and output so far."""

    logits: Tensor
    sampling: SamplingParams = GREEDY
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()


def sample(
    rows: list[Row], *, vocab_limit: int | None = None, chooser: Chooser | None = None
) -> Samples:
    vocab = len(rows[0].logits)
    on_host = chooser is not None  # without torch, that is
    sampler = Sampler(
        num_slots=len(rows) + 1,
        vocab_size=vocab,
        vocab_limit=vocab_limit or vocab,
        device=None if on_host else CPU,
        chooser=chooser or TorchSampling(vocab_size=vocab, device=CPU),
    )
    # Slots in another order than rows, and a table full of foreign tokens.
    slots = np.array([len(rows) - i for i in range(len(rows))], dtype=np.int64)
    table = torch.full((len(rows) + 1, 64), 2, dtype=torch.int64)
    lengths = []
    for slot, row in zip(slots.tolist(), rows, strict=True):
        tokens = row.prompt + row.output
        admission = Admission(slot, tokens, len(row.prompt), row.sampling, row.stop_ids)
        assert sampler.fault(admission) == ""
        sampler.admit(admission)
        table[slot, : len(tokens)] = torch.tensor(tokens)
        lengths.append(len(tokens))
    logits = torch.stack([row.logits for row in rows]).float()
    counts = np.array(lengths, dtype=np.int64)
    if on_host:
        return as_tensors(sampler.sample(logits.numpy(), slots, counts, table.numpy()))
    return sampler.sample(logits, slots, counts, table)


def as_tensors(samples: Samples) -> Samples:
    logprobs = samples.logprobs
    if logprobs is not None:
        logprobs = Logprobs(*map(torch.from_numpy, astuple(logprobs)))
    return replace(
        samples,
        token_ids=torch.from_numpy(samples.token_ids),
        peaks=torch.from_numpy(samples.peaks),
        logprobs=logprobs,
    )


def tokens_of(
    rows: list[Row], *, vocab_limit: int | None = None, chooser: Chooser | None = None
) -> list[int]:
    return sample(rows, vocab_limit=vocab_limit, chooser=chooser).token_ids.tolist()


def random_logits(seed: int, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


# --- uniform numbers ---------------------------------------------------------------------------


def python_uniform(seed: int, index: int) -> float:
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    weyl = 0x9E3779B97F4A7C15
    return (mix((mix((seed + weyl) & mask) + (index + 1) * weyl) & mask) >> 11) * 2.0**-53


def test_uniform_is_splitmix64_in_python_integers() -> None:
    draw = random.Random(0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *(draw.randrange(-(2**63), 2**63) for _ in range(500))]
    indices = [draw.randrange(1 << 20) for _ in seeds]
    ours = uniform(torch.tensor(seeds), torch.tensor(indices)).tolist()
    assert ours == [python_uniform(s, i) for s, i in zip(seeds, indices, strict=True)]


def test_uniform_is_flat_and_uncorrelated_between_seeds_and_indices() -> None:
    n = 1 << 16
    along_index = uniform(torch.full((n,), 42), torch.arange(n))
    along_seed = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    for values in (along_index, along_seed):
        counts = torch.histc(values, bins=64, min=0, max=1)
        chi_square = float(((counts - n / 64) ** 2 / (n / 64)).sum())
        assert chi_square < 63 + 5 * math.sqrt(2 * 63)
        centred = values - 0.5
        assert abs(float((centred[1:] * centred[:-1]).mean())) < 5 / 12 / math.sqrt(n)


# --- distributions -----------------------------------------------------------------------------


def filtered(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The textbook distribution in float64."""
    p = (logits.double() / sampling.temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass, total, head = 0.0, float(p[kept].sum()), []
    for token in kept:
        if sampling.top_p < 1 and head and mass >= sampling.top_p * total:
            break
        head.append(token)
        mass += float(p[token])
    best = float(p[order[0]])
    head = [token for token in head if float(p[token]) >= sampling.min_p * best] or order[:1]
    result = torch.zeros_like(p)
    result[head] = p[head]
    return result / result.sum()


DISTRIBUTIONS = {
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_k=9, top_p=0.85, min_p=0.08),
}


@pytest.mark.parametrize("sampling", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_frequencies_follow_the_exact_distribution(sampling: SamplingParams) -> None:
    logits = random_logits(3, vocab=12, scale=1.0)
    expected = filtered(logits, sampling)
    draws = 6000
    rows = [Row(logits, replace(sampling, seed=seed)) for seed in range(draws)]
    counts = torch.bincount(torch.tensor(tokens_of(rows)), minlength=12).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    degrees = int(possible.sum()) - 1
    wanted = expected[possible] * draws
    chi_square = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees) + 4


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 127, 129, 2500])
def test_candidates_are_exact_far_beyond_the_first_ranking(top_k: int, top_p: float) -> None:
    """Few ranked tokens or many: a draw at the very end of the CDF finds the last candidate."""
    logits = random_logits(5, scale=0.5)
    sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    allowed = set(torch.nonzero(filtered(logits, sampling)).flatten().tolist())
    drawn = tokens_of([Row(logits, replace(sampling, seed=seed)) for seed in range(400)])
    assert set(drawn) <= allowed
    assert len(set(drawn)) >= min(len(allowed), 60)


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids() -> None:
    logits = torch.zeros(500)
    rows = [Row(logits, SamplingParams(top_k=3, seed=seed)) for seed in range(200)]
    assert set(tokens_of(rows)) == {0, 1, 2}
    rows = [Row(logits, SamplingParams(top_p=0.01, seed=seed)) for seed in range(200)]
    assert set(tokens_of(rows)) == {0, 1, 2, 3, 4}


# --- rows are alone ----------------------------------------------------------------------------


def zoo() -> list[Row]:
    """Rows with every parameter, some of them together."""
    samplings = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=42),
        replace(GREEDY, repetition_penalty=2.0, num_logprobs=3),
        SamplingParams(temperature=1.0, top_k=1, seed=1),
        SamplingParams(temperature=1.0, top_k=50, seed=2, num_logprobs=0),
        SamplingParams(temperature=1.5, seed=3, num_logprobs=20),
        SamplingParams(temperature=1.5, top_p=0.9999, seed=4),
        SamplingParams(temperature=1.0, top_p=0.1, min_p=0.2, seed=5),
        replace(GREEDY, presence_penalty=2.0, frequency_penalty=-1.0),
        SamplingParams(logit_bias=((7, 3.0), (2999, 5.0)), seed=6, num_logprobs=2),
        replace(GREEDY, min_tokens=9),
        SamplingParams(temperature=1e-6, min_p=0.5, top_p=0.0001),
    ]
    rows = []
    for index, sampling in enumerate(samplings):
        logits = random_logits(index)
        best = logits.topk(4).indices.tolist()
        rows.append(
            Row(
                logits,
                sampling,
                prompt=(best[0], 5, *range(index)),
                output=(best[1], best[1], best[2])[: index % 4],
                stop_ids=(best[0], best[3]) if sampling.min_tokens else (),
            )
        )
    return rows


def test_row_alone_equals_row_in_any_batch() -> None:
    """B082 B083 B088: tokens and logprobs to the last bit, in every order of the batch."""
    rows = zoo()
    alone = [sample([row]) for row in rows]
    shuffle = random.Random(1)
    for _ in range(20):
        order = shuffle.sample(range(len(rows)), shuffle.randint(2, len(rows)))
        batch = sample([rows[i] for i in order])
        assert batch.token_ids.tolist() == [alone[i].token_ids.item() for i in order]
        wanted = [i for i in order if rows[i].sampling.num_logprobs is not None]
        assert [order[row] for row in batch.logprob_rows] == wanted
        for place, i in enumerate(wanted):
            expected, count = alone[i].logprobs, rows[i].sampling.num_logprobs
            assert batch.logprobs.chosen[place] == expected.chosen[0]
            assert torch.equal(batch.logprobs.top[place, :count], expected.top[0])
            assert torch.equal(batch.logprobs.top_ids[place, :count], expected.top_ids[0])


def test_greedy_takes_the_lowest_tied_id_among_random_rows() -> None:
    """B088: 200 times; the hot row varies, top_k of one row stays there."""
    tied = torch.tensor([1.0, 1.0, 0.0])
    seen: Counter[tuple[str, int]] = Counter()
    for seed in range(200):
        rows = {
            "greedy": Row(tied),
            "hot": Row(tied, SamplingParams(temperature=1.5, seed=seed)),
            "one": Row(tied, SamplingParams(temperature=1.5, top_k=1, seed=seed)),
            "fifty": Row(tied, SamplingParams(temperature=1.5, top_k=50, seed=seed)),
        }
        seen.update(zip(rows, tokens_of(list(rows.values())), strict=True))
    assert seen["greedy", 0] == seen["one", 0] == 200
    for token in range(3):
        assert seen["hot", token] > 20
        assert seen["fifty", token] > 20


def test_greedy_row_with_masked_logits_stays_finite_beside_a_random_row() -> None:
    """B035: -inf is never divided by a temperature that the row does not have."""
    masked = torch.full((VOCAB,), -torch.inf)
    masked[[17, 400]] = torch.tensor([-3.0, -2.0])
    neighbour = Row(random_logits(1), SamplingParams(top_p=0.9, seed=1))
    result = sample([Row(masked, replace(GREEDY, num_logprobs=3)), neighbour])
    assert result.token_ids[0] == 400
    assert result.peaks.isfinite().all()
    assert not result.logprobs.top.isnan().any()
    drawn = tokens_of([Row(masked, SamplingParams(seed=seed)) for seed in range(50)])
    assert set(drawn) == {17, 400}


def test_broken_row_is_told_apart_and_harms_nobody() -> None:
    healthy = zoo()
    expected = tokens_of(healthy)
    for value in (torch.nan, torch.inf):
        broken = random_logits(9).index_fill(0, torch.tensor([5]), value)
        for sampling in (
            GREEDY,
            SamplingParams(),
            SamplingParams(top_p=0.5),
            SamplingParams(min_p=0.1),
        ):
            result = sample([Row(broken, replace(sampling, num_logprobs=2)), *healthy])
            assert not result.peaks[0].isfinite()
            assert result.peaks[1:].isfinite().all()
            assert result.token_ids[1:].tolist() == expected
            assert 0 <= result.token_ids[0] < VOCAB


# --- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-8, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_tiny_temperature_equals_greedy(temperature: float, scale: float) -> None:
    """B032: whatever the size of the logits, without NaN."""
    for seed in range(20):
        logits = random_logits(seed, scale=scale)
        sampling = SamplingParams(temperature=temperature, top_p=0.0001, seed=seed)
        result = sample(
            [Row(logits), Row(logits, sampling), Row(logits, replace(sampling, top_p=1.0))]
        )
        assert set(result.token_ids.tolist()) == {int(logits.argmax())}
        assert result.peaks.isfinite().all()


@pytest.mark.parametrize("top_k", [9999999, 0, -1, VOCAB, VOCAB + 1])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    """B034"""
    for seed in range(20):
        row = Row(random_logits(seed), SamplingParams(seed=seed))
        other = replace(row, sampling=replace(row.sampling, top_k=top_k))
        assert tokens_of([row]) == tokens_of([other])


def test_filters_never_leave_a_row_without_candidates() -> None:
    """B034: top_p 0 is greedy; min_p 1 (or beyond) leaves the best and its equals."""
    logits = random_logits(0)
    for sampling in (
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=-0.1),
        SamplingParams(top_p=1e-300),
        SamplingParams(min_p=1.0),
        SamplingParams(min_p=1.5),
        SamplingParams(top_k=50, top_p=0.0, min_p=1.5),
    ):
        assert tokens_of([Row(logits, sampling)]) == [int(logits.argmax())]


def test_penalties_match_their_formulas() -> None:
    logits = torch.tensor([2.0, -1.0, 3.0, 0.5, 1.0, -2.0])
    sampling = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias=((4, 0.75), (0, -1.0)),
        num_logprobs=6,
    )
    row = Row(logits, sampling, prompt=(0, 1, 1), output=(2, 2, 5))
    expected = torch.tensor(
        [
            2.0 / 1.5 - 1.0,  # prompt only: repetition, then bias
            -1.0 * 1.5,
            3.0 / 1.5 - 0.5 * 2 - 0.25,
            0.5,
            1.0 + 0.75,
            -2.0 * 1.5 - 0.5 - 0.25,
        ]
    ).log_softmax(0)
    result = sample([row]).logprobs
    assert result.top_ids[0].tolist() == expected.argsort(descending=True).tolist()
    torch.testing.assert_close(result.top[0], expected.sort(descending=True).values)


def test_penalties_never_count_padding_or_a_neighbour() -> None:
    """B083: the table's unused columns are full of token 2, which must not be punished."""
    logits = torch.tensor([0.0, 1.0, 5.0, 4.9])
    penalised = Row(
        logits, replace(GREEDY, repetition_penalty=2.0, presence_penalty=2.0), prompt=(0,)
    )
    longer = Row(logits, GREEDY, prompt=(2, 2, 2, 2, 2), output=(3,) * 9)
    for rows in ([penalised, longer], [longer, penalised], [penalised], [longer]):
        assert set(tokens_of(rows)) == {2}


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1)], ids=["greedy", "random"])
def test_min_tokens_bans_every_stop_id_and_nothing_else(
    min_tokens: int, sampling: SamplingParams
) -> None:
    """B085: two EOS ids forced by bias; a prompt longer than min_tokens; the last id untouched."""
    stop_ids, last = (3, 8), 11
    bias = ((3, 100.0), (8, 90.0), (last, 50.0))
    for generated in range(6):
        row = Row(
            torch.zeros(12),
            replace(sampling, min_tokens=min_tokens, logit_bias=bias),
            prompt=(1, 2, 4, 5, 6),
            output=(last,) * generated,
            stop_ids=stop_ids,
        )
        no_stops = replace(row, stop_ids=())  # ignore_eos
        expected = last if generated < min_tokens else 3
        assert tokens_of([row, no_stops, row]) == [expected, 3, expected]


def test_padded_ids_are_beyond_every_choice() -> None:
    """B026"""
    logits = random_logits(0)
    logits[2000:] += 100
    rows = [Row(logits, replace(row.sampling, num_logprobs=20), stop_ids=(2500,)) for row in zoo()]
    result = sample(rows, vocab_limit=2000)
    assert result.token_ids.max() < 2000
    assert result.logprobs.top_ids.max() < 2000


# --- log-probabilities -------------------------------------------------------------------------


def test_logprobs_describe_the_distribution_before_temperature() -> None:
    logits = random_logits(4)
    hot = SamplingParams(temperature=1.9, top_k=3, num_logprobs=5, seed=8)
    result = sample([Row(logits, hot)])
    expected = logits.double().log_softmax(0)
    token = result.token_ids.item()
    assert abs(float(result.logprobs.chosen[0]) - float(expected[token])) < 1e-6
    assert result.logprobs.top_ids[0].tolist() == expected.topk(5).indices.tolist()


def test_equal_alternatives_come_by_ascending_id() -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, -1.0, 0.0, -torch.inf, -1.0]])
    assert ranked_ids(logits, 8).tolist() == [[1, 3, 0, 2, 5, 4, 7, 6]]


def test_masked_token_has_minus_infinity_and_spoils_no_other() -> None:
    """B077"""
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    result = Logprobs.of(logits, torch.tensor([2]), num_top=3)
    assert result.chosen.item() == -torch.inf
    expected = torch.tensor([1.0, 0.0, -torch.inf]).log_softmax(0)
    torch.testing.assert_close(result.top[0], expected)


def test_no_alternatives_beyond_the_vocabulary() -> None:
    """B041: the count is bounded here too, whatever was asked for."""
    result = Logprobs.of(torch.zeros((2, 7)), torch.tensor([0, 6]), num_top=10**9)
    assert result.top_ids.tolist() == [list(range(7))] * 2
    assert Logprobs.of(torch.zeros((2, 7)), torch.tensor([0, 6]), num_top=0).top.shape == (2, 0)


@pytest.mark.parametrize("width", [5, 1024, 49152, 151937])
def test_row_sums_do_not_depend_on_the_number_of_rows(width: int) -> None:
    values = torch.rand((3, width), generator=torch.Generator().manual_seed(width))
    together = row_sums(values)
    assert torch.equal(torch.cat([row_sums(row[None]) for row in values]), together)
    torch.testing.assert_close(together, values.double().sum(1), rtol=1e-6, atol=0)
