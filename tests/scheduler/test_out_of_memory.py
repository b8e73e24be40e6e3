"""A plan the engine has no memory for: it never was, smaller ones follow, and room comes back."""

from __future__ import annotations

import pytest

from scheduler.room import Room
from scheduler.types import FinishReason
from tests.simulation.rig import GREEDY, Rig


def test_room_halves_and_comes_back_later_after_each_refusal() -> None:
    room = Room(64)
    waited = []
    for _ in range(4):
        room.refuse(64)
        assert room.tokens == 32
        steps = 0
        while room.tokens < 64:
            room.fit()
            steps += 1
        waited.append(steps)
    assert waited == [8, 16, 32, 64], "each refusal costs more steps than the one before"


def test_room_is_patient_again_after_a_long_time_without_a_refusal() -> None:
    room = Room(64)
    for _ in range(6):
        room.refuse(64)
    for _ in range(5000):
        room.fit()
    room.refuse(64)
    steps = 0
    while room.tokens < 64:
        room.fit()
        steps += 1
    assert steps == 8


def test_room_comes_back_soon_when_what_asked_for_too_much_is_gone() -> None:
    room = Room(64)
    for _ in range(6):
        room.refuse(room.tokens)
    room.relieve()
    for _ in range(6 * 4):
        room.fit()
    assert room.tokens == 64


def test_room_never_falls_below_a_token() -> None:
    room = Room(8)
    for _ in range(10):
        room.refuse(room.tokens)
    assert room.tokens == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_shortage_costs_a_moment_and_no_request(depth: int) -> None:
    rig = Rig(depth=depth, max_step_tokens=32)
    for i in range(8):
        rig.add([i % 5] * 9, max_tokens=20)
    for _ in range(6):
        rig.step()
    rig.memory = 3
    for _ in range(30):
        rig.step()
    assert rig.num_refused > 0
    assert max(sum(plan.lengths) for plan in rig.plans[-5:]) <= 3
    rig.memory = 1 << 20
    rig.run()
    assert rig.reasons() == {FinishReason.LENGTH: 8}
    assert sum(stats.num_refused_steps for stats in rig.stats) == rig.num_refused
    assert sum(stats.num_preemptions for stats in rig.stats) == sum(
        answer.finished.num_preemptions for answer in rig.answers.values()
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_long_prompts_get_through_however_often_room_is_tried(prefix_caching: bool) -> None:
    """Without a prefix cache a refusal costs a prompt all it had; refusals become rare."""
    rig = Rig(
        num_blocks=400,
        max_step_tokens=64,
        prefix_caching=prefix_caching,
    )
    rig.memory = 10
    for i in range(3):
        rig.add([i + 1] * 300, max_tokens=5, sampling=GREEDY)
    rig.run()
    assert rig.reasons() == {FinishReason.LENGTH: 3}
    assert rig.num_refused < 60


def test_nothing_of_a_refused_plan_is_a_prefix_hit() -> None:
    rig = Rig(max_step_tokens=64)
    rig.memory = 0
    rig.add([1] * 30)
    rig.plan()
    assert rig.num_refused == 1
    assert rig.scheduler.batch.pool.num_cached == rig.scheduler.batch.pool.num_referenced == 0
    rig.memory = 1 << 20
    rig.run()
    assert rig.reasons() == {FinishReason.LENGTH: 1}


def test_what_entered_with_a_refused_plan_alone_has_not_begun() -> None:
    """Its time in the queue goes on, what the plan would have found is no hit, it can be late."""
    rig = Rig(max_step_tokens=64, block_size=4)
    wave = [rig.add(range(20), deadline=deadline) for deadline in (None, None, 5.0)]
    rig.memory = 0
    for _ in range(2):
        rig.plan()
    assert rig.num_refused == 2
    assert not any(sequence.has_begun for sequence in rig.scheduler.sequences.values())
    rig.clock.advance_to(5.0)
    assert [event.reason for event in rig.expire()] == [FinishReason.EXPIRED]
    rig.memory = 1 << 20
    rig.run()
    firsts = [rig.answers[request.id].first for request in wave[:2]]
    assert all(first.scheduled_at >= 5.0 for first in firsts if first)
    assert [first.cached_tokens for first in firsts if first] == [0, 16]
    assert sum(stats.prefix_queries for stats in rig.stats) == 40
    assert sum(stats.prefix_hits for stats in rig.stats) == 16
