"""The Anthropic API: its blocks, its events in their order, its errors, over the way of chat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from scheduler.types import StepPlan
from server.config import ServerConfig
from tests.support.http_server import MODEL, House, TextEngine, house, in_loop
from tests.support.tokenizers import byte_tokenizer

MESSAGES = "/v1/messages"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky", "times": 2}}\n</tool_call>'
SCRIPTS = {
    "greet": "Hello, čau \U0001f600!",
    "look up": "Let me see. " + CALL,
    "cut": "x" * 500,
    "stop here": "one END two",
    "sayless": "",
}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


class FailingEngine(TextEngine):
    """Its third step fails."""

    def submit(self, plan: StepPlan) -> Any:
        pending = super().submit(plan)
        if self.num_steps == 3:
            self.fail_step.set()
        return pending


def body(text: str = "greet", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 100, "messages": messages, **fields}


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def accumulated(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What a client makes of a stream; asserts the order of events on the way."""
    events = [event for event in events if event[0] != "ping"]
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0][0] == "message_start"
    message: dict[str, Any] = events[0][1]["message"]
    assert message["stop_reason"] is None
    open_block: dict[str, Any] | None = None
    partial = ""
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert open_block is None
            assert data["index"] == len(message["content"])
            open_block, partial = data["content_block"], ""
            message["content"].append(open_block)
        elif name == "content_block_delta":
            assert open_block is not None
            assert data["index"] == len(message["content"]) - 1
            delta = data["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                assert delta[kind]
                open_block[kind] += delta[kind]
        else:
            assert name == "content_block_stop"
            assert open_block is not None
            if partial:
                open_block["input"] = json.loads(partial)
            open_block = None
    assert open_block is None
    ending = events[-2][1]
    extras = {name: ending[name] for name in ending.keys() & {"timings", "context_management"}}
    usage = {**message["usage"], **ending["usage"]}
    return {**message, **ending["delta"], **extras, "usage": usage}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = message["usage"]  # the second request finds the prompt in the cache
    used = {"input": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    return {
        **message,
        "id": "",
        "content": blocks,
        "usage": {**used, "out": usage["output_tokens"]},
    }


async def ask(server: House, **fields: Any) -> httpx.Response:
    return await server.client.post(MESSAGES, json=body(**fields))


CASES: list[dict[str, Any]] = [
    {},
    {"text": "look up", "tools": [TOOL]},
    {"text": "look up"},
    {"text": "cut", "max_tokens": 7},
    {"text": "stop here", "stop_sequences": ["END"]},
    {"text": "sayless"},
    {"system": "greet"},
    {"system": [{"type": "text", "text": "greet", "cache_control": {"type": "ephemeral"}}]},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "text": "other", "max_tokens": 9},
]


@pytest.mark.parametrize("case", CASES, ids=[str(list(case.items())[:1]) for case in CASES])
@in_loop
async def test_a_stream_adds_up_to_the_plain_answer(case: dict[str, Any]) -> None:
    """Every field, ids aside; the events come in the order that clients rely on."""
    async with house(TextEngine(SCRIPTS)) as server:
        plain = await ask(server, **case)
        assert plain.status_code == 200, plain.text
        stream = await ask(server, **case, stream=True)
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        message = accumulated(named_events(stream.text))
        assert without_ids(message) == without_ids(plain.json())
        assert plain.headers["request-id"] == plain.headers["x-request-id"]


@in_loop
async def test_why_an_answer_ended_is_told_in_this_apis_words() -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        for case, reason, stop in (
            ({}, "end_turn", None),
            ({"text": "look up", "tools": [TOOL]}, "tool_use", None),
            ({"text": "cut", "max_tokens": 7}, "max_tokens", None),
            ({"text": "cut", "max_tokens": 10_000}, "model_context_window_exceeded", None),
            ({"text": "stop here", "stop_sequences": ["zz", "END"]}, "stop_sequence", "END"),
        ):
            message = (await ask(server, **case)).json()
            if reason == "model_context_window_exceeded":
                server_limit = server.engine.capacity.max_model_len
                if message["stop_reason"] == "end_turn":  # the script was shorter
                    assert server_limit > 500
                    continue
            assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


@in_loop
async def test_tools_go_there_and_back() -> None:
    """A call becomes a block with an object; the result of it is shown to the model."""
    async with house(TextEngine({**SCRIPTS, "42 degrees": "Warm."})) as server:
        first = (await ask(server, text="look up", tools=[TOOL])).json()
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        call = first["content"][1]
        assert call["input"] == {"at": "the sky", "times": 2}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42 degrees"}
        turns = [
            {"role": "user", "content": "Say."},
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        second = await server.client.post(MESSAGES, json=body(tools=[TOOL]) | {"messages": turns})
        assert second.json()["content"] == [{"type": "text", "text": "Warm."}]


@in_loop
async def test_an_open_turn_of_the_assistant_is_continued() -> None:
    async with house(TextEngine({"a riddle": "!"})) as server:
        turns = [
            {"role": "user", "content": "a riddle"},
            {"role": "assistant", "content": "The answer is"},
        ]
        answer = await server.client.post(MESSAGES, json=body() | {"messages": turns})
        assert answer.json()["content"] == [{"type": "text", "text": "!"}]
        shown = bytes(t for t in server.engine.prompts[0] if t < 256).decode()
        assert shown.endswith("The answer is")


@in_loop
async def test_tokens_are_counted_as_an_answer_counts_them() -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        for extra in ({}, {"tools": [TOOL]}, {"system": "Be brief."}):
            asked = body(**extra)
            used = (await server.client.post(MESSAGES, json=asked)).json()["usage"]
            del asked["max_tokens"]
            counted = await server.client.post(MESSAGES + "/count_tokens", json=asked)
            total = used["input_tokens"] + used["cache_read_input_tokens"]
            assert counted.json() == {"input_tokens": total}


@in_loop
async def test_errors_have_this_apis_form_on_its_paths_only() -> None:
    """Status, type and envelope; the field at fault is in the message; ids in body and headers."""
    config = ServerConfig(api_keys=("secret",))
    async with house(TextEngine(SCRIPTS), config) as server:
        key = {"authorization": "Bearer secret"}
        cases: list[tuple[dict[str, str], bytes, int, str, str]] = [
            ({}, json.dumps(body()).encode(), 401, "authentication_error", "key"),
            (key, b"{", 400, "invalid_request_error", "JSON"),
            (key, b"{}", 400, "invalid_request_error", "model"),
            (key, json.dumps(body(max_tokens=0)).encode(), 400, "invalid_request_error", "max_t"),
            (key, json.dumps({**body(), "model": "x"}).encode(), 404, "not_found_error", "model"),
            (key, b'"' + b"x" * (20 << 20), 413, "request_too_large", "bytes"),
        ]
        for headers, content, status, kind, words in cases:
            answer = await server.client.post(MESSAGES, content=content, headers=headers)
            assert answer.status_code == status
            error = answer.json()
            assert set(error) == {"type", "error", "request_id"}
            assert error["type"] == "error"
            assert set(error["error"]) == {"type", "message"}
            assert error["error"]["type"] == kind
            assert words in error["error"]["message"]
            assert answer.headers["request-id"] == error["request_id"]
        missing = await server.client.get(MESSAGES + "/batches", headers=key)
        assert missing.json()["error"]["type"] == "not_found_error"
        other = await server.client.get("/v1/messagesx", headers=key)
        assert set(other.json()["error"]) == {"message", "type", "param", "code"}


@in_loop
async def test_what_is_not_served_is_refused_by_name() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"service_tier": "flex"}, "service_tier"),
    ]
    async with house(TextEngine(SCRIPTS)) as server:
        for fields, words in cases:
            answer = await server.client.post(MESSAGES, json=body() | fields)
            assert answer.status_code == 400, fields
            assert words in answer.json()["error"]["message"], (fields, answer.text)
        ok = body(
            thinking={"type": "disabled"}, metadata={"user_id": "u"}, whatever=1, mcp_servers=[]
        )
        answer = await server.client.post(MESSAGES, json=ok)
        assert answer.status_code == 200
        assert answer.headers["x-paceline-ignored-params"] == "metadata, whatever"


@in_loop
async def test_a_failure_in_the_stream_is_a_named_event_and_the_last() -> None:
    async with house(FailingEngine(SCRIPTS)) as server:
        answer = await ask(server, text="cut", stream=True)
        events = named_events(answer.text)
        assert events[0][0] == "message_start"
        assert events[-1][0] == "error"
        assert events[-1][1]["error"]["type"] in ("api_error", "overloaded_error")
        assert "[DONE]" not in answer.text


@in_loop
async def test_turns_of_one_role_in_a_row_are_one_and_a_system_turn_may_come_anywhere() -> None:
    """Strict templates take neither; ollama/ollama#17774: Claude Code sends such turns."""
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": "greet"},
    ]
    engine = TextEngine(SCRIPTS)
    async with house(engine, tokenizer=byte_tokenizer(strict)) as server:
        answer = await server.client.post(MESSAGES, json=body() | {"messages": turns})
    assert answer.status_code == 200, answer.text
    (prompt,) = engine.prompts.values()
    shown = bytes(token for token in prompt if token < 256).decode()
    assert shown.startswith("[user]a\nb\nbe brief[assistant]c\n")
    assert shown.endswith("[user]greet")
