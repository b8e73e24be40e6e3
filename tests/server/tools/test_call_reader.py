"""Tool calls read from text: the golden corpus, cut at every character, in linear time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.call_reader import MAX_CALLS, CallReader
from server.tools.formats import FORMATS, format_of
from server.tools.pieces import CallArguments, CallStart, Content
from server.tools.pythonic_reader import MAX_DEPTH, PythonicReader, as_json
from tests.server.tools.golden import GOLDEN, NAMES, Call


def read(form: str, parts: Iterable[str]) -> tuple[str, list[Call]]:
    made = PythonicReader if FORMATS[form].is_pythonic else CallReader
    reader = made(FORMATS[form], NAMES)
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    content = ""
    calls: list[Call] = []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                content += text
            case CallStart(index, name):
                assert index == len(calls)  # opened in order
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1  # never interleaved
                assert text
                calls[index] = (calls[index][0], calls[index][1] + text)
    assert reader.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text_is_read_whole_and_cut_anywhere(name: str) -> None:
    """B052 B053: arguments byte for byte as written, however the text is split."""
    form, text, content, calls = GOLDEN[name]
    assert read(form, [text]) == (content, calls)
    assert read(form, text) == (content, calls)
    for at in range(len(text)):
        assert read(form, [text[:at], text[at:]]) == (content, calls), at


@pytest.mark.parametrize("name", [name for name in GOLDEN if not name.endswith("cut")])
def test_golden_arguments_parse(name: str) -> None:
    for _, arguments in GOLDEN[name][3]:
        assert isinstance(json.loads(arguments), dict)


@given(
    form=st.sampled_from(sorted(FORMATS)),
    text=st.text(alphabet='<tool_call>/{}[]",:\\ name"rgumets\n|pyh()=\'ARGS', max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=4),
)
def test_any_text_cut_anywhere_is_read_the_same(form: str, text: str, cuts: list[int]) -> None:
    """B052."""
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert read(form, parts) == read(form, [text])


@given(st.text(max_size=60))
def test_text_without_markers_is_content_unchanged(text: str) -> None:
    for form in ("hermes", "smollm", "mistral", "mistral-args"):
        assert read(form, [text]) == (text, [])


SIZE = 100_000


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "tail",
    [
        *("<", "{", "[", " ", ",", "\n", '"', '{"a":', "<tool_call>", '{"name":"f"},', "\\", "]"),
        *("}", "(", "a=", "'", "f(a=1),", "[ARGS]", "[TOOL_CALLS]", "x"),
    ],
)
def test_hostile_text_costs_a_bounded_time_a_character(form: str, tail: str) -> None:
    """B056: a marker, then a hundred thousand of anything. A quadratic reader needs minutes."""
    whole = "[f(a=" if FORMATS[form].is_pythonic else '{"name": "f", "parameters": {"a": "'
    opening = FORMATS[form].opening or whole
    text = opening + tail * (SIZE // len(tail))
    begin = time.process_time()
    read(form, [text])
    read(form, [text[at : at + 50] for at in range(0, len(text), 50)])
    assert time.process_time() - begin < 10  # seconds; linear takes well under one


def test_calls_without_end_become_content() -> None:
    call = '<tool_call>{"name": "ping"}</tool_call>'
    content, calls = read("hermes", [call * (MAX_CALLS + 3)])
    assert len(calls) == MAX_CALLS
    assert content == call * 3


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = CallReader(FORMATS["hermes"], NAMES)
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"a": "long') == [
        CallStart(0, "f"),
        CallArguments(0, '{"a": "long'),
    ]
    assert reader.feed(" text") == [CallArguments(0, " text")]


@pytest.mark.parametrize(
    "value", ["[" * 5_000, "9" * 5_000, "{1}", "x" * 100, "'a' 'b'", "-" * 5_000 + "1", "nan"]
)
def test_any_value_becomes_strict_json(value: str) -> None:
    """What is neither JSON nor Python's is a text, and no parser is brought down."""
    json.loads(as_json(value), parse_constant=lambda word: pytest.fail(word))


def test_value_nested_too_deep_ends_the_calls() -> None:
    text = f"[f(a={'[' * (MAX_DEPTH + 1)}"
    content, calls = read("pythonic", [text])
    assert calls == [("f", "")]
    assert content == ""


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% for t in tools %}<tools>{% endfor %}<tool_call>", "hermes"),
        ("{{ tools }} [AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('{{ tools }} Respond in the format {"name": n, "parameters": d}', "llama"),
        ("{{ tools }} {{ '<|python_tag|>' }}", "llama"),
        ("{{ tools }} [TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral-args"),
        ('{{ tools }} use "[func_name1(params_name1=params_value1), ...]"', "pythonic"),
        ("{{ tools }} <|python_start|>", "pythonic"),
        ("{{ messages }}", "smollm"),
    ],
)
def test_format_is_found_in_the_template(source: str, name: str) -> None:
    assert format_of(source).name == name
