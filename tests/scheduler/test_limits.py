"""The door, the queue, the step budget."""

from __future__ import annotations

import pytest

from scheduler.policy import max_total_tokens, never_fits
from scheduler.types import Drain, Event, Finished, FinishReason, KVCapacity, Request
from tests.simulation.rig import Rig


def refused(events: list[Event]) -> list[str]:
    return [e.message for e in events if isinstance(e, Finished)]


@pytest.mark.parametrize("length", [1007, 1008, 1009, 1022, 1023, 1024, 1025, 2000])
def test_what_cannot_fit_the_pool_is_refused_and_stops_nobody(length: int) -> None:
    """B089: 64 blocks x 16 under a context limit of 2048; then a short one."""
    rig = Rig(num_blocks=64, block_size=16, max_model_len=2048, max_step_tokens=512)
    events = rig.submit(rig.request(range(length), 1))
    assert bool(refused(events)) == (length + 1 > 1024)
    if refused(events):
        assert "1024" in refused(events)[0]
    short = rig.add(range(5), 3)
    rig.run()
    assert rig.answers[short.id].finished.reason is FinishReason.LENGTH  # type: ignore[union-attr]


@pytest.mark.parametrize("max_model_len", [40, 1000])
def test_every_length_is_refused_or_moves(max_model_len: int) -> None:
    """B091: around both limits; cancelled after two steps, then a short one finishes."""
    capacity = KVCapacity(10, 4, 8, max_model_len)
    limit = max_total_tokens(capacity)
    for length in range(limit - 12, limit + 5):
        for max_tokens in (0, 1, 2):
            rig = Rig(num_blocks=10, block_size=4, max_model_len=max_model_len)
            request = rig.request(range(length), max_tokens)
            events = rig.submit(request)
            assert bool(refused(events)) == never_fits(request, capacity)
            assert never_fits(request, capacity) == (length + max_tokens > limit)
            if not events:
                assert rig.step() is not None
                rig.abort(request.id)
            rig.add(range(3), 2)
            rig.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [16, 64, 128, 256, None])
@pytest.mark.parametrize("num_decodes", [0, 1, 7])
def test_budget_is_kept_and_each_prompt_token_computed_once(
    num_decodes: int, chunk: int | None, depth: int
) -> None:
    """B098: budget 128; prompts of B - 1, B, B + 1 and 2B + 1 beside running decodes."""
    for length in (127, 128, 129, 257):
        rig = Rig(
            num_blocks=256,
            block_size=16,
            max_step_tokens=128,
            max_chunk_tokens=chunk,
            prefix_caching=False,
            depth=depth,
        )
        for i in range(num_decodes):
            rig.add([i], 400)
        for _ in range(2 + num_decodes):
            rig.step()
        request = rig.add(range(length), 1)
        while rig.answers[request.id].finished is None:
            rig.step()
        rows = [
            (plan.lengths[row], plan.samples[row])
            for plan in rig.plans
            for row, seq_id in enumerate(plan.seq_ids)
            if seq_id == request.id
        ]
        assert sum(length for length, _ in rows) == length
        assert [sample for _, sample in rows] == [0] * (len(rows) - 1) + [1]
        assert max(sum(plan.lengths) for plan in rig.plans) <= 128
        if chunk is None:
            assert rows[0][0] == min(length, 128 - num_decodes), "nothing of the budget is wasted"


@pytest.mark.parametrize("depth", [0, 1])
def test_budget_smaller_than_the_batch_is_a_smaller_batch(depth: int) -> None:
    """Eight slots, three tokens a step: who decodes keeps its pace, the others follow."""
    rig = Rig(num_blocks=64, max_step_tokens=3, max_running=8, depth=depth)
    for i in range(8):
        rig.add([i, i], 12)
    rig.add_group(4, [9, 9, 9], 5)
    rig.run()
    gaps: dict[str, list[int]] = {}
    for plan in rig.plans:
        for row, request_id in enumerate(plan.seq_ids):
            if plan.samples[row]:
                gaps.setdefault(request_id, []).append(plan.step)
    for steps in gaps.values():
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_queue_takes_all_of_a_submit_or_none() -> None:
    """B109: room for two more; four come."""
    rig = Rig(max_running=2, max_waiting=4)
    rig.add_group(4, range(5))
    events = rig.submit(*[rig.request(range(5)) for _ in range(4)])
    assert refused(events) == ["too many requests are waiting"] * 4
    assert rig.submit(*[rig.request(range(5)) for _ in range(2)]) == []
    rig.run()


def test_draining_takes_nothing_new_and_finishes_the_rest() -> None:
    rig = Rig()
    rig.add(range(5), 4)
    assert not rig.scheduler.drained
    rig.scheduler.handle(Drain(), rig.clock())
    assert not rig.scheduler.drained
    assert refused(rig.submit(rig.request(range(5)))) == ["the server is shutting down"]
    rig.run()
    assert rig.scheduler.drained


def test_no_position_reaches_the_context_limit() -> None:
    rig = Rig(num_blocks=64, block_size=4, max_model_len=20)
    rig.add(range(10), 10)
    assert refused(rig.submit(rig.request(range(10), 11)))
    rig.run()
    assert max(s + n for p in rig.plans for s, n in zip(p.starts, p.lengths, strict=True)) == 19


def test_one_function_decides_what_fits() -> None:
    """B091: the pool, the context and the first token."""
    small_pool, short = KVCapacity(4, 4, 1, 100), KVCapacity(100, 4, 1, 12)
    assert max_total_tokens(small_pool) == 16
    assert max_total_tokens(short) == 12
    assert not never_fits(Request("a", tuple(range(16)), 0), small_pool)
    assert never_fits(Request("a", tuple(range(17)), 0), small_pool)
