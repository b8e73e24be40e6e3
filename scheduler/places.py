"""Places: how many requests may be accepted and unfinished, and that no tenant takes them all.

The one rule for the server's door, which asks early, and the scheduler, which has the last word:
who counts at least what another counts, refuses whatever the other refuses. It must not know
sequences or the clock.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from scheduler.limits import SchedulerLimits

# Where several tenants may come, this part of the places is for those below their share.
_RESERVED = 8


class Refusal(StrEnum):
    """Why there is no place."""

    FULL = "too many requests are waiting"
    SHARE = "this key has its share of the places for waiting requests"


def most_places(limits: SchedulerLimits) -> int:
    """What one tenant gets at once where nobody else asks: more would be refused for ever."""
    return _num_places(limits) - _num_reserved(limits)


def _num_places(limits: SchedulerLimits) -> int:
    return limits.max_running + limits.max_waiting


def _num_reserved(limits: SchedulerLimits) -> int:
    return -(-_num_places(limits) // _RESERVED) if limits.num_tenants > 1 else 0


class Places:
    """Who holds how many. A lone tenant of the server may take all."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.num_taken = 0
        self._num_places = _num_places(limits)
        self._num_reserved = _num_reserved(limits)
        self._num_tenants = limits.num_tenants
        self._weights = dict(limits.weights)
        self._taken: Counter[str] = Counter()

    def refusal(self, tenant: str, count: int) -> Refusal | None:
        """Why `tenant` gets no `count` places, or None."""
        left = self._num_places - self.num_taken - count
        is_short = 0 < self._num_reserved > left
        if is_short and self._taken[tenant] + count > self._share(tenant):
            return Refusal.SHARE
        return Refusal.FULL if left < 0 else None

    def take(self, tenant: str, count: int) -> None:
        self.num_taken += count
        self._taken[tenant] += count

    def give_back(self, tenant: str) -> None:
        self.num_taken -= 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    def num_taken_by(self, tenant: str) -> int:
        return self._taken[tenant]

    def _share(self, tenant: str) -> float:
        """By weight, among those who hold places, `tenant`, and one that has yet to come."""
        names = {*self._taken, tenant}
        total = sum(self._weights.get(name, 1.0) for name in sorted(names))
        if len(names) < self._num_tenants:
            total += 1.0
        return self._num_places * self._weights.get(tenant, 1.0) / total
