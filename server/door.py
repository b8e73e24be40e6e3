"""The door: whether a request may go to the core now, as far as that is known on this side.

Owns the places that are taken, the rates at which requests leave, and what a refused client is
told. The core decides with the same rule about places (scheduler/places.py); ours counts at least
what it counts, so it never refuses what we let in. Knows no connection and no HTTP.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from scheduler.limits import SchedulerLimits
from scheduler.places import Places, Refusal
from scheduler.types import Finished, FinishReason, Request, StepStats
from server.retry_after import RetryAfter

# A wait is refused where its estimate is so many times what it may be: the estimate is rough.
_CLEARLY = 2.0
_LEAST_RETRY_SECONDS = 1.0


class QueueFull(Exception):
    """The whole group was refused. The estimate is explained in retry_after.py."""

    def __init__(self, refusal: Refusal, retry_after_seconds: float) -> None:
        super().__init__(f"{refusal}; try again in {retry_after_seconds:.0f} seconds")
        self.refusal = refusal
        self.retry_after_seconds = retry_after_seconds


class WaitTooLong(Exception):
    """The group would be begun clearly after its deadline."""

    def __init__(self, wait_seconds: float, retry_after_seconds: float) -> None:
        super().__init__(f"the wait is about {wait_seconds:.0f} seconds")
        self.wait_seconds = wait_seconds
        self.retry_after_seconds = retry_after_seconds


class Door:
    """Told of whatever enters and ends. `rates` outlive a core, places do not."""

    def __init__(self, limits: SchedulerLimits, rates: Rates) -> None:
        self._places = Places(limits)
        self._rates = rates
        rates.observe({}, 0.0)
        # By id, of requests that are unfinished, in the order in which they came.
        self._tenants: dict[str, str] = {}
        self._deadlines: dict[str, float] = {}  # of those that have one
        self._num_running = 0
        self._waiting: dict[str, int] = {}  # by lane, when the core last spoke

    @property
    def num_waiting(self) -> int:
        """Those that did not run when the core last spoke; the newest count too."""
        return max(self._places.num_taken - self._num_running, 0)

    def num_unfinished_of(self, tenant: str) -> int:
        return self._places.num_taken_by(tenant)

    def num_waiting_of(self, tenant: str) -> int | None:
        """None where all tenants wait in one lane."""
        return None if "" in self._waiting and tenant else self._waiting.get(tenant, 0)

    def retry_after_seconds(self, tenant: str, now: float) -> float:
        """For one that was let in and not begun in time."""
        return self._rates.of[tenant].promise(1, now)

    def check(self, requests: Sequence[Request], now: float) -> None:
        """Raises QueueFull, WaitTooLong."""
        tenant = requests[0].tenant
        refusal = self._places.refusal(tenant, len(requests))
        if refusal is not None:
            rate = self._rates.of[tenant] if refusal is Refusal.SHARE else self._rates.all
            raise QueueFull(refusal, rate.promise(len(requests), now))
        deadline = requests[0].deadline
        if deadline is None:
            return
        # By the lane it would wait in, or by all that wait where there is but one.
        is_one = "" in self._waiting
        rate = self._rates.all if is_one else self._rates.of[tenant]
        ahead = self.num_waiting if is_one else self._waiting.get(tenant, 0)
        wait, left = rate.wait(ahead, now), deadline - now
        if not wait > _CLEARLY * left > 0:
            return
        lane = [i for i, of in self._tenants.items() if is_one or of == tenant][-ahead:]
        if self._begun_at(lane, wait / ahead / _CLEARLY, now) < deadline:
            return
        begun_at = max(self._begun_at(lane, wait / ahead, now), deadline)
        raise WaitTooLong(begun_at - now, max(begun_at - deadline, _LEAST_RETRY_SECONDS))

    def _begun_at(self, ahead: Sequence[str], each_seconds: float, now: float) -> float:
        """When the next one is, if they are begun at this pace, but for those that are late."""
        at = now
        for request_id in ahead:
            if at < self._deadlines.get(request_id, math.inf):
                at += each_seconds
        return at

    def enter(self, requests: Sequence[Request]) -> None:
        self._places.take(requests[0].tenant, len(requests))
        for request in requests:
            self._tenants[request.id] = request.tenant
            if request.deadline is not None:
                self._deadlines[request.id] = request.deadline

    def end(self, finished: Finished, now: float) -> None:
        tenant = self._tenants.pop(finished.request_id, None)
        if tenant is None:
            return
        self._deadlines.pop(finished.request_id, None)
        self._places.give_back(tenant)
        if finished.reason is not FinishReason.EXPIRED:  # nothing was done for it
            self._rates.all.ended(now)
            self._rates.of[tenant].ended(now)

    def observe(self, stats: StepStats, now: float) -> None:
        self._num_running = stats.num_running
        self._waiting = dict(stats.waiting)
        self._rates.observe(self._waiting, now)


class Rates:
    """How fast requests leave: of all, and of each tenant."""

    def __init__(self) -> None:
        self.all = RetryAfter()
        self.of: defaultdict[str, RetryAfter] = defaultdict(RetryAfter)

    def observe(self, waiting: Mapping[str, int], now: float) -> None:
        """How many wait in each lane; in the one without a name all wait."""
        self.all.observe(sum(waiting.values()), now)
        for tenant in {*self.of, *waiting}:
            self.of[tenant].observe(waiting.get("", 0) or waiting.get(tenant, 0), now)
