"""When a refused client should come back, and how long one would wait that comes now.

Both are estimates from how fast requests leave the core.

Owns the measured rate and the promises already given. Knows nothing but times and counts.

The rate is that of ended requests over the last 30 seconds (while nothing has ended: one a
second). Each refusal promises the next free places to its client, after those promised before and
not yet due, so a crowd that was refused at once comes back spread out at the pace of the core
instead of together. The answer is between 1 and 60 seconds: some clients give up above that.
"""

from __future__ import annotations

from collections import deque

_WINDOW_SECONDS = 30.0
_MAX_SAMPLES = 1024
_UNKNOWN_RATE = 1.0
_SHORTEST, _LONGEST = 1.0, 60.0
# Fewer ended requests say nothing about a wait.
_MIN_SAMPLES = 8


class RetryAfter:
    """Feed it each end of a request; ask it at each refusal. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._promised_until = 0.0

    def ended(self, now: float) -> None:
        self._ended.append(now)

    def rate(self, now: float) -> float:
        """Ended requests per second."""
        while self._ended and self._ended[0] < now - _WINDOW_SECONDS:
            self._ended.popleft()
        if not self._ended:
            return _UNKNOWN_RATE
        return len(self._ended) / max(now - self._ended[0], 1.0)

    def wait(self, ahead: int, now: float) -> float:
        """About how long until `ahead` requests have left; 0 while that is not known."""
        rate = self.rate(now)
        return ahead / rate if len(self._ended) >= _MIN_SAMPLES else 0.0

    def promise(self, places: int, now: float) -> float:
        """Seconds until `places` more are likely to be free for this client."""
        begin = max(self._promised_until, now)
        due = min(begin + places / self.rate(now), now + _LONGEST)
        self._promised_until = due
        return max(due - now, _SHORTEST)
