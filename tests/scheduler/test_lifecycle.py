"""From Submit to Finished: each request ends once, whatever happens on the way."""

from __future__ import annotations

import random

import pytest

from scheduler.types import FinishReason, SamplingParams, StepStats, Tokens
from tests.simulation.rig import Rig


@pytest.mark.parametrize("depth", [0, 1])
def test_late_aborts_are_ignored_and_each_request_ends_once(depth: int) -> None:
    """B107: answers of 1 to 3 tokens, each client hangs up around the end."""
    draw = random.Random(107)
    rig = Rig(depth=depth, block_size=4, max_running=8)
    for i in range(1000):
        rig.add([i % 13] * (i % 5 + 1), i % 3 + 1)
        rig.step()
        for request_id in draw.sample(list(rig.answers)[-12:], min(2, len(rig.answers))):
            if draw.random() < 0.3:
                rig.abort(request_id)
    rig.run()
    reasons = rig.reasons()
    assert sum(reasons.values()) == 1000
    assert reasons[FinishReason.ABORT] > 0
    assert reasons[FinishReason.LENGTH] > 0


def test_mass_disconnect_frees_everything_and_says_so_without_a_step() -> None:
    """B107, B115: 200 streams go at once; the gauges are right at the next word."""
    rig = Rig(num_blocks=300, max_running=100, max_step_tokens=200)
    requests = [rig.add([i % 20, i], 50) for i in range(200)]
    for _ in range(3):
        rig.step()
    rig.abort(*[r.id for r in requests])
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    rig.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_between_plan_and_result_drops_the_row(depth: int) -> None:
    """B104: all rows of a plan in flight lose their sequences; then nothing is left to plan."""
    rig = Rig(depth=depth)
    requests = [rig.add([i], 5) for i in range(3)]
    rig.plan()
    rig.abort(*[r.id for r in requests])
    events = rig.apply()
    assert [type(event) for event in events] == [StepStats]
    assert rig.plan() is None
    assert rig.plan() is None


def test_slot_and_blocks_are_reused_while_the_old_row_is_in_flight() -> None:
    rig = Rig(num_blocks=4, block_size=4, max_running=1, depth=1)
    old = rig.add(range(12), 4)
    rig.plan()
    rig.plan()
    rig.abort(old.id)
    new = rig.add([7] * 12, 4)
    rig.run()
    assert len(rig.answers[new.id].token_ids) == 4
    assert rig.answers[old.id].token_ids == []


@pytest.mark.parametrize("request_id", ["a\nb", "../x", "x" * 1_000_000, " "])
def test_any_unique_id_will_do(request_id: str) -> None:
    """B106: an id is a name and nothing else; it can come again once its request has ended."""
    rig = Rig()
    for _ in range(2):
        rig.answers.pop(request_id, None)
        rig.submit(rig.request([1, 2], 3, id=request_id))
        rig.add([1, 2], 3)
        rig.run()
        assert len(rig.answers[request_id].token_ids) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_generated_tokens_are_counted_from_the_first_and_once(depth: int) -> None:
    """B118: ten requests of one token; then one of ten tokens under pressure."""
    rig = Rig(depth=depth)
    for i in range(10):
        rig.add([i], 1)
    rig.run()
    assert sum(len(a.token_ids) for a in rig.answers.values()) == 10
    assert all(a.first is not None for a in rig.answers.values())


def test_every_step_has_its_stats_and_prefill_steps_too() -> None:
    """B121: three chunks of prompt, then decodes; n = 4 counts the prompt once."""
    rig = Rig(num_blocks=64, block_size=4, max_step_tokens=10)
    rig.add([1] * 30, 3)
    rig.run()
    assert [s.step for s in rig.stats] == list(range(1, len(rig.plans) + 1))
    assert [s.num_prefill_tokens for s in rig.stats] == [10, 10, 10, 0, 0]
    assert [s.num_decode_tokens for s in rig.stats] == [0, 0, 0, 1, 1]
    assert all(s.device_seconds == 1.0 for s in rig.stats)


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_token_ends_the_answer_and_is_named(depth: int) -> None:
    """B007's half of the scheduler: the stop token is counted, named, and the last."""
    rig = Rig(depth=depth, model=lambda _, tokens: len(tokens))
    request = rig.add([0, 0, 0], 10, stop_token_ids=(9, 6))
    rig.run()
    answer = rig.answers[request.id]
    assert answer.token_ids == [3, 4, 5, 6]
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.stop_token_id) == (FinishReason.STOP, 6)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 2), (4, 5)])
def test_min_tokens_come_before_a_stop_token_counts(min_tokens: int, expected: int) -> None:
    """B085: the prompt doesn't count, and neither does a stop id that comes too early."""
    rig = Rig(model=lambda *_: 5)
    params = SamplingParams(min_tokens=min_tokens)
    request = rig.add([0] * 9, 20, stop_token_ids=(5,), sampling=params)
    rig.run()
    assert len(rig.answers[request.id].token_ids) == expected


def test_stop_wins_over_length_at_the_last_token() -> None:
    rig = Rig(model=lambda *_: 5)
    request = rig.add([0], 1, stop_token_ids=(5,))
    rig.run()
    assert rig.answers[request.id].finished.reason is FinishReason.STOP  # type: ignore[union-attr]


def test_row_error_ends_its_request_alone() -> None:
    rig = Rig()
    failed, other = rig.add([1], 5), rig.add([2], 5)
    rig.step()
    rig.failing.add(failed.id)
    rig.run()
    finished = rig.answers[failed.id].finished
    assert finished is not None
    assert (finished.reason, finished.message) == (FinishReason.ERROR, "injected")
    assert len(rig.answers[other.id].token_ids) == 5


def test_failed_engine_ends_everybody_with_the_message() -> None:
    rig = Rig(max_running=2, depth=1)
    for i in range(5):
        rig.add([i], 5)
    rig.plan()
    events = rig._record(rig.scheduler.fail_all("out of memory", rig.clock()))
    assert [getattr(e, "message", None) for e in events[:-1]] == ["out of memory"] * 5
    assert rig.scheduler.idle
    assert rig.scheduler.batch.pool.num_available == rig.capacity.num_blocks


def test_same_commands_give_the_same_plans() -> None:
    """DESIGN's invariant 9."""

    def plans() -> list[object]:
        draw = random.Random(9)
        rig = Rig(num_blocks=16, depth=1)
        for i in range(60):
            rig.add([draw.randrange(3)] * draw.randrange(1, 12), 6, id=f"x{i}")
            rig.step()
            if i % 7 == 0:
                rig.abort(f"x{i - 3}")
        rig.run()
        return list(rig.plans)

    assert plans() == plans()


def test_tokens_of_a_request_carry_logprobs_of_its_own_rows() -> None:
    rig = Rig()
    asked = rig.add([1, 2], 3, sampling=SamplingParams(num_logprobs=1))
    plain = rig.add([1, 2, 3], 3)
    rig.plan()
    events = [event for event in rig.apply() if isinstance(event, Tokens)]
    for event in events:
        wanted = event.token_ids if event.request_id == asked.id else ()
        assert tuple(entry.token_id for entry in event.logprobs) == wanted
    assert {event.request_id for event in events} == {asked.id, plain.id}
    rig.run()
