"""Runs the requests of one HTTP request through the core and hands out what each choice may show.

Owns the streams, the counting and the clock of one answer. Knows no JSON: what is shown goes to
`emit`, be it a stream or a list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from engine.errors import CONSTRAINT
from scheduler.places import Refusal
from scheduler.types import Finished, FinishReason, Request, Tokens
from server.choice import Choice, Delta
from server.core_client import (
    CoreClient,
    CoreState,
    CoreStream,
    CoreUnavailable,
    NeverFits,
)
from server.door import QueueFull, WaitTooLong
from server.errors import (
    ApiError,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    retry_headers,
)
from server.grammar_text import Grammar
from server.metrics import Metrics
from server.patience import Patience, hurry
from server.reading import Reading
from server.timings import RequestClock

log = logging.getLogger("paceline")

Emit = Callable[[int, Delta], Awaitable[None]]
RETRY_AFTER_LOSS = 2.0  # seconds


@dataclass(slots=True)
class PromptGroup:
    """The requests that share one prompt, and the choices that they become."""

    requests: tuple[Request, ...]
    choices: tuple[Choice, ...]
    first_index: int
    cached_tokens: int | None = None  # None until the first token
    grammar: Grammar | None = None
    reading: Reading | None = None  # of chat answers; None is text as it is


@dataclass(frozen=True, slots=True)
class Direct:
    """The way of a delta to the client without a task being woken, while it `is_open`."""

    is_open: Callable[[], bool]
    emit: Callable[[int, Delta], None]


@dataclass(slots=True)
class ChoiceTimes:
    """When a choice showed its first and its newest text."""

    first: float
    last: float | None


class Generation:
    """One answer in the making; `run` it once. Leaving it for any reason frees the core of it.

    Tokens that come while `direct` is open go that way, all else through `emit`.
    """

    def __init__(
        self,
        core: CoreClient,
        metrics: Metrics,
        clock: RequestClock,
        now: Callable[[], float],
        groups: Sequence[PromptGroup],
        request_id: str = "",
        patience: Patience | None = None,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._groups = groups
        self.direct: Direct | None = None
        self._request_id = request_id
        self._patience = patience
        self._served = metrics.tokens_of(groups[0].requests[0].tenant)
        self._times: dict[int, ChoiceTimes] = {}
        self._tpots: list[float] = []  # of the choices that ended

    async def run(self, emit: Emit) -> None:
        """Raises ApiError if the core refuses or fails; every choice has ended if it returns."""
        await self.run_part(emit)
        self._clock.finished = self._now()
        tpot = sum(self._tpots) / len(self._tpots) if self._tpots else None
        self._metrics.observe_end(self._clock.parts(), self._request_id, tpot)

    async def run_part(self, emit: Emit) -> None:
        """As `run`, but more of the same request follows."""
        async with AsyncExitStack() as stack:
            streams = [await self._open(stack, group) for group in self._groups]
            num_accepted = sum(len(group.requests) for group in self._groups)
            self._metrics.accepted.inc(num_accepted)
            reason = "abort"  # what cancels us is the client's leaving
            try:
                await self._consume_all(streams, emit)
            except InvalidRequest:
                reason = "invalid"  # seen on the way only, and the client's all the same
                raise
            except Exception:
                reason = "error"
                raise
            finally:
                self._count_ends(reason)

    def usage(self) -> dict[str, object]:
        """What was used so far; a prompt shared by n choices counts once."""
        prompt = sum(len(group.requests[0].prompt) for group in self._groups)
        cached = sum(group.cached_tokens or 0 for group in self._groups)
        choices = [choice for group in self._groups for choice in group.choices]
        completion = sum(choice.num_tokens for choice in choices)
        reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    async def _open(self, stack: AsyncExitStack, group: PromptGroup) -> CoreStream:
        try:
            # Further prompts wait for the first ones as well, which says nothing about the server.
            patience = self._patience if group is self._groups[0] else None
            requests = hurry(group.requests, patience)
            return await stack.enter_async_context(self._core.stream(requests))
        except QueueFull as error:
            raise Overloaded(
                f"The server is busy: {error}.",
                code="tenant_queue_full" if error.refusal is Refusal.SHARE else None,
                headers=retry_headers(error.retry_after_seconds),
            ) from None
        except WaitTooLong as error:
            assert self._patience is not None
            raise self._patience.hopeless(error.wait_seconds, error.retry_after_seconds) from None
        except NeverFits as error:
            raise InvalidRequest(
                f"The request does not fit: {error}.", code="context_length_exceeded"
            ) from None
        except CoreUnavailable as error:
            raise unavailable(self._core.state, error.retry_after_seconds) from None

    async def _consume_all(self, streams: Sequence[CoreStream], emit: Emit) -> None:
        if len(streams) == 1:
            await self._consume(self._groups[0], streams[0], emit)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for group, stream in zip(self._groups, streams, strict=True):
                    tasks.create_task(self._consume(group, stream, emit))
        except ExceptionGroup as group_error:
            # The failures of one core, one a prompt: the first tells all.
            known = [error for error in group_error.exceptions if isinstance(error, ApiError)]
            if len(known) < len(group_error.exceptions):
                raise
            raise known[0] from None

    async def _consume(self, group: PromptGroup, stream: CoreStream, emit: Emit) -> None:
        positions = {request.id: index for index, request in enumerate(group.requests)}
        unfinished = set(positions)
        direct = self.direct

        def read(event: Tokens | Finished) -> tuple[int, Choice, Delta]:
            position = positions[event.request_id]
            choice = group.choices[position]
            if isinstance(event, Tokens):
                delta = self._add(group, choice, event)
            else:
                unfinished.discard(event.request_id)
                delta = self._end(stream, choice, event)
            return group.first_index + position, choice, delta

        def settle(request_id: str, index: int, choice: Choice, delta: Delta) -> None:
            """After `delta` has been handed out."""
            if delta:
                self._observe(index, choice, delta)
            if choice.finish_reason is not None and request_id in unfinished:
                unfinished.discard(request_id)
                self._core.abort([request_id])
            if not unfinished:
                stream.end()

        def take(event: Tokens) -> bool:
            if direct is None or not direct.is_open():
                return False
            index, choice, delta = read(event)
            if delta:
                direct.emit(index, delta)
            settle(event.request_id, index, choice, delta)
            return True

        stream.direct = take
        async for event in stream:
            index, choice, delta = read(event)
            if delta:
                await emit(index, delta)
            settle(event.request_id, index, choice, delta)

    def _add(self, group: PromptGroup, choice: Choice, event: Tokens) -> Delta:
        if event.first is not None:
            self._clock.first_token(event.first)
            if group.cached_tokens is None:
                group.cached_tokens = event.first.cached_tokens
                self._metrics.prompt_tokens.inc(len(group.requests[0].prompt))
                self._metrics.cached_tokens.inc(event.first.cached_tokens)
                self._served.prompt += len(group.requests[0].prompt)
                self._served.cached += event.first.cached_tokens
        before = choice.num_tokens
        delta = choice.add(event)
        self._metrics.generated_tokens.inc(choice.num_tokens - before)
        self._served.generated += choice.num_tokens - before
        return delta

    def _end(self, stream: CoreStream, choice: Choice, event: Finished) -> Delta:
        if event.reason is FinishReason.EXPIRED:
            assert self._patience is not None
            choice.finish_reason = event.reason
            tenant = self._groups[0].requests[0].tenant
            raise self._patience.late(self._core.retry_after_seconds(tenant))
        if choice.finish_reason is None and event.reason in (
            FinishReason.ERROR,
            FinishReason.ABORT,
        ):
            if event.message.startswith(CONSTRAINT):
                raise InvalidRequest(
                    f"{event.message[:1].upper()}{event.message[1:]}.", code="constraint_failed"
                )
            if event.request_id in stream.cut_off:
                raise Unavailable(
                    f"The generation was cut off: {event.message}",
                    headers=retry_headers(RETRY_AFTER_LOSS),
                )
            log.error("request %s failed: %s", self._request_id, event.message)
            raise GenerationFailed(f"The generation failed: {event.message}")
        return choice.end(event)

    def _observe(self, index: int, choice: Choice, delta: Delta) -> None:
        """After `delta` has been handed out. The end of a choice need not bring text."""
        now = self._now()
        times = self._times.get(index)
        if times is None:
            times = self._times[index] = ChoiceTimes(first=now, last=None)
        if delta.text:
            if times.last is not None:
                self._metrics.itl.observe(now - times.last)
            times.last = now
        if self._clock.first_written is None:
            self._clock.first_written = now
            self._metrics.observe_first_text(self._clock.parts(), self._request_id)
        if choice.finish_reason is not None and choice.num_tokens > 1:
            self._tpots.append((now - times.first) / (choice.num_tokens - 1))
            self._metrics.tpot.observe(self._tpots[-1])

    def _count_ends(self, otherwise: str) -> None:
        for group in self._groups:
            for choice in group.choices:
                reason = choice.finish_reason
                self._metrics.finished[otherwise if reason is None else reason.value].inc()


def unavailable(state: CoreState, retry_after_seconds: float) -> Unavailable:
    """Why there is no core, for people and, in `code`, for programs."""
    code, message = {
        CoreState.LOADING: ("model_loading", "The model is still loading."),
        CoreState.DRAINING: ("server_draining", "The server is shutting down."),
    }.get(state, ("engine_unavailable", "The engine has stopped and is being restarted."))
    headers = retry_headers(retry_after_seconds)
    if state is CoreState.DRAINING:
        headers["connection"] = "close"  # a balancer of connections finds another server then
    return Unavailable(message, code=code, headers=headers)
