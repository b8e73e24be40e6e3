"""When a refused client should come back, and how long one would wait that comes now.

Both are estimates from how fast requests leave the core while others wait. Where nobody waits they
leave as they come, and that says nothing of what the core can do.

Owns the measured rate and the promises already given. Knows nothing but times and counts.

The rate is that of the last 30 seconds, and the time since the last end counts too, so a silence
makes it smaller (while nothing has ended with a queue: one in that time, one a second at most).
Each refusal promises the next free places to its client, after those promised before and not yet
due, so a crowd that was refused at once comes back spread out at the pace of the core instead of
together. The answer is between 1 and 60 seconds: some clients give up above that.
"""

from __future__ import annotations

from collections import deque

_WINDOW_SECONDS = 30.0
_MAX_SAMPLES = 1024
_UNKNOWN_RATE = 1.0
_SHORTEST, _LONGEST = 1.0, 60.0
_SHORTEST_MEASURED = 0.1
# Fewer ended requests say nothing about a wait.
_MIN_SAMPLES = 8


class RetryAfter:
    """Feed it each end of a request and whether some wait; ask it at each refusal.

    Times are of one monotonic clock.
    """

    def __init__(self) -> None:
        # Of each end its instant, and how long since the one before or since some wait.
        self._ended: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._since: float | None = None  # the end of the last sample; None while nobody waits
        self._promised_until = 0.0

    def observe(self, num_waiting: int, now: float) -> None:
        if not num_waiting:
            self._since = None
        elif self._since is None:
            self._since = now

    def ended(self, now: float) -> None:
        if self._since is not None:
            self._ended.append((now, now - self._since))
            self._since = now

    def rate(self, now: float) -> float:
        """Ended requests per second, while some waited."""
        while self._ended and self._ended[0][0] < now - _WINDOW_SECONDS:
            self._ended.popleft()
        silence = 0.0 if self._since is None else max(now - self._since, 0.0)
        if not self._ended:
            return min(_UNKNOWN_RATE, 1 / silence) if silence else _UNKNOWN_RATE
        seconds = sum(seconds for _, seconds in self._ended) + silence
        return len(self._ended) / max(seconds, _SHORTEST_MEASURED)

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
