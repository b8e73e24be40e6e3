"""What sequences share: cached prefixes, prefixes in the making, and what must not be shared."""

from __future__ import annotations

import pytest

from scheduler.types import SamplingParams
from tests.simulation.rig import Rig


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed + 1) * (i * i + 7) % 101 for i in range(count)]


def cached_tokens(rig: Rig, request_id: str) -> int:
    first = rig.answers[request_id].first
    assert first is not None
    return first.cached_tokens


def test_turns_of_a_chat_compute_only_what_is_not_cached() -> None:
    """B097: chunk 512; turns of 480, 500 and 560 tokens that share their beginning."""
    rig = Rig(num_blocks=128, block_size=16, max_step_tokens=512)
    text = tokens(560)
    for length, cached in ((480, 0), (500, 480), (560, 496)):
        request = rig.add(text[:length], 1)
        rig.run()
        assert cached_tokens(rig, request.id) == cached
        assert rig.num_computed(request.id) == length - cached
    assert sum(s.prefix_queries for s in rig.stats) == 480 + 500 + 560
    assert sum(s.prefix_hits for s in rig.stats) == 480 + 496


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_full_hit_still_computes_the_last_token(length: int) -> None:
    """B097: a prompt that is cached to its end has a row of at least one token."""
    rig = Rig(block_size=16)
    for _ in range(2):
        request = rig.add(tokens(length), 2)
        rig.run()
    assert cached_tokens(rig, request.id) == (length - 1) // 16 * 16


def test_answer_is_cached_for_the_next_turn() -> None:
    rig = Rig(block_size=4)
    first = rig.add(tokens(6), 7)
    rig.run()
    answer = rig.answers[first.id].token_ids
    second = rig.add([*tokens(6), *answer, 1, 2, 3], 2)
    rig.run()
    assert cached_tokens(rig, second.id) == 12  # of 6 + 7 tokens the last was never fed back


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_step_tokens", [256, 1024, 4096])
def test_prefix_of_a_wave_is_computed_once(depth: int, max_step_tokens: int) -> None:
    """16 requests with 1,024 common tokens arrive together."""
    rig = Rig(
        num_blocks=512,
        block_size=16,
        max_step_tokens=max_step_tokens,
        max_running=16,
        depth=depth,
    )
    common = tokens(1024)
    requests = [rig.add([*common, *tokens(40, seed=i + 2)], 3) for i in range(16)]
    rig.run()
    prefilled = sum(rig.num_computed(request.id) for request in requests) - 16 * 2
    assert prefilled == 1024 + 16 * 40


def test_those_who_wait_for_a_prefix_do_not_stop_others() -> None:
    rig = Rig(num_blocks=64, block_size=4, max_step_tokens=16)
    rig.add(tokens(64), 1)
    follower = rig.add([*tokens(64), 5], 1)
    other = rig.add(tokens(8, seed=3), 1)
    rig.step()
    assert not rig.scheduler.sequences[follower.id].is_running
    assert rig.num_computed(other.id) > 0
    rig.run()
    assert cached_tokens(rig, follower.id) == 64


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    rig = Rig(num_blocks=64, block_size=4, max_step_tokens=16)
    leader = rig.add(tokens(64), 1)
    follower = rig.add(tokens(64), 1)
    rig.step()
    rig.abort(leader.id)
    rig.run()
    assert cached_tokens(rig, follower.id) == 16
    assert rig.num_computed(follower.id) == 48


def test_waiting_holds_no_cached_block() -> None:
    """B101: what a waiting request could share may be evicted; it looks again when it enters."""
    rig = Rig(num_blocks=16, block_size=4, max_running=1)
    rig.add(tokens(16), 1)
    rig.run()
    rig.add(tokens(60, seed=1), 4)  # takes all 16 blocks
    rig.step()
    late = rig.add([*tokens(16), 9], 3)
    assert rig.scheduler.batch.pool.num_referenced == 15
    rig.run()
    assert cached_tokens(rig, late.id) == 0


