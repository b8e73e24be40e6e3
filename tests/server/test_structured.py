"""Constraints over HTTP: what selects one, what is refused and how, and that nothing is dropped."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import NOTHING_LEFT
from server.structured import answer_part
from server.tokenizer import Tokenizer
from tests.support.http_server import CHAT, COMPLETIONS, TextEngine, house, in_loop
from tests.support.tokenizers import byte_tokenizer

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class GrammarEngine(TextEngine):
    """Notes the grammars that reach the engine."""

    def __init__(self) -> None:
        super().__init__({"hi": "ok"})
        self.grammars: list[bytes] = []

    def submit(self, plan: Any) -> Any:
        self.grammars += [admission.grammar for admission in plan.admissions]
        return super().submit(plan)


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


GOOD: dict[str, dict[str, Any]] = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": schema_format(OBJECT, strict=True)},
    "null besides": {"response_format": {"type": "json_object", "json_schema": None}},
    "description": {"response_format": schema_format(OBJECT, description="d")},
    "schema of json_object": {"response_format": {"type": "json_object", "schema": OBJECT}},
    "any json": {"response_format": schema_format({})},
    "schema true": {"structured_outputs": {"json": True}},
    "json": {"structured_outputs": {"json": OBJECT}},
    "json text": {"structured_outputs": {"json": json.dumps(OBJECT)}},
    "json null besides": {"structured_outputs": {"json": OBJECT, "regex": None}},
    "json_object true": {"structured_outputs": {"json_object": True}},
    "false besides": {"structured_outputs": {"json_object": False, "regex": "a+"}},
    "regex": {"structured_outputs": {"regex": "[a-z]+"}},
    "choice": {"structured_outputs": {"choice": ["ja", "nein", "名"]}},
    "lark": {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    "ebnf": {"structured_outputs": {"grammar": 'root ::= "a" | root "b"'}},
    "white space": {"structured_outputs": {"json": OBJECT, "whitespace_pattern": " ?"}},
}


@in_loop
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_constraint_reaches_the_engine(path: str, name: str) -> None:
    """Invariant 11, at both endpoints and for every choice of n."""
    engine = GrammarEngine()
    base: dict[str, Any] = {"prompt": "hi"}
    if path == CHAT:
        base = {"messages": [{"role": "user", "content": "hi"}]}
    async with house(engine) as server:
        answer = await server.client.post(path, json={**base, **GOOD[name], "n": 2})
    assert answer.status_code == 200, answer.text
    assert len(engine.grammars) == 2
    assert all(engine.grammars)


@in_loop
@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}], ids=str
)
async def test_no_constraint_is_no_grammar(fields: dict[str, Any]) -> None:
    engine = GrammarEngine()
    async with house(engine) as server:
        assert (await server.chat("hi", **fields)).status_code == 200
    assert engine.grammars == [b""]


BAD: dict[str, dict[str, Any]] = {
    "nothing": {"structured_outputs": {}},
    "json_object false": {"structured_outputs": {"json_object": False}},
    "json empty text": {"structured_outputs": {"json": ""}},
    "json broken text": {"structured_outputs": {"json": "{"}},
    "regex empty": {"structured_outputs": {"regex": ""}},
    "regex bad": {"structured_outputs": {"regex": "("}},
    "regex long": {"structured_outputs": {"regex": "a" * 5000}},
    "regex nested": {"structured_outputs": {"regex": "(" * 2000 + ")" * 2000}},
    "regex of nothing": {"structured_outputs": {"regex": "^$"}},
    "grammar empty": {"structured_outputs": {"grammar": ""}},
    "grammar no root": {"structured_outputs": {"grammar": 'x ::= "a"'}},
    "grammar unknown rule": {"structured_outputs": {"grammar": "root ::= other"}},
    "grammar root twice": {"structured_outputs": {"grammar": 'root ::= "a"\nroot ::= "b"'}},
    "grammar without end": {"structured_outputs": {"grammar": "start: start"}},
    "grammar nested": {"structured_outputs": {"grammar": "root ::= " + "(" * 60_000}},
    "lark nested": {"structured_outputs": {"grammar": "start: " + "(" * 30_000 + '"a"'}},
    "choice empty": {"structured_outputs": {"choice": []}},
    "choice of nothing": {"structured_outputs": {"choice": [""]}},
    "choice number": {"structured_outputs": {"choice": [1]}},
    "choice text": {"structured_outputs": {"choice": "ab"}},
    "choice many": {"structured_outputs": {"choice": [str(i) for i in range(1001)]}},
    "two": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "unknown": {"structured_outputs": {"structural_tag": {}}},
    "white space of regex": {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    "not an object": {"structured_outputs": "json"},
    "format and outputs": {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
    },
    "format without type": {"response_format": {}},
    "format of unknown type": {"response_format": {"type": "x"}},
    "format without schema": {"response_format": {"type": "json_schema"}},
    "format with null schema": {"response_format": schema_format(None)},
    "schema beside json_schema": {"response_format": {**schema_format({}), "schema": OBJECT}},
    "schema of text": {"response_format": {"type": "text", "schema": OBJECT}},
    "json_schema of json_object": {
        "response_format": {**schema_format(OBJECT), "type": "json_object"}
    },
    "bad schema of json_object": {
        "response_format": {"type": "json_object", "schema": {"type": "x"}}
    },
    "unknown beside schema": {"response_format": schema_format({}, regex="a")},
    "schema of unknown type": {"response_format": schema_format({"type": "not-a-type"})},
    "schema text": {"response_format": schema_format("text")},
    "schema list": {"response_format": schema_format([])},
    "schema number": {"response_format": schema_format(3)},
    "tuple of draft 7": {"response_format": schema_format({"items": [{"type": "null"}]})},
    "strict text": {"response_format": schema_format({}, strict="yes")},
    "old field": {"guided_json": OBJECT},
    "surrogate": {"structured_outputs": {"choice": ["\ud800"]}},
}


@in_loop
@pytest.mark.parametrize("name", BAD)
async def test_degenerate_constraint_is_a_400_and_never_reaches_the_engine(name: str) -> None:
    """B059 B061 B062 B065: by a written rule, at request time, before any event."""
    engine = GrammarEngine()
    async with house(engine) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **BAD[name]}
        answer = await server.client.post(
            CHAT, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 600
        assert engine.grammars == []
        assert (await server.chat("hi")).status_code == 200  # nothing sticks


@in_loop
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format({"$ref": "#"})},
        {"structured_outputs": {"grammar": "start: start"}},
        {"structured_outputs": {"regex": "[^\\x00-\\x{10FFFF}]"}},
    ],
    ids=["schema", "grammar", "regex"],
)
async def test_a_constraint_that_no_text_satisfies_is_told_so(fields: dict[str, Any]) -> None:
    async with house(GrammarEngine()) as server:
        answer = await server.chat("hi", **fields)
    assert answer.status_code == 400
    assert "no text can satisfy it" in answer.json()["error"]["message"]
    assert [answer.json()["error"]["param"]] == list(fields)


@in_loop
async def test_bad_grammar_after_a_good_one_and_before_it() -> None:
    """B062."""
    good = {"structured_outputs": {"grammar": 'root ::= "a"'}}
    bad = {"structured_outputs": {"grammar": 'root ::= "a"\nroot ::= b'}}
    async with house(GrammarEngine()) as server:
        codes = [(await server.chat("hi", **fields)).status_code for fields in (good, bad) * 2]
    assert codes == [200, 400, 200, 400]


def nested(kind: str, depth: int) -> str:
    """JSON text, since no library would build it."""
    before, after = {
        "object": ('{"type":"object","properties":{"a":', "}}"),
        "anyOf": ('{"anyOf":[', "]}"),
        "array": ('{"type":"array","items":', "}"),
    }[kind]
    return before * depth + "{}" + after * depth


@in_loop
@pytest.mark.parametrize("depth", [60, 1_000, 60_000])
@pytest.mark.parametrize("kind", ["object", "anyOf", "array"])
async def test_deep_schema_is_a_400(kind: str, depth: int) -> None:
    """B065."""
    schema = nested(kind, depth)
    body = (
        '{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema",'
        f'"json_schema":{{"name":"x","schema":{schema}}}}}}}'
    )
    async with house(GrammarEngine()) as server:
        answer = await server.client.post(
            CHAT, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert (await server.chat("hi")).status_code == 200


HOSTILE: dict[str, Any] = {
    "cross product": {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]
    },
    "doubling references": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
            "d40": {"type": "integer"},
        },
    },
    "counted pattern": {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}b$"},
    "both ends": {"type": "string", "pattern": "(a|b)*a(a|b){200}", "maxLength": 100_000},
    "many names": {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for i in range(3000)
        },
    },
    "large enum": {"enum": [f"value {i}" * 3 for i in range(15_000)]},
    "many values": {"enum": list(range(30_000))},
}


@in_loop
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_schema_ends_in_an_answer_while_others_go_on(name: str) -> None:
    """B065 B158: 200 or 400 within the limits; another stream is served meanwhile."""
    async with house(GrammarEngine()) as server:
        hostile = asyncio.create_task(
            server.chat("hi", response_format=schema_format(HOSTILE[name]))
        )
        other = await server.chat("hi", stream=True)
        assert other.status_code == 200
        answer = await hostile
        assert answer.status_code in (200, 400)
        assert (await server.chat("hi")).status_code == 200


@in_loop
async def test_many_distinct_schemas_do_not_pile_up() -> None:
    """B158: hundreds of unique schemas at once, from one client."""
    async with house(GrammarEngine()) as server:
        schemas = [{"const": f"value {number}"} for number in range(300)]
        answers = await asyncio.gather(
            *(server.chat("hi", response_format=schema_format(schema)) for schema in schemas)
        )
    codes = {answer.status_code for answer in answers}
    assert codes <= {200, 429}
    assert 200 in codes
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)


@in_loop
async def test_constraint_that_cannot_be_kept_is_the_clients_error_and_not_tried_again() -> None:
    """A 5xx would be sent again by clients; what the request asked for fails each time.

    Nor is it an error of ours in the metrics, which would wake somebody.
    """

    class Contradicted(GrammarEngine):
        def submit(self, plan: Any) -> Any:
            pending = super().submit(plan)
            pending.value = replace(pending.value, token_ids=((),), row_errors=((0, NOTHING_LEFT),))
            return pending

    async with house(Contradicted()) as server:
        plain = await server.chat("hi", structured_outputs={"regex": "a"}, bad_words=["a"])
        stream = await server.chat(
            "hi", structured_outputs={"regex": "a"}, bad_words=["a"], stream=True
        )
        assert await server.metric("paceline_requests_finished_total", reason="invalid") == 2
        assert await server.metric("paceline_requests_finished_total", reason="error") == 0
    for answer in (plain, stream):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "constraint_failed"
        assert "no token" in answer.json()["error"]["message"]


@in_loop
async def test_model_without_an_end_refuses_constraints() -> None:
    tokenizer: Tokenizer = byte_tokenizer(eos_token_ids=frozenset())
    async with house(GrammarEngine(), tokenizer=tokenizer) as server:
        answer = await server.chat("hi", structured_outputs={"regex": "a"})
    assert answer.status_code == 400


def test_schema_of_the_client_cannot_switch_the_compiler() -> None:
    """`x-guidance` would turn enforcement off."""
    part = answer_part(None, {"json": {"type": "integer", "x-guidance": {"lenient": True}}})
    assert part is not None
    assert part["json_schema"]["x-guidance"].keys() == {"whitespace_pattern"}
