"""The child that tries out grammars: there while there is work, gone otherwise, never missed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import psutil
import pytest

import server.grammar_process
from server.errors import InvalidRequest, Overloaded, Unavailable
from server.grammar_checks import MAX_WAITING, GrammarChecks
from server.grammar_text import Grammar, json_part
from tests.support.http_server import in_loop
from tests.support.tokenizers import byte_tokenizer

TOO_MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)}}


def checkers() -> list[int]:
    """The living children of this process that try out grammars."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ends as we look
            if "grammar_worker" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


async def check(checks: GrammarChecks, schema: object) -> None:
    grammar = Grammar("start: @answer", {"answer": json_part(schema)}, {})
    await checks.check(grammar, grammar.spec())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that in a minute")


@in_loop
async def test_child_starts_with_the_first_grammar_and_stays_for_the_next() -> None:
    before = checkers()
    checks = GrammarChecks(byte_tokenizer())
    assert checkers() == before
    await check(checks, {"type": "integer"})
    (child,) = set(checkers()) - set(before)
    await check(checks, {"type": "null"})
    with pytest.raises(InvalidRequest, match="items"):
        await check(checks, TOO_MANY)
    assert child in checkers()
    checks.close()
    assert child not in checkers()


@in_loop
async def test_child_without_work_ends_and_the_next_grammar_has_another() -> None:
    before = set(checkers())
    checks = GrammarChecks(byte_tokenizer(), max_idle_seconds=0.01)
    for schema in ({"type": "integer"}, {"type": "null"}):
        await check(checks, schema)
        await until(lambda: set(checkers()) <= before)
    with pytest.raises(InvalidRequest, match="items"):
        await check(checks, TOO_MANY)
    checks.close()


@in_loop
async def test_killed_child_is_replaced_and_the_next_grammar_is_judged() -> None:
    before = set(checkers())
    checks = GrammarChecks(byte_tokenizer())
    await check(checks, {"type": "integer"})
    (child,) = set(checkers()) - before
    os.kill(child, signal.SIGKILL)
    await until(lambda: child not in checkers())
    with pytest.raises(InvalidRequest, match="items"):
        await check(checks, TOO_MANY)
    await check(checks, {"type": "null"})
    checks.close()
    assert set(checkers()) <= before


@in_loop
async def test_grammar_whose_child_is_killed_meanwhile_is_judged_by_the_next() -> None:
    """A stopped child has the grammar, or part of it, and no answer."""
    before = set(checkers())
    checks = GrammarChecks(byte_tokenizer())
    await check(checks, {"type": "integer"})
    (child,) = set(checkers()) - before
    os.kill(child, signal.SIGSTOP)
    work = asyncio.create_task(check(checks, {"type": "null"}))
    await asyncio.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    await work
    assert child not in checkers()
    checks.close()


@in_loop
async def test_where_no_child_can_be_had_the_grammar_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The constraint is neither dropped nor refused for good."""
    checks = GrammarChecks(byte_tokenizer())
    with monkeypatch.context() as patched:
        patched.setattr(server.grammar_process, "_WORKER", "raise SystemExit(3)")
        with pytest.raises(Unavailable) as caught:
            await check(checks, {"type": "integer"})
    assert caught.value.status == 503
    await check(checks, {"type": "integer"})
    checks.close()


@in_loop
async def test_many_at_once_with_one_grammar_wait_for_one_trial() -> None:
    """More than may wait, as the calls of an agent come: nobody is refused."""
    checks = GrammarChecks(byte_tokenizer())
    await asyncio.gather(*(check(checks, {"type": "integer"}) for _ in range(2 * MAX_WAITING)))
    refused = await asyncio.gather(
        *(check(checks, TOO_MANY) for _ in range(2 * MAX_WAITING)), return_exceptions=True
    )
    assert {type(error) for error in refused} == {InvalidRequest}
    checks.close()


@in_loop
async def test_too_many_grammars_at_once_are_refused_for_now() -> None:
    checks = GrammarChecks(byte_tokenizer())
    many = [{"type": "integer", "minimum": number} for number in range(MAX_WAITING + 3)]
    ends = await asyncio.gather(*(check(checks, s) for s in many), return_exceptions=True)
    assert ends[:MAX_WAITING] == [None] * MAX_WAITING
    assert [type(end) for end in ends[MAX_WAITING:]] == [Overloaded] * 3
    checks.close()
