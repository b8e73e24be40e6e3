"""Who comes first, who gives way, and who can never be served.

A policy turns a request into a static key: the smaller key comes first wherever sequences meet
(decoding, prefill, admission), and the largest running key is the first victim when blocks run
out. Since keys never change and never tie there is one total order, and the first in it always
moves. Nothing here may know blocks, plans or the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scheduler.sequence import Key
from scheduler.types import KVCapacity, Request


class Policy(Protocol):
    def key(self, request: Request, serial: int) -> Key:
        """Where `request`, the `serial`-th to be accepted, stands in line."""
        ...

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` may take the place of `running`, should its key be smaller too."""
        ...


class FirstComeFirstServed:
    """By arrival; the waiting never push out the running."""

    def key(self, request: Request, serial: int) -> Key:
        return (request.arrival, serial)

    def outranks(self, waiting: Request, running: Request) -> bool:  # noqa: ARG002
        return False


@dataclass(frozen=True, slots=True)
class Priority:
    """Each step of priority is a head start of `ageing_seconds` in arrival time.

    So urgent requests go first, even in place of running ones of a lower class, but whoever has
    waited longer than the head start of all that could come is next: nobody starves.
    """

    ageing_seconds: float = 30.0

    def key(self, request: Request, serial: int) -> Key:
        return (request.arrival + request.priority * self.ageing_seconds, serial)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}


def max_total_tokens(capacity: KVCapacity) -> int:
    """The most tokens, prompt and answer together, that one request can have on this engine."""
    return min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)


def never_fits(request: Request, capacity: KVCapacity) -> bool:
    """Whether the request would not fit even alone; the one rule for the door and the scheduler.

    A prompt always yields a token, so one more than the prompt is the least it needs.
    """
    return len(request.prompt) + max(1, request.max_tokens) > max_total_tokens(capacity)
