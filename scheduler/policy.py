"""Who comes first, who gives way, and who can never be served.

A policy puts each request into a lane and turns it into a static key: in its lane the smaller key
comes first wherever sequences meet (decoding, prefill, admission). line.py joins the lanes into one
order of all that have entered, in which the last is the first victim when blocks run out. Since
keys never change and never tie the first in it always moves. Nothing here may know blocks, plans or
the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scheduler.sequence import Key
from scheduler.types import KVCapacity, Request


class Policy(Protocol):
    def lane(self, request: Request) -> str:
        """Lanes share the engine by what they are served, not by what they ask for."""
        ...

    def key(self, request: Request, serial: int) -> Key:
        """Where `request`, the `serial`-th to be accepted, stands in its lane."""
        ...

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` may take the place of `running`, should its key be smaller too.

        Asked within a lane only.
        """
        ...


class FirstComeFirstServed:
    """By arrival, whoever asks; the waiting never push out the running."""

    def lane(self, request: Request) -> str:  # noqa: ARG002
        return ""

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

    def lane(self, request: Request) -> str:  # noqa: ARG002
        return ""

    def key(self, request: Request, serial: int) -> Key:
        return (request.arrival + request.priority * self.ageing_seconds, serial)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority


@dataclass(frozen=True, slots=True)
class Fair:
    """Each tenant has a lane of its own, in which priority is a head start as in Priority.

    So a priority is heard among the requests of its tenant, and moves nobody else's.
    """

    within: Priority = Priority()

    def lane(self, request: Request) -> str:
        return request.tenant

    def key(self, request: Request, serial: int) -> Key:
        return self.within.key(request, serial)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return self.within.outranks(waiting, running)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "fair": Fair,
}


def max_total_tokens(capacity: KVCapacity) -> int:
    """The most tokens, prompt and answer together, that one request can have on this engine."""
    return min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)


def never_fits(request: Request, capacity: KVCapacity) -> bool:
    """Whether the request would not fit even alone; the one rule for the door and the scheduler.

    A prompt always yields a token; where none is asked for, it has no place and needs none.
    """
    return len(request.prompt) + request.max_tokens > max_total_tokens(capacity)
