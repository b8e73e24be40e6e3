"""Deadlines: by when a request must have been begun.

Owns a heap of instants; what is over is dropped from it when its time comes, or when most of it is
over. It must not know sequences, nor read a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Container

_SLACK = 256


class Deadlines:
    """`add` each once; `due` names it once, whatever has become of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (deadline, self._serial, request_id))

    def due(self, now: float) -> list[str]:
        """Those whose deadline has come, in order."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def forget(self, known: Container[str], count: int) -> None:
        """Keeps only those that are `known`, who are `count`, once there are many others."""
        if len(self._heap) > 2 * count + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in known]
            heapq.heapify(self._heap)
