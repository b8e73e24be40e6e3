"""Tools over HTTP: what is refused, what the template sees, how calls are written, how they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from server.tools.definitions import ToolChoice, plan_tools
from tests.support.http_server import (
    TextEngine,
    events,
    finish_reasons,
    house,
    in_loop,
    texts,
)
from tests.support.tokenizers import CHATML, byte_tokenizer

CALLS = (
    'On it.\n<tool_call>[{"name": "ping", "arguments": {}}, '
    '{"name": "add", "arguments": {"a": 1, "s": "é\\""}}]</tool_call>'
)
EXPECTED = [("ping", "{}"), ("add", '{"a": 1, "s": "é\\""}')]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["a", "s"],
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("ping"), tool("add", ADD)]
NAMED = {"type": "function", "function": {"name": "add"}}


def caller(script: str = CALLS) -> TextEngine:
    return TextEngine({"call": script})


def joined(chunks: Sequence[Any]) -> list[tuple[str, str]]:
    """Calls as a client that concatenates reads them; checks the order of the pieces."""
    calls: list[list[str]] = []
    ids = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            found = choice["delta"].get("tool_calls", [])
            assert len(found) <= 1  # LlamaIndex reads the first of a chunk only
            for call in found:
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append([call["function"]["name"], ""])
                    ids.append(call["id"])
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    calls[call["index"]][1] += call["function"]["arguments"]
    assert len(set(ids)) == len(ids)
    return [(name, arguments) for name, arguments in calls]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]


@in_loop
@pytest.mark.parametrize(
    ("choice", "reason", "calls"),
    [
        (None, "tool_calls", EXPECTED),
        ("auto", "tool_calls", EXPECTED),
        ("required", "tool_calls", EXPECTED),
        (NAMED, "stop", EXPECTED),
        ("none", "stop", []),
    ],
    ids=str,
)
async def test_finish_reason_follows_the_table_streamed_and_plain(
    choice: Any, reason: str, calls: list[tuple[str, str]]
) -> None:
    """B052 B053 B055: equal in both modes; none never gives a call."""
    async with house(caller()) as server:
        plain = (await server.chat("call", tools=TOOLS, tool_choice=choice)).json()["choices"][0]
        stream = events(
            (await server.chat("call", tools=TOOLS, tool_choice=choice, stream=True)).text
        )
    assert plain["finish_reason"] == reason
    assert finish_reasons(stream) == {0: [reason]}
    assert calls_of(plain["message"]) == joined(stream) == calls
    assert texts(stream) == {0: plain["message"]["content"]}
    assert plain["message"]["content"] == ("On it." if calls else CALLS)


@in_loop
@pytest.mark.parametrize("stop", ['"', "ping", "]", "tool_call", "é", "a"])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=str)
async def test_a_stop_string_cuts_no_call(stop: str, choice: Any) -> None:
    """vllm-project/vllm#34101: half a call is of no use to anybody."""
    body = {"tools": TOOLS, "tool_choice": choice, "stop": [stop]}
    async with house(caller()) as server:
        plain = (await server.chat("call", **body)).json()["choices"][0]
        stream = events((await server.chat("call", stream=True, **body)).text)
    assert calls_of(plain["message"]) == joined(stream) == EXPECTED
    assert plain["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")


@in_loop
@pytest.mark.parametrize(
    ("script", "stop", "content"),
    [
        (CALLS, "it.", "On "),
        (CALLS, "\n", "On it."),
        ('Use <tool_call>, "so" to say.', '"', "Use <tool_call>, "),
        ('Use <tool_call>{"a": 1} and "so".', 'd "', 'Use <tool_call>{"a": 1} an'),
        ("Less is <", "<", "Less is "),
    ],
)
async def test_a_stop_string_ends_the_content(script: str, stop: str, content: str) -> None:
    """What looks like the beginning of a call, and is none, is content too."""
    async with house(caller(script)) as server:
        for include in (False, True):
            body = {"tools": TOOLS, "stop": [stop], "include_stop_str_in_output": include}
            plain = (await server.chat("call", **body)).json()["choices"][0]
            stream = events((await server.chat("call", stream=True, **body)).text)
            assert calls_of(plain["message"]) == joined(stream) == []
            assert plain["finish_reason"] == "stop"
            shown = content + (stop.strip() if include else "")
            assert plain["message"]["content"].strip() == texts(stream)[0].strip() == shown.strip()


