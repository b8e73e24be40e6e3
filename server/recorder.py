"""Remembers the newest steps and requests, in bounded rings, for whoever asks afterwards.

A step of decodes costs one append; only rows of prompts and preemptions are looked up. It must not
compute anything before somebody asks, and it never holds a prompt or an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from scheduler.types import Preempted, Request, StepStats
from server.timeline import Choice, RequestTimeline, SequenceTimeline
from server.timings import RequestClock

MAX_STEPS = 16384


class Group(Protocol):
    """The sequences of one prompt."""

    @property
    def requests(self) -> Sequence[Request]: ...
    @property
    def choices(self) -> Sequence[Choice]: ...


class Recorder:
    """`max_finished` requests stay after their end; 0 records nothing at all."""

    def __init__(self, max_finished: int, now: Callable[[], float]) -> None:
        self.now = now
        self.steps: deque[StepStats] = deque(maxlen=MAX_STEPS if max_finished else 0)
        self.finished: deque[RequestTimeline] = deque(maxlen=max_finished)
        self.num_finished = 0  # ever
        self.live: dict[str, RequestTimeline] = {}  # by our id
        self._sequences: dict[str, SequenceTimeline] = {}
        self._enabled = max_finished > 0

    def begin(
        self,
        request_id: str,
        answer_id: str,
        tenant: str,
        clock: RequestClock,
        groups: Iterable[Group],
    ) -> RequestTimeline:
        """A request whose sequences are about to go to the core."""
        groups = list(groups)
        sequences = [
            SequenceTimeline(request.id, len(request.prompt), choice)
            for group in groups
            for request, choice in zip(group.requests, group.choices, strict=True)
        ]
        timeline = RequestTimeline(request_id, answer_id, tenant, clock, sequences)
        timeline.num_prompt = sum(len(group.requests[0].prompt) for group in groups)
        if self._enabled:
            self.live[answer_id] = timeline
            self._sequences |= {sequence.id: sequence for sequence in sequences}
        return timeline

    def end(self, timeline: RequestTimeline, otherwise: str) -> None:
        timeline.close(self.now(), otherwise)
        if self.live.pop(timeline.answer_id, None) is None:
            return
        for sequence in timeline.sequences:
            del self._sequences[sequence.id]
        self.finished.append(timeline)
        self.num_finished += 1

    def observe_step(self, stats: StepStats) -> None:
        began = stats.ended_at - stats.step_seconds
        # With depth 1 a step's stats tell of preemptions that were planned while it ran.
        for preempted in stats.preempted:
            if preempted.at <= began or not stats.ended_at:
                self._preempt(preempted)
        if stats.num_prefill_tokens or stats.num_decode_tokens:
            self.steps.append(stats)
            for row in stats.prompt_rows:
                if sequence := self._sequences.get(row.request_id):
                    sequence.add_row(row, stats.step, began, stats.ended_at)
        for preempted in stats.preempted:
            if preempted.at > began and stats.ended_at:
                self._preempt(preempted)

    def _preempt(self, preempted: Preempted) -> None:
        if sequence := self._sequences.get(preempted.request_id):
            sequence.preempt(preempted.at)

    def running(self, sees: str | None) -> list[RequestTimeline]:
        """Oldest first; of one tenant, or of all."""
        return [one for one in self.live.values() if sees in (None, one.tenant)]

    def ended(self, sees: str | None) -> Iterator[RequestTimeline]:
        """Newest first; of one tenant, or of all."""
        return (one for one in reversed(self.finished) if sees in (None, one.tenant))

    def may_see(self, sees: str | None, sequence_id: str) -> bool:
        """Whether a sequence that runs or waits is of a request that may be seen."""
        timeline = self.live.get(sequence_id.partition("-")[0])
        return sees is None or (timeline is not None and timeline.tenant == sees)

    def find(self, name: str, sees: str | None = None) -> RequestTimeline | None:
        """By our id, with or without its prefix, or the newest with this x-request-id."""
        answer_id = name.replace("_", "-").rpartition("-")[2]  # of resp_..., msg_... too
        for timeline in (*reversed(self.running(sees)), *self.ended(sees)):
            if timeline.answer_id == answer_id or timeline.id == name:
                return timeline
        return None

    def steps_between(self, began: float, ended: float) -> list[StepStats]:
        """Those that overlap it, oldest first."""
        found: list[StepStats] = []
        for stats in reversed(self.steps):
            if stats.ended_at < began:
                break
            if stats.ended_at - stats.step_seconds <= ended:
                found.append(stats)
        found.reverse()
        return found
