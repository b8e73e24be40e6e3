"""Series that every token adds to: plain numbers of one event loop, read when somebody scrapes.

A lock for each token would cost more than the token's JSON. Knows no Prometheus; metrics.py shows
what is here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


class Count:
    """Only ever grows."""

    __slots__ = ("name", "text", "value")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


@dataclass(slots=True)
class TenantTokens:
    """What one tenant was served; `cached` are of `prompt`."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


class Distribution:
    """A histogram: how many values were at most each bound, and their sum."""

    __slots__ = ("_counts", "bounds", "name", "sum", "text")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.text = text
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, count of values up to it) in the exposition's own words."""
        made = []
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            made.append((bound, float(total)))
        return made
