"""When blocks run out: who gives way, who comes back when, and that it all ends."""

from __future__ import annotations

import pytest

from scheduler.policy import Priority
from scheduler.types import FinishReason
from tests.simulation.rig import Rig


def finished_at(rig: Rig, request_id: str) -> float:
    finished = rig.answers[request_id].finished
    assert finished is not None
    return finished.finished_at


def preemptions(rig: Rig, request_id: str) -> int:
    finished = rig.answers[request_id].finished
    assert finished is not None
    return finished.num_preemptions


@pytest.mark.parametrize("depth", [0, 1])
def test_two_prompts_that_do_not_fit_together_both_finish(depth: int) -> None:
    """B092: 40 blocks; two prompts of 30 blocks each arrive together, then more."""
    rig = Rig(num_blocks=40, block_size=4, max_step_tokens=16, prefix_caching=False, depth=depth)
    for i in range(2):
        rig.add([i] * 118, 6)
    for i in range(4):
        rig.add([i] * 20, 6)
    rig.run(max_steps=200)
    assert rig.reasons() == {FinishReason.LENGTH: 6}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_pressure_never_stops_the_line(depth: int, prefix_caching: bool) -> None:
    """B094: a pool for 2.5 requests, eight of them, long answers."""
    rig = Rig(
        num_blocks=25, block_size=4, max_step_tokens=32, depth=depth, prefix_caching=prefix_caching
    )
    requests = [rig.add([i] * 8, 32) for i in range(8)]
    rig.run(max_steps=8 * 40)
    assert rig.num_preemptions > 0
    assert preemptions(rig, requests[0].id) == 0, "the oldest gives way to nobody"
    assert max(preemptions(rig, r.id) for r in requests) <= 8
    assert all(plan.lengths for plan in rig.plans)
    finished = [finished_at(rig, r.id) for r in requests]
    assert finished == sorted(finished), "equal requests finish in the order of arrival"


def test_preempted_goes_before_newcomers_and_finishes_within_a_bound() -> None:
    """B095: short requests arrive all the time; one long answer under pressure."""
    rig = Rig(num_blocks=40, block_size=4, max_step_tokens=32, max_running=8)
    long = rig.add(range(8), 140)
    for i in range(300):
        if i % 3 == 0 and rig.answers[long.id].finished is None:
            rig.add([i % 50] * 10, 20)
        rig.step()
    assert rig.answers[long.id].finished is not None
    assert preemptions(rig, long.id) == 0
    rig.run()
    shares = (
        sum(s.num_recomputed_tokens for s in rig.stats),
        sum(s.num_prefill_tokens for s in rig.stats),
    )
    assert 0 < shares[0] < shares[1]


def test_preempted_answer_keeps_its_tokens_and_its_times() -> None:
    """B118: preempted after some tokens, counted and timed once."""
    rig = Rig(num_blocks=8, block_size=4, max_step_tokens=32, prefix_caching=False)
    rig.add(range(8), 20)
    younger = rig.add(range(8), 10)
    rig.run()
    answer = rig.answers[younger.id]
    assert preemptions(rig, younger.id) > 0
    assert len(answer.token_ids) == 10
    assert answer.first is not None
    assert answer.first.scheduled_at == 0.0
    assert answer.first.sampled_at == 1.0
    recomputed = sum(s.num_recomputed_tokens for s in rig.stats)
    assert recomputed == rig.num_computed(younger.id) - (8 + 9)
    re_entry = [a for p in rig.plans for a in p.admissions if len(a.token_ids) > 8]
    assert {a.num_prompt_tokens for a in re_entry} == {8}


def test_preemption_at_depth_one_waits_for_the_token_on_its_way() -> None:
    """DESIGN's invariant 8."""
    rig = Rig(num_blocks=6, block_size=2, max_step_tokens=32, depth=1, prefix_caching=False)
    rig.add(range(3), 9)
    rig.add(range(3), 6)
    rig.run()
    assert rig.num_preemptions > 0


def test_watermark_is_kept_only_while_something_runs() -> None:
    rig = Rig(num_blocks=10, block_size=4, watermark_blocks=4)
    rig.add([1] * 38, 1)
    late = rig.add([2] * 8, 1)
    plan = rig.step()
    assert plan is not None
    assert late.id not in plan.seq_ids
    rig.add([3] * 20, 3)
    rig.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_urgent_request_takes_the_place_of_lower_ones(depth: int) -> None:
    """B112: priority -10 needs the full pool while priority 0 runs."""
    rig = Rig(num_blocks=12, block_size=4, policy=Priority(30.0), depth=depth, max_step_tokens=48)
    low = [rig.add([i] * 8, 12) for i in range(3)]
    for _ in range(3):
        rig.step()
    high = rig.add([9] * 40, 8, priority=-10)
    rig.run()
    assert preemptions(rig, high.id) == 0
    assert all(finished_at(rig, high.id) < finished_at(rig, r.id) for r in low)


def test_urgent_request_takes_a_slot_if_there_is_no_other() -> None:
    rig = Rig(max_running=2, policy=Priority())
    low = [rig.add([i], 20) for i in range(2)]
    rig.step()
    high = rig.add([9], 2, priority=-1)
    rig.step()
    assert rig.scheduler.sequences[high.id].is_running
    rig.run()
    assert [preemptions(rig, r.id) for r in low] == [0, 1]


def test_equal_class_and_fcfs_never_push_out_the_running() -> None:
    for policy, priority in ((Priority(), 0), (None, -10)):
        rig = Rig(max_running=2, policy=policy)
        for i in range(2):
            rig.add([i], 5)
        rig.step()
        rig.add([9], 2, priority=priority)
        rig.run()
        assert rig.num_preemptions == 0


def test_low_priority_ages_and_finishes_under_a_stream_of_urgent_ones() -> None:
    """B112: priority -1 arrives all the time; 0 has its turn after the head start of one."""
    rig = Rig(max_running=2, policy=Priority(ageing_seconds=30.0))
    low = rig.add([1, 2, 3], 5)
    for i in range(120):
        rig.add([i % 20], 3, priority=-1)
        rig.step()
    assert rig.answers[low.id].finished is not None
    assert finished_at(rig, low.id) < 60.0
    rig.run()


@pytest.mark.parametrize("priority", [2**63, -(2**63)])
def test_extreme_priority_keeps_the_line_sorted(priority: int) -> None:
    """B112."""
    rig = Rig(policy=Priority())
    rig.add([1], 2, priority=priority)
    rig.add([2], 2)
    rig.run()
