"""Events that wait for a slow reader, merged so that they never outgrow the answers themselves.

Used at both ends of the socket: in the core while the socket is full, in the API while a client
reads slowly. Pure data: knows neither sockets nor loops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from scheduler.types import Event, Finished, FirstToken, KVMap, StepStats, TokenLogprobs, Tokens
from server.wire import Step

# One message carries about this many tokens and log-probabilities; more go into the next one.
_MESSAGE_ITEMS = 1 << 17
# Beyond this many unsent turns their stats are summed: sums stay right, the detail is lost.
_MAX_UNSENT_STATS = 1024


class Answer:
    """The tokens of one request that nobody has taken yet, merged into one event."""

    __slots__ = ("first", "logprobs", "pooled", "prompt_logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.first: FirstToken | None = None
        self.pooled = b""

    def add(self, tokens: Tokens) -> None:
        self.token_ids += tokens.token_ids
        self.logprobs += tokens.logprobs
        self.prompt_logprobs += tokens.prompt_logprobs
        self.first = self.first or tokens.first
        self.pooled = self.pooled or tokens.pooled

    def take(self, request_id: str) -> Tokens:
        return Tokens(
            request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
            self.first,
            self.pooled,
        )


class EventBacklog:
    """Unsent events, merged by request, so that they never outgrow the answers themselves."""

    def __init__(self) -> None:
        self._answers: dict[str, Tokens | Answer] = {}  # as they came, until a second comes
        self._finished: dict[str, Finished] = {}
        self._stats: list[StepStats] = []
        self._kv_map: KVMap | None = None  # the newest is enough

    def __bool__(self) -> bool:
        return bool(self._answers or self._finished or self._stats or self._kv_map)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._add_tokens(event)
                case Finished():
                    self._finished[event.request_id] = event
                case StepStats():
                    self._add_stats(event)
                case KVMap():
                    self._kv_map = event

    def _add_tokens(self, event: Tokens) -> None:
        known = self._answers.get(event.request_id)
        if known is None:
            self._answers[event.request_id] = event
            return
        if isinstance(known, Tokens):
            merged = self._answers[event.request_id] = Answer()
            merged.add(known)
            known = merged
        known.add(event)

    def _add_stats(self, stats: StepStats) -> None:
        if len(self._stats) < _MAX_UNSENT_STATS:
            self._stats.append(stats)
        else:
            self._stats[-1] = _sum_stats(self._stats[-1], stats)

    def take(self) -> Step:
        """The next message: a bounded part of the tokens, and each end whose tokens are out."""
        tokens: list[Tokens] = []
        size = 0
        while self._answers and size < _MESSAGE_ITEMS:
            request_id = next(iter(self._answers))
            answer = self._answers.pop(request_id)
            event = answer if isinstance(answer, Tokens) else answer.take(request_id)
            size += _size(event)
            tokens.append(event)
        ended = [key for key in self._finished if key not in self._answers]
        finished = tuple(self._finished.pop(key) for key in ended)
        stats, self._stats = self._stats, []
        kv_map, self._kv_map = self._kv_map, None
        return Step(tuple(tokens), finished, tuple(stats), kv_map)


def _size(tokens: Tokens) -> int:
    num_items = len(tokens.token_ids) + len(tokens.logprobs) + len(tokens.prompt_logprobs)
    return num_items + len(tokens.pooled) // 4


# Gauges are the newest; all other numbers of StepStats belong to their turn and add up.
_GAUGES = {
    "step",
    "num_running",
    "num_waiting",
    "waiting",
    "num_blocks",
    "num_blocks_used",
    "num_blocks_cached",
    "ended_at",
}
_SUMS = tuple(field.name for field in fields(StepStats) if field.name not in _GAUGES)


def _sum_stats(old: StepStats, new: StepStats) -> StepStats:
    return replace(new, **{name: getattr(old, name) + getattr(new, name) for name in _SUMS})