@in_loop
async def test_cut_call_ends_with_length() -> None:
    """B055: and what there is of its arguments is the same streamed and plain."""
    limit = CALLS.index('"s"')
    async with house(caller()) as server:
        body = {"tools": TOOLS, "max_tokens": limit}
        plain = (await server.chat("call", **body)).json()["choices"][0]
        stream = events((await server.chat("call", **body, stream=True)).text)
    assert plain["finish_reason"] == "length"
    assert finish_reasons(stream) == {0: ["length"]}
    assert calls_of(plain["message"]) == joined(stream) == [EXPECTED[0], ("add", '{"a": 1, ')]


@in_loop
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
async def test_what_was_cut_before_the_name_of_a_call_is_no_content(choice: Any) -> None:
    async with house(caller(CALLS.partition("\n")[2])) as server:
        for limit in (1, 9, 20):
            body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": limit}
            plain = (await server.chat("call", **body)).json()["choices"][0]
            stream = events((await server.chat("call", stream=True, **body)).text)
            assert plain["finish_reason"] == "length"
            assert (plain["message"]["content"] or "") == texts(stream).get(0, "") == ""


@in_loop
async def test_answer_without_a_call_has_content_and_no_tool_calls() -> None:
    async with house(caller("Just text.")) as server:
        choice = (await server.chat("call", tools=TOOLS)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Just text.", "refusal": None}
    assert choice["finish_reason"] == "stop"


@in_loop
async def test_call_alone_has_null_content() -> None:
    async with house(caller(CALLS.removeprefix("On it.\n"))) as server:
        message = (await server.chat("call", tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert all(call["id"].startswith("call_") for call in message["tool_calls"])


@in_loop
async def test_each_choice_of_n_has_its_own_calls_and_ids() -> None:
    async with house(caller()) as server:
        choices = (await server.chat("call", tools=TOOLS, n=3)).json()["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6


@in_loop
async def test_official_client_reads_streams_and_plain_answers_alike() -> None:
    """Done when 4: chat.completions.stream() joins what it is sent."""
    async with house(caller(), live=True) as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        body: dict[str, Any] = {
            "model": "scripted",
            "messages": [{"role": "user", "content": "call"}],
            "tools": TOOLS,
        }
        plain = (await client.chat.completions.create(**body)).choices[0]
        async with client.chat.completions.stream(**body) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
        await client.close()
    for choice in (plain, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "On it."
        assert [
            (c.function.name, c.function.arguments) for c in choice.message.tool_calls
        ] == EXPECTED


@in_loop
async def test_logprobs_of_a_call_are_all_there() -> None:
    async with house(caller()) as server:
        body = {"tools": TOOLS, "logprobs": True}
        plain = (await server.chat("call", **body)).json()["choices"][0]
        stream = events((await server.chat("call", **body, stream=True)).text)
    streamed = [
        entry
        for chunk in stream
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == plain["logprobs"]["content"]
    assert bytes(b for entry in streamed for b in entry["bytes"]).decode() == CALLS


# --- what the model is told -----------------------------------------------------------------------


@in_loop
async def test_template_without_tools_is_helped_by_a_system_message() -> None:
    engine = caller()
    async with house(engine) as server:
        await server.chat("call", tools=TOOLS, max_tokens=1)
    (prompt,) = engine.prompts.values()
    text = bytes(t for t in prompt if t < 256).decode()
    assert text.startswith("system\n")
    assert json.dumps(ADD, separators=(",", ":")) in text
    assert "<tool_call>" in text


@in_loop
async def test_template_with_tools_gets_them_and_tool_choice_none_hides_them() -> None:
    template = "{% for t in tools or [] %}[{{ t.function.name }}]<tool_call>{% endfor %}" + CHATML
    engine = TextEngine()
    async with house(engine, tokenizer=byte_tokenizer(template)) as server:
        await server.chat("a", tools=TOOLS, max_tokens=1)
        shown = next(iter(engine.prompts.values()))
        await server.chat("a", tools=TOOLS, tool_choice="none", max_tokens=1)
        hidden = list(engine.prompts.values())[-1]
    assert bytes(t for t in shown if t < 256).startswith(b"[ping]<tool_call>[add]<tool_call>")
    assert b"ping" not in bytes(t for t in hidden if t < 256)


# --- what is refused ------------------------------------------------------------------------------


@in_loop
async def test_empty_and_null_tools_follow_one_rule() -> None:
    """B038: null equals absent; required or named without the tool is a 400 before any event."""
    async with house(caller()) as server:
        for tools in (None, []):
            for choice in (None, "none", "auto"):
                answer = await server.chat("x", tools=tools, tool_choice=choice, max_tokens=1)
                assert answer.status_code == 200, answer.text
            for choice in ("required", NAMED):
                answer = await server.chat("x", tools=tools, tool_choice=choice, stream=True)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "tool_choice"
        unknown = {"type": "function", "function": {"name": "nobody"}}
        answer = await server.chat("x", tools=TOOLS, tool_choice=unknown, stream=True)
    assert answer.status_code == 400
    assert "nobody" in answer.json()["error"]["message"]


@in_loop
@pytest.mark.parametrize(
    "odd",
    [
        {"type": "string", "pattern": "("},
        {"type": ["string", 5]},
        {"type": "foo"},
        {"type": None},
    ],
    ids=str,
)
async def test_bad_schema_of_a_tool_is_a_400_that_names_the_tool(odd: Any) -> None:
    """B058."""
    tools = [tool("good", ADD), tool("odd_one", {"type": "object", "properties": {"x": odd}})]
    named = {"type": "function", "function": {"name": "odd_one"}}
    async with house(caller()) as server:
        for choice in ("required", named):
            answer = await server.chat("call", tools=tools, tool_choice=choice)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "odd_one" in error["message"] or error["param"] == "tools[1].function.parameters"
        auto = await server.chat("call", tools=tools, tool_choice="auto")
        assert auto.status_code == 200
        assert (await server.chat("call", max_tokens=1)).status_code == 200


@in_loop
async def test_odd_but_legal_tools_do_not_spoil_the_others() -> None:
    """B067: no properties, no parameters, null parameters, a normal one."""
    bare = {"type": "function", "function": {"name": "bare"}}
    tools = [tool("empty", {"type": "object", "properties": {}}), bare, tool("nothing"), *TOOLS]
    async with house(caller()) as server:
        answer = await server.chat("call", tools=tools, tool_choice="required")
    assert answer.status_code == 200
    assert calls_of(answer.json()["choices"][0]["message"]) == EXPECTED


@in_loop
@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([1], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool("no spaces")], "tools[0].function.name"),
        ([tool("a"), tool("a")], "tools"),
        ([tool("a", [])], "tools[0].function.parameters"),
        ([tool("a", {"type": "array"})], "tools[0].function.parameters"),
        ([tool("a", strict="yes")], "tools[0].function.strict"),
        ([tool(f"t{i}") for i in range(129)], "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_malformed_tools_are_refused_by_place(tools: Any, param: str) -> None:
    async with house(caller()) as server:
        answer = await server.chat("call", tools=tools)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_parallel_calls_are_off_where_one_is_asked_for() -> None:
    assert plan_tools(TOOLS, "auto").is_parallel
    assert not plan_tools(TOOLS, "required", is_parallel=False).is_parallel
    named = plan_tools(TOOLS, NAMED, is_parallel=True)
    assert not named.is_parallel
    assert named.choice is ToolChoice.NAMED
    assert [found.name for found in named.callable] == ["add"]
    assert len(named.shown) == 2
