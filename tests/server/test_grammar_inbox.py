"""The inbox that waits for grammars: nothing is lost, blocked or overtaken that must not be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.types import Abort, Command, Drain, Request, Submit
from server.core_channel import CoreInbox
from server.grammar_inbox import GrammarInbox
from server.wire import Commands, Group, encode


class SlowCompiler:
    """Compiles when it is told to; a grammar that says "bad" fails."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.known: set[bytes] = set()

    def prepare(self) -> None:
        pass

    def knows(self, spec: bytes) -> bool:
        return spec in self.known

    def start(self, spec: bytes) -> object:
        assert self.may_end.wait(10)
        if spec == b"bad":
            raise ValueError("bad grammar")
        self.known.add(spec)
        return None


class Wire:
    """A socket pair with an inbox at one end."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.compiler = SlowCompiler()
        self.inbox = GrammarInbox(CoreInbox(self.theirs), self.compiler)

    def send(self, *requests: Request, aborts: tuple[str, ...] = (), drain: bool = False) -> None:
        groups = tuple(Group.pack([request]) for request in requests)
        self.ours.sendall(encode(Commands(groups, aborts, drain)))


@contextmanager
def wire() -> Iterator[Wire]:
    made = Wire()
    try:
        yield made
    finally:
        made.compiler.may_end.set()
        made.inbox.close()
        made.ours.close()
        made.theirs.close()


def request(name: str, grammar: bytes = b"") -> Request:
    return Request(id=name, prompt=(1,), max_tokens=1, grammar=grammar)


def names(commands: list[Command]) -> list[str]:
    return [
        command.requests[0].id if isinstance(command, Submit) else type(command).__name__
        for command in commands
    ]


def test_free_request_passes_one_that_waits_for_its_grammar() -> None:
    with wire() as made:
        made.send(request("slow", b"g"), request("free"))
        assert names(made.inbox.take(block=True)) == ["free"]
        assert made.inbox.take(block=False) == []
        made.compiler.may_end.set()
        # Nothing comes over the socket: the end of the compilation alone wakes the loop.
        (submit,) = _take_something(made)
        assert names([submit]) == ["slow"]
        assert isinstance(submit, Submit)
        assert submit.requests[0].grammar == b"g"


def test_known_grammar_does_not_wait() -> None:
    with wire() as made:
        made.compiler.known.add(b"g")
        made.send(request("quick", b"g"))
        assert names(made.inbox.take(block=True)) == ["quick"]


def test_abort_reaches_a_request_that_waits() -> None:
    """Invariant 7: the scheduler hears of it first, so that it can end it."""
    with wire() as made:
        made.send(request("slow", b"g"))
        assert made.inbox.take(block=False) == []
        made.send(aborts=("slow",))
        commands = made.inbox.take(block=True)
        assert names(commands) == ["slow", "Abort"]
        assert isinstance(commands[1], Abort)
        made.compiler.may_end.set()


def test_drain_waits_for_what_was_accepted_before_it() -> None:
    with wire() as made:
        made.send(request("slow", b"g"), drain=True)
        assert made.inbox.take(block=False) == []
        made.compiler.may_end.set()
        commands: list[Command] = []
        while not any(isinstance(command, Drain) for command in commands):
            commands += _take_something(made)
        assert names(commands) == ["slow", "Drain"]


def test_grammar_that_fails_is_passed_on_to_fail_by_itself() -> None:
    """B059: the engine ends that request alone, with the reason."""
    with wire() as made:
        made.compiler.may_end.set()
        made.send(request("broken", b"bad"))
        commands = made.inbox.take(block=False)
        while not commands:
            commands = _take_something(made)
        assert names(commands) == ["broken"]


def _take_something(made: Wire) -> list[Command]:
    for _ in range(100):
        commands = made.inbox.take(block=True)
        if commands:
            return commands
    raise AssertionError("the loop is woken for nothing")
