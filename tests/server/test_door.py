"""The door: who gets a place, whose wait would be too long, and when to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.limits import SchedulerLimits
from scheduler.places import Refusal
from scheduler.types import Finished, FinishReason, Request, StepStats
from server.door import Door, QueueFull, Rates, WaitTooLong

LIMITS = SchedulerLimits(64, 60, 20, 0, num_tenants=2)
QUIET = StepStats(0, 0, 0, 0, 0, 0)


def request(name: str, tenant: str = "a", deadline: float | None = None) -> Request:
    return Request(name, (1,), 1, tenant=tenant, deadline=deadline)


class Clocked:
    """A door at which so many requests a second have ended."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.rates = Rates()
        self.door = Door(limits, self.rates)
        self.num_made = 0

    def enter(self, count: int, tenant: str = "a", deadline: float | None = None) -> list[str]:
        ids = []
        for _ in range(count):
            self.num_made += 1
            one = request(str(self.num_made), tenant, deadline)
            self.door.check([one], 0.0)
            self.door.enter([one])
            ids.append(one.id)
        return ids

    def end(self, ids: list[str], reason: FinishReason = FinishReason.STOP) -> None:
        """One a second, the last at 100, while others wait."""
        self.observe(1, 100.0 - len(ids))
        for index, request_id in enumerate(ids):
            at = 100.0 - len(ids) + 1 + index
            self.door.end(Finished(request_id, reason), at)

    def observe(self, num_waiting: int, now: float = 100.0, *, lane: str = "a") -> None:
        waiting = ((lane, num_waiting),) if num_waiting else ()
        stats = replace(QUIET, num_running=20, num_waiting=num_waiting, waiting=waiting)
        self.door.observe(stats, now)

    def check(self, tenant: str, patience: float) -> None:
        self.door.check([request("new", tenant, 100.0 + patience)], 100.0)


def test_flood_is_told_that_it_has_its_share_and_others_get_in() -> None:
    clocked = Clocked()
    clocked.enter(70)
    with pytest.raises(QueueFull, match="its share") as refused:
        clocked.enter(1)
    assert refused.value.refusal is Refusal.SHARE
    clocked.enter(10, "b")
    with pytest.raises(QueueFull, match="too many requests are waiting") as refused:
        clocked.enter(1, "b")
    assert refused.value.refusal is Refusal.FULL


def test_time_to_come_back_is_by_the_rate_of_ones_own() -> None:
    clocked = Clocked()
    clocked.end(clocked.enter(10))
    clocked.enter(70)
    with pytest.raises(QueueFull) as own:
        clocked.door.check([request("x")] * 4, 100.0)
    assert own.value.retry_after_seconds == pytest.approx(4.0, rel=0.2)


def test_wait_is_by_what_waits_in_the_same_lane() -> None:
    clocked = Clocked()
    clocked.end(clocked.enter(20))
    clocked.enter(60)
    clocked.observe(40)
    clocked.check("a", 25.0)  # about 40 s are not clearly more
    with pytest.raises(WaitTooLong) as refused:
        clocked.check("a", 10.0)
    assert refused.value.wait_seconds == pytest.approx(40.0, rel=0.2)
    assert refused.value.retry_after_seconds == pytest.approx(30.0, rel=0.2)
    clocked.check("b", 1.0)


@pytest.mark.parametrize("lane", ["", "a"])
def test_who_gives_up_first_is_in_nobodys_way(lane: str) -> None:
    """40 s of work wait, and are gone by 105: whoever has time until then is served after it."""
    clocked = Clocked()
    clocked.end(clocked.enter(20))
    clocked.enter(60, deadline=105.0)
    clocked.observe(40, lane=lane)
    clocked.check("a", 6.0)
    with pytest.raises(WaitTooLong) as refused:
        clocked.check("a", 4.5)
    assert refused.value.wait_seconds == pytest.approx(5.0, abs=1.0)
    assert 1.0 <= refused.value.retry_after_seconds <= 2.0


def test_wait_in_one_lane_is_by_all() -> None:
    clocked = Clocked()
    clocked.end(clocked.enter(20))
    clocked.enter(60)
    clocked.observe(40, lane="")
    for tenant in ("a", "b"):
        with pytest.raises(WaitTooLong):
            clocked.check(tenant, 10.0)


def test_nothing_is_refused_on_a_guess() -> None:
    """Few ends, or none, say nothing about a wait; nor do requests that were never begun."""
    for reason in (FinishReason.STOP, FinishReason.EXPIRED):
        clocked = Clocked()
        count = 5 if reason is FinishReason.STOP else 20
        clocked.end(clocked.enter(count), reason)
        clocked.enter(60)
        clocked.observe(40)
        clocked.check("a", 0.5)


def test_burst_after_quiet_hours_is_not_refused_for_their_pace() -> None:
    """One request in three seconds, each at once and alone, is no measure of what can be done."""
    clocked = Clocked()
    for number in range(10):
        (request_id,) = clocked.enter(1)
        clocked.observe(0)
        clocked.door.end(Finished(request_id, FinishReason.STOP), 70.0 + 3 * number)
    clocked.enter(60)
    clocked.observe(40)
    clocked.check("a", 0.5)
    with pytest.raises(QueueFull) as refused:
        clocked.door.check([request("x")] * 20, 100.0)
    assert refused.value.retry_after_seconds == pytest.approx(20.0)  # as while nothing is known


def test_time_without_a_core_is_no_time_of_its_pace() -> None:
    clocked = Clocked()
    clocked.observe(40, 10.0)
    clocked.door = Door(LIMITS, clocked.rates)
    clocked.end(clocked.enter(10))
    assert clocked.rates.of["a"].rate(100.0) == pytest.approx(1.0)


def test_end_of_an_unknown_request_gives_no_place_back() -> None:
    clocked = Clocked()
    ids = clocked.enter(3)
    clocked.end([*ids, *ids, "other"])
    assert clocked.door.num_unfinished_of("a") == 0
    assert clocked.door.num_waiting == 0
