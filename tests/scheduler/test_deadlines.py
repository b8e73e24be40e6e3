"""What has no slot by its deadline is not begun any more, and holds nothing."""

from __future__ import annotations

from scheduler.deadlines import Deadlines
from scheduler.types import Finished, FinishReason
from tests.simulation.rig import Rig


def reason(rig: Rig, request_id: str) -> FinishReason | None:
    finished = rig.answers[request_id].finished
    return None if finished is None else finished.reason


def test_late_request_ends_without_a_step() -> None:
    rig = Rig(max_running=1)
    rig.add([1] * 4, 10)
    late = rig.add([2] * 4, 10, deadline=3.0)
    for _ in range(3):
        rig.step()
    assert reason(rig, late.id) is None
    rig.step()
    assert reason(rig, late.id) is FinishReason.EXPIRED
    assert rig.num_computed(late.id) == 0
    assert rig.scheduler.places.num_taken == 1
    rig.run()


def test_what_has_begun_goes_on_past_its_deadline() -> None:
    rig = Rig()
    begun = rig.add([1] * 4, 10, deadline=2.0)
    rig.run()
    assert reason(rig, begun.id) is FinishReason.LENGTH


def test_preempted_request_has_begun() -> None:
    rig = Rig(num_blocks=8, block_size=4, max_step_tokens=32, prefix_caching=False)
    rig.add(range(8), 20)
    younger = rig.add(range(8), 10, deadline=1.0)
    rig.run()
    assert rig.num_preemptions > 0
    assert reason(rig, younger.id) is FinishReason.LENGTH


def test_choices_of_one_prompt_begin_together_or_not_at_all() -> None:
    rig = Rig(max_running=1)
    first, second = rig.add_group(2, [1] * 4, 5, deadline=1.0)
    rig.run()
    assert reason(rig, first.id) is reason(rig, second.id) is FinishReason.LENGTH
    rig.add([3] * 4, 10)
    rig.step()
    group = rig.add_group(2, [2] * 4, 5, deadline=rig.clock() + 1)
    rig.run()
    assert {reason(rig, request.id) for request in group} == {FinishReason.EXPIRED}


def test_deadline_in_the_past_is_never_begun() -> None:
    rig = Rig()
    late = rig.add([1] * 4, 5, deadline=0.0)
    assert rig.step() is None
    assert reason(rig, late.id) is FinishReason.EXPIRED


def test_aborted_request_does_not_expire() -> None:
    rig = Rig(max_running=1)
    rig.add([1] * 4, 5)
    gone = rig.add([2] * 4, 5, deadline=2.0)
    rig.abort(gone.id)
    rig.run()
    assert reason(rig, gone.id) is FinishReason.ABORT


def test_events_of_a_turn_come_in_the_order_of_deadlines() -> None:
    rig = Rig(max_running=1)
    rig.add([1] * 4, 5)
    ids = [rig.add([2 + i] * 4, 5, deadline=at).id for i, at in enumerate((3.0, 1.0, 2.0))]
    rig.step()
    rig.clock.advance_to(10.0)
    events = rig.expire()
    ended = [event.request_id for event in events if isinstance(event, Finished)]
    assert ended == [ids[1], ids[2], ids[0]]
    rig.run()


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(1e9 + number, str(number))
        deadlines.forget({str(number)}, 1)
    assert len(deadlines) < 300
    assert deadlines.due(1e9 + 20_000)[-1] == "9999"
