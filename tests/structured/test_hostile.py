"""Bombs end in a refusal or serve within limits, and leave nothing behind; no clock is judged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler, GrammarState
from server.errors import InvalidRequest
from server.grammar_process import GrammarProcess
from server.grammar_text import Grammar, Part, ebnf_part, json_part
from server.grammar_worker import MAX_GROWTH_BYTES, MEMORY_LIMIT_BYTES
from server.structured import answer_part
from tests.structured.bench_hostile import memory_mib
from tests.structured.hostile import NAMES, bomb
from tests.structured.test_schemas import VOCABULARY

GOOD = json_part({"type": "integer"})


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    made = GrammarProcess(VOCABULARY, max_seconds=1.0)
    yield made
    made.close()


def grammar(part: Part, label: str = "") -> Grammar:
    labels = {"answer": label} if label else {}
    return Grammar("start: @answer", {"answer": part}, labels)


def refusal_of(process: GrammarProcess, name: str) -> str:
    """In one line, or "" where it serves."""
    try:
        part = answer_part(None, bomb(name, 1))
        assert part is not None
        process.check(grammar(part))
    except (InvalidRequest, GrammarError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_bomb_is_refused_or_serves_and_the_next_grammar_is_none_the_worse(
    process: GrammarProcess, name: str
) -> None:
    """B065 B158: within a second of CPU time and a bound on memory, both kept by the kernel."""
    refusal = refusal_of(process, name)
    assert "\n" not in refusal
    assert len(refusal) < 600
    process.check(grammar(GOOD))
    assert process.pid is not None
    assert memory_mib(process.pid) < 512


def test_compilation_past_its_time_is_ended_and_said_so() -> None:
    bad = json_part(
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": 9_000 + i} for i in range(500)}}
    )
    made = GrammarProcess(VOCABULARY, max_seconds=0.2)
    with pytest.raises(GrammarError, match=r"longer than 0\.2 s"):
        made.check(grammar(bad))
    made.close()


def test_grammar_that_would_hold_too_much_memory_is_refused() -> None:
    """The core would hold as much for each sequence."""
    made = GrammarProcess(VOCABULARY, max_seconds=20)
    with pytest.raises(GrammarError, match="too much memory"):
        made.check(grammar(json_part({"type": "integer", "multipleOf": 110_017})))
    made.check(grammar(GOOD))
    made.close()
    assert MAX_GROWTH_BYTES < MEMORY_LIMIT_BYTES


def test_child_that_was_killed_is_replaced(process: GrammarProcess) -> None:
    process.check(grammar(GOOD))
    before = process.pid
    process.close()
    assert process.pid is None
    process.check(grammar(GOOD))
    assert process.pid != before


def test_refusal_names_the_part_at_fault(process: GrammarProcess) -> None:
    """B058 B067: the tool, not the joint grammar of all tools."""
    with pytest.raises(GrammarError, match=r"^tool 'f': "):
        process.check(grammar(json_part({"type": "string", "pattern": "("}), "tool 'f'"))


def test_schema_that_would_fail_on_the_way_is_refused_before() -> None:
    """A row of more items than the limit is only met when the object begins."""
    names = {f"p{i}": {"type": "integer"} for i in range(900)}
    made = GrammarProcess(VOCABULARY, max_seconds=5)
    with pytest.raises(GrammarError, match="items"):
        made.check(grammar(json_part({"type": "object", "properties": names})))
    made.close()


def test_ambiguous_rules_end_where_they_become_expensive() -> None:
    """The work of a token would grow with the square of what was said before it."""
    part = ebnf_part('start: s\ns: s s | "a" | ')
    state = GrammarCompiler(VOCABULARY).start(grammar(part).spec())
    with pytest.raises(GrammarError, match="items"):
        state.accept([ord("a")] * 2_000)


class SlowMatcher:
    """Takes 80 ms of CPU time for a mask."""

    def unsafe_compute_mask_ptr(self, _pointer: int, _size: int) -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.08:
            pass

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def consume_token(self, _: int) -> bool:
        return True


def test_sequence_whose_masks_cost_too_much_is_ended() -> None:
    """The neighbours wait for each of them."""
    state = GrammarState(SlowMatcher(), 64)
    state.allowed()
    state.accept([1])
    with pytest.raises(GrammarError, match="too much work"):
        state.allowed()