def test_found_blocks_are_not_evicted_by_the_entry_that_found_them() -> None:
    """B101: shared first, then taken."""
    rig = Rig(num_blocks=8, block_size=4)
    rig.add(tokens(16), 1)
    rig.run()
    rig.add(tokens(12, seed=1), 1)
    rig.run()  # the first prefix is now the older of two
    late = rig.add([*tokens(16), *tokens(12, seed=2)], 3)
    rig.run()
    assert cached_tokens(rig, late.id) == 16


@pytest.mark.parametrize("other", [b"tenant-b", b"", b"tenant-a\x00", b"x" * 1_000_000])
def test_namespaces_share_nothing(other: bytes) -> None:
    """B103, B152: an equal prompt under another tenant, adapter or salt computes all of it."""
    rig = Rig(block_size=4)
    for namespace, cached in ((b"tenant-a", 0), (other, 0), (b"tenant-a", 16)):
        request = rig.add(tokens(20), 2, cache_namespace=namespace)
        rig.run()
        assert cached_tokens(rig, request.id) == cached


@pytest.mark.parametrize("num_bits", [0, 1, 4])
def test_colliding_hashes_never_mix_prompts(num_bits: int) -> None:
    """B103: a hash of a few bits collides all the time; the engine checks what is read."""
    rig = Rig(
        num_blocks=24,
        block_size=2,
        max_running=4,
        digest=lambda data: bytes([sum(data) % 2**num_bits]),
    )
    for i in range(30):
        rig.add(tokens(9, seed=i % 4), 3)
        rig.step()
    rig.run()


def test_prompt_logprobs_compute_every_position_and_come_once() -> None:
    """B080: also on the second, identical call, in chunks, and after a preemption."""
    rig = Rig(num_blocks=12, block_size=4, max_step_tokens=10)
    params = SamplingParams(prompt_logprobs=0)
    for max_tokens in (0, 1):
        request = rig.add(tokens(24), max_tokens, sampling=params)
        rig.run()
        assert rig.num_computed(request.id) == 24
        assert rig.answers[request.id].num_prompt_logprobs == 23
        assert len(rig.answers[request.id].token_ids) == max_tokens
    older = rig.add(tokens(13, seed=1), 30)
    preempted = rig.add(tokens(24), 4, sampling=params)
    rig.run()
    assert rig.answers[preempted.id].num_prompt_logprobs == 23
    assert rig.answers[older.id].finished.num_preemptions == 0  # type: ignore[union-attr]


def test_what_a_failed_row_wrote_is_not_found() -> None:
    rig = Rig(block_size=4, max_step_tokens=8)
    failed = rig.add(tokens(16), 1)
    rig.step()
    rig.failing.add(failed.id)
    rig.step()
    again = rig.add(tokens(16), 1)
    rig.run()
    assert rig.answers[failed.id].finished.message == "injected"  # type: ignore[union-attr]
    assert cached_tokens(rig, again.id) == 8


def test_nothing_is_cached_after_the_engine_failed() -> None:
    rig = Rig(block_size=4)
    rig.add(tokens(16), 1)
    rig.run()
    rig.scheduler.fail_all("gone", rig.clock())
    again = rig.add(tokens(16), 1)
    rig.run()
    assert cached_tokens(rig, again.id) == 0


def test_without_the_cache_nothing_is_looked_up_or_kept() -> None:
    rig = Rig(block_size=4, prefix_caching=False)
    for _ in range(2):
        request = rig.add(tokens(16), 1)
        rig.run()
        assert rig.num_computed(request.id) == 16
    assert sum(s.prefix_queries for s in rig.stats) == 0
    assert rig.scheduler.batch.pool.num_cached == 0


def test_nobody_waits_for_a_prefix_without_the_cache() -> None:
    rig = Rig(block_size=4, prefix_caching=False)
    rig.add(tokens(8), 1)
    rig.add(tokens(8), 1)
    plan = rig.step()
    assert plan is not None
    assert len(plan.seq_ids) == 2
