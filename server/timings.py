"""Where the time of one HTTP request went: one row of consecutive instants, so that parts add up.

All instants are of CLOCK_MONOTONIC, which the processes of a machine share. Nothing here knows
HTTP or Prometheus; the `timings` object of an answer and the metrics both read this clock.

    received  parsed  tokenized  scheduled  prefilled  sampled  first_written  finished
        |-parse-|-tokenize-|-queue--|-prefill--|-first_sample-|-write-|----decode---|
        |------------------------ TTFT -------------------------------|
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.types import FirstToken

TTFT_PARTS = ("parse", "tokenize", "queue", "prefill", "first_sample", "write")


@dataclass(slots=True)
class RequestClock:
    """The instants of one request; those not reached yet are None.

    With several choices queue, prefill and first sample are those of the choice that came first,
    and `first_written` is the first text written of any.
    """

    received: float
    parsed: float | None = None
    tokenized: float | None = None
    scheduled: float | None = None
    prefilled: float | None = None
    sampled: float | None = None
    first_written: float | None = None
    finished: float | None = None

    def first_token(self, first: FirstToken) -> None:
        if self.sampled is None:
            self.scheduled = first.scheduled_at
            self.prefilled = first.prefilled_at
            self.sampled = first.sampled_at

    def parts(self) -> Timings:
        """A part that was never entered takes no time; no part is negative."""
        durations = []
        last = _microseconds(self.received)
        for instant in (
            self.parsed,
            self.tokenized,
            self.scheduled,
            self.prefilled,
            self.sampled,
            self.first_written,
            self.finished,
        ):
            at = last if instant is None else max(last, _microseconds(instant))
            durations.append(at - last)
            last = at
        return Timings(*durations)


def _microseconds(instant: float) -> int:
    return round(instant * 1e6)


@dataclass(frozen=True, slots=True)
class Timings:
    """Parts in whole microseconds: integers, so that their sum is the total to the last digit."""

    parse: int
    tokenize: int
    queue: int
    prefill: int
    first_sample: int
    write: int
    decode: int

    def seconds(self, part: str) -> float:
        return float(getattr(self, part)) / 1e6

    @property
    def ttft_seconds(self) -> float:
        parts = (self.parse, self.tokenize, self.queue, self.prefill, self.first_sample, self.write)
        return sum(parts) / 1e6

    @property
    def total_seconds(self) -> float:
        return self.ttft_seconds + self.decode / 1e6

    def as_object(self) -> dict[str, float]:
        """The `timings` object of an answer, in milliseconds."""
        shown = {f"{part}_ms": getattr(self, part) / 1e3 for part in (*TTFT_PARTS, "decode")}
        shown["ttft_ms"] = round(self.ttft_seconds * 1e3, 3)
        shown["total_ms"] = round(self.total_seconds * 1e3, 3)
        return shown
