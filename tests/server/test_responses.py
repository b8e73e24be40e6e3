"""The Responses API: items, events in their order, and what is kept for whom and how long."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from server.responses.store import MemoryResponses, StoredResponse
from tests.server.test_anthropic import CALL, FailingEngine, named_events
from tests.support.http_server import MODEL, House, TextEngine, eventually, house, in_loop
from tests.support.tokenizers import byte_tokenizer

RESPONSES = "/v1/responses"
SCRIPTS = {
    "and then": "Later.",
    "greet": "Hello, čau \U0001f600!",
    "look up": "Let me see. " + CALL,
    "cut": "x" * 500,
    "sayless": "",
}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "json_schema", "name": "o", "schema": {"type": "object"}, "strict": True}


async def ask(server: House, text: Any = "greet", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"model": MODEL, "input": text, **fields}
    return await server.client.post(RESPONSES, json=body, headers=headers)


def accumulated(text: str) -> dict[str, Any]:
    """The response that a client makes of the events; asserts their order and numbers."""
    events = [data for _, data in named_events(text)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert event["item"]["status"] in ("completed", "incomplete")
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][-1]["text"] += event["delta"]
            if kind == "output_text.delta":
                item["content"][-1]["logprobs"] += event["logprobs"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][-1]["text"]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][-1]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        else:
            assert kind == "function_call_arguments.done"
            assert event["arguments"] == item["arguments"]
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    assert events[0]["response"]["output"] == []
    return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    usage = {k: v for k, v in response["usage"].items() if k != "input_tokens_details"}
    return {**response, "id": "", "created_at": 0, "output": items, "usage": usage}


CASES: list[dict[str, Any]] = [
    {},
    {"text": "look up", "tools": [TOOL]},
    {"text": "look up", "tools": [TOOL], "tool_choice": "none"},
    {"text": "cut", "max_output_tokens": 7},
    {"text": "sayless"},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "store": False, "user": "u"},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "text": "x", "max_output_tokens": 9},
    {"text": [{"role": "user", "content": [{"type": "input_text", "text": "greet"}]}]},
]


@pytest.mark.parametrize("case", CASES, ids=[str(list(case.items())[:2]) for case in CASES])
@in_loop
async def test_a_stream_adds_up_to_the_plain_answer_and_to_what_is_stored(
    case: dict[str, Any],
) -> None:
    """Every field, ids aside."""
    fields = dict(case)
    text = fields.pop("text", "greet")
    async with house(TextEngine(SCRIPTS)) as server:
        plain = await ask(server, text, **fields)
        assert plain.status_code == 200, plain.text
        stream = await ask(server, text, **fields, stream=True)
        response = accumulated(stream.text)
        assert without_ids(response) == without_ids(plain.json())
        for made in (response, plain.json()):
            stored = await server.client.get(f"{RESPONSES}/{made['id']}")
            if made["store"]:
                assert stored.json() == made
            else:
                assert stored.status_code == 404


@in_loop
async def test_a_conversation_goes_on_from_the_previous_response() -> None:
    """The model sees all that was said, but the instructions of this request only."""
    async with house(TextEngine(SCRIPTS)) as server:
        first = (await ask(server, instructions="OLD RULES")).json()
        again = await ask(
            server, "and then?", previous_response_id=first["id"], instructions="NEW RULES"
        )
        assert again.json()["output"][0]["content"][0]["text"] == "Later."
        shown = bytes(t for t in server.engine.prompts[0] if t < 256).decode()
        assert "Hello, čau" in shown
        assert "NEW RULES" in shown
        assert "OLD RULES" not in shown
        third = await ask(server, "and then?", previous_response_id=again.json()["id"])
        items = await server.client.get(f"{RESPONSES}/{third.json()['id']}/input_items?order=asc")
        roles = [item["role"] for item in items.json()["data"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]


@in_loop
async def test_tools_go_there_and_back() -> None:
    async with house(TextEngine({"42 degrees": "Warm.", **SCRIPTS})) as server:
        first = (await ask(server, "look up", tools=[TOOL])).json()
        call = first["output"][1]
        assert (call["type"], call["name"]) == ("function_call", "look")
        result = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "42 degrees",
        }
        fields: dict[str, Any] = {"tools": [TOOL]}
        second = await ask(server, [result], previous_response_id=first["id"], **fields)
        assert second.json()["output"][0]["content"][0]["text"] == "Warm."
        said = {"role": "user", "content": "look up"}
        whole = await ask(server, [said, *first["output"], result], store=False, **fields)
        assert whole.json()["output"][0]["content"][0]["text"] == "Warm."


@in_loop
async def test_input_is_counted_as_an_answer_counts_it() -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        first = (await ask(server)).json()
        fields: list[dict[str, Any]] = [{}, {"instructions": "Be brief."}, {"tools": [TOOL]}]
        fields.append({"previous_response_id": first["id"]})
        for extra in fields:
            used = (await ask(server, "greet", **extra)).json()["usage"]["input_tokens"]
            body = {"input": "greet", **extra}
            counted = await server.client.post(RESPONSES + "/input_tokens", json=body)
            assert counted.json() == {"object": "response.input_tokens", "input_tokens": used}


@in_loop
async def test_nobody_sees_the_responses_of_another_tenant() -> None:
    """Not to read, continue, delete, cancel or list; it is as if there were none."""
    config = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"))
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    async with house(TextEngine(SCRIPTS), config) as server:
        made = (await ask(server, headers=alice)).json()
        path = f"{RESPONSES}/{made['id']}"
        for method, tail in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            answer = await server.client.request(method, path + tail, headers=bob)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "response_not_found"
        continued = await ask(server, "x", previous_response_id=made["id"], headers=bob)
        assert continued.status_code == 404
        assert (await server.client.get(path, headers=alice)).json() == made
        gone = await server.client.delete(path, headers=alice)
        assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
        assert (await server.client.get(path, headers=alice)).status_code == 404


@in_loop
async def test_a_background_response_is_made_while_nobody_listens() -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        started = (await ask(server, background=True)).json()
        assert (started["status"], started["output"]) == ("in_progress", [])
        path = f"{RESPONSES}/{started['id']}"

        async def is_done() -> bool:
            return (await server.client.get(path)).json()["status"] == "completed"

        await eventually(is_done)
        done = (await server.client.get(path)).json()
        assert done["output"][0]["content"][0]["text"] == SCRIPTS["greet"]
        assert done["id"] == started["id"]
        cancelled = await server.client.post(path + "/cancel")
        assert cancelled.json() == done


@in_loop
async def test_cancelling_a_background_response_frees_the_engine() -> None:
    async with house(TextEngine(step_seconds=0.01)) as server:
        started = (await ask(server, "endless", background=True)).json()
        path = f"{RESPONSES}/{started['id']}"
        await eventually(lambda: server.core.num_open > 0)
        early = await ask(server, "x", previous_response_id=started["id"])
        assert early.json()["error"]["param"] == "previous_response_id"
        cancelled = await server.client.post(path + "/cancel")
        assert cancelled.json()["status"] == "cancelled"
        await eventually(lambda: server.core.num_open == 0)
        assert (await server.client.get(path)).json()["status"] == "cancelled"
        plain = (await ask(server, "x", max_output_tokens=2)).json()
        answer = await server.client.post(f"{RESPONSES}/{plain['id']}/cancel")
        assert answer.status_code == 400


@in_loop
async def test_a_failure_is_told_in_the_stream_and_kept_of_a_background_response() -> None:
    async with house(FailingEngine(SCRIPTS)) as server:
        events = named_events((await ask(server, "cut", stream=True)).text)
        assert events[-1][0] == "error"
        assert events[-1][1]["code"]
        started = (await ask(server, "cut", background=True)).json()
        if "error" in started and "id" not in started:
            return  # the engine is gone already, and says so at once

        async def has_failed() -> bool:
            body = (await server.client.get(f"{RESPONSES}/{started['id']}")).json()
            return body["status"] == "failed" and bool(body["error"]["message"])

        await eventually(has_failed)


@in_loop
async def test_what_is_not_served_is_refused_by_name() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"input": [image]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"background": True, "store": False}, "background"),
        ({"include": ["everything"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ]
    async with house(TextEngine(SCRIPTS)) as server:
        for fields, param in cases:
            body = {"input": "greet", **fields}
            answer = await server.client.post(RESPONSES, json=body)
            assert answer.status_code in (400, 404), (fields, answer.text)
            assert answer.json()["error"]["param"] == param, answer.text
        for empty, word in (({"input": ""}, "empty"), ({}, "required")):
            answer = await server.client.post(RESPONSES, json=empty)
            assert answer.status_code == 400
            assert word in answer.json()["error"]["message"]


@in_loop
async def test_errors_name_the_field_that_was_sent() -> None:
    """Not that of the chat request which it becomes; in a stream too, and by the counter."""
    bad = {"type": "json_schema", "name": "o", "schema": {"not": {}}}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "[1]"}
    before = {"role": "user", "content": "a"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_output_tokens": 900}, "max_output_tokens"),
        ({"text": {"format": bad}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "o"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_object", "schema": {"type": "x"}}}},
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, {**TOOL, "parameters": {"type": "array"}}]}, "tools[1].parameters"),
        ({"input": [before, call]}, "input[1].arguments"),
        ({"input": [before, {**call, "arguments": "{}", "name": ""}]}, "input"),
    ]
    async with house(TextEngine(SCRIPTS), ServerConfig(max_output_tokens=300)) as server:
        for fields, param in cases:
            for stream in (False, True):
                body = {"model": MODEL, "input": "greet", **fields, "stream": stream}
                answer = await server.client.post(RESPONSES, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), answer.text
                assert "response_format" not in error["message"]
                assert "max_tokens" not in error["message"]
            if param != "max_output_tokens":
                counted = await server.client.post(RESPONSES + "/input_tokens", json=body)
                assert counted.json()["error"]["param"] == param, counted.text


@in_loop
async def test_thoughts_that_come_back_as_a_summary_are_thoughts() -> None:
    """Of other servers there is nothing else; where both are there, the thoughts count."""
    shows = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    )
    engine = TextEngine(SCRIPTS)
    summary = [{"type": "summary_text", "text": "in short"}]
    content = [{"type": "reasoning_text", "text": "at length"}]
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": summary, "content": None},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": summary, "content": content},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "greet"},
    ]
    async with house(engine, tokenizer=byte_tokenizer(shows)) as server:
        assert (await ask(server, items)).status_code == 200
    (prompt,) = engine.prompts.values()
    shown = bytes(token for token in prompt if token < 256).decode()
    assert "[assistant]in shortb[assistant]at lengthc" in shown


@in_loop
async def test_a_response_that_was_cut_within_a_call_is_not_continued() -> None:
    """Its item is no call that a template could show; the fault is not in the new input."""
    async with house(TextEngine(SCRIPTS)) as server:
        first = (await ask(server, "look up", tools=[TOOL], max_output_tokens=60)).json()
        assert first["output"][-1]["type"] == "function_call"
        assert first["status"] == "incomplete"
        again = await ask(server, previous_response_id=first["id"])
        assert again.json()["error"]["param"] == "previous_response_id"


def kept(text: str) -> StoredResponse:
    return StoredResponse({"id": text}, ({"text": text},), 0, 1)


@in_loop
async def test_the_store_forgets_with_time_and_stays_within_its_bound() -> None:
    clock = [0.0]
    store = MemoryResponses(lambda: clock[0], max_bytes=1000, ttl_seconds=10)
    await store.put(("a", "1"), kept("x" * 100))
    clock[0] = 9.9
    await store.put(("a", "2"), kept("y" * 100))
    assert await store.get(("a", "1")) is not None
    clock[0] = 10.0
    assert await store.get(("a", "1")) is None
    assert await store.get(("a", "2")) is not None
    assert await store.get(("b", "2")) is None
    for index in range(50):
        await store.put(("a", f"more-{index}"), kept("z" * 100))
        assert store.num_bytes <= 1000
    assert await store.get(("a", "2")) is None
    assert await store.get(("a", "more-49")) is not None
    await store.put(("a", "more-49"), kept("w" * 2000))
    assert await store.get(("a", "more-49")) is None
    clock[0] = 30.0
    assert not await store.delete(("a", "more-48"))
    assert store.num_bytes == 0
