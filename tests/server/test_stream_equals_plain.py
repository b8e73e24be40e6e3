"""Streamed and plain answers are equal, for every endpoint that streams and every field it has."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server import test_anthropic, test_responses
from tests.server.test_openapi import BASES, NEEDS, SPEC, fields_of
from tests.support.http_server import TextEngine, events, house, in_loop

SCRIPTS = {"greet": '{"city": "Paris"}', "weather": test_anthropic.CALL}
STREAMING = sorted(
    path
    for path, methods in SPEC["paths"].items()
    if "text/event-stream"
    in methods.get("post", {"responses": {"200": {"content": {}}}})["responses"]["200"]["content"]
)
# Refused with a stream, and for that reason without one to compare.
PLAIN_ONLY = {"background", "prompt_logprobs"}


def joined_chat(text: str) -> dict[str, Any]:
    """The body that a client makes of chat chunks."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for chunk in events(text):
        whole |= {name: value for name, value in chunk.items() if name != "choices"}
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {"index": part["index"], "message": {}, "logprobs": None, "finish_reason": None},
            )
            _add_delta(choice["message"], part["delta"])
            if part["logprobs"] is not None:
                rows = choice["logprobs"] or {"content": [], "refusal": None}
                rows["content"] += part["logprobs"]["content"]
                choice["logprobs"] = rows
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            for name in part.keys() - {"index", "delta", "logprobs", "finish_reason"}:
                choice[name] = part[name]
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        elif name != "role":
            message[name] = message.get(name, "") + (value or "")


def joined_text(text: str) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for chunk in events(text):
        whole |= {name: value for name, value in chunk.items() if name != "choices"}
        for part in chunk["choices"]:
            empty = {"index": part["index"], "text": "", "logprobs": None, "finish_reason": None}
            choice = choices.setdefault(part["index"], empty)
            choice["text"] += part["text"]
            if part["logprobs"] is not None:
                rows = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {
                    name: rows[name] + values for name, values in part["logprobs"].items()
                }
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            for name in part.keys() - empty.keys():
                choice[name] = part[name]
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def comparable(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Without ids, instants, and what the prefix cache knew the second time."""
    if path == "/v1/messages":
        answer = test_anthropic.without_ids(answer)
    elif path == "/v1/responses":
        answer = test_responses.without_ids(answer)
    else:
        answer = {**answer, "choices": [_choice(choice) for choice in answer["choices"]]}
        answer["usage"] = {
            name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")
        }
    return {
        name: value
        for name, value in answer.items()
        if name not in ("id", "object", "created", "created_at", "timings")
    }


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    if "message" not in choice:
        return choice
    message = {
        name: value
        for name, value in choice["message"].items()
        if name not in ("role", "refusal", "tool_calls") and value not in ("", None)
    }
    calls = [
        {name: call["function"][name] for name in ("name", "arguments")}
        for call in choice["message"].get("tool_calls") or ()
    ]
    return {**choice, "message": {**message, "calls": calls}}


def streamed(path: str, answer: httpx.Response) -> dict[str, Any]:
    if path == "/v1/messages":
        return test_anthropic.accumulated(test_anthropic.named_events(answer.text))
    if path == "/v1/responses":
        return test_responses.accumulated(answer.text)
    return (joined_chat if "chat" in path else joined_text)(answer.text)


@pytest.mark.parametrize("path", STREAMING)
@in_loop
async def test_a_stream_adds_up_to_the_plain_answer_for_every_field(path: str) -> None:
    """With the field's example, in an answer of text and in one that may be a call."""
    assert len(STREAMING) == 4
    # The same key twice is a hit, which test_answer_cache compares.
    names = [name for name in fields_of(path) if name not in PLAIN_ONLY | {"answer_cache"}]
    async with house(TextEngine(SCRIPTS)) as server:
        for name in names:
            for given in fields_of(path)[name].get("examples", [BASES[path].get(name)]):
                base = {**BASES[path], "seed": 5, **NEEDS.get(name, {})}
                body = {**base, name: given, "stream": False, "stream_options": None}
                if name == "top_logprobs" and "chat" in path:
                    body["logprobs"] = True
                plain = await server.client.post(path, json=body)
                assert plain.status_code == 200, (name, plain.text)
                body["stream"] = True
                if "completions" in path:
                    body["stream_options"] = {"include_usage": True}
                made = await server.client.post(path, json=body)
                assert made.headers["content-type"].startswith("text/event-stream"), made.text
                whole = streamed(path, made)
                assert comparable(path, whole) == comparable(path, plain.json()), name
                assert ("timings" in whole) == ("timings" in plain.json()), name


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@in_loop
async def test_a_streamed_call_adds_up_to_the_plain_one(path: str) -> None:
    body = {**BASES[path], "seed": 5, "tools": fields_of(path)["tools"]["examples"][0]}
    for limit in ("max_tokens", "max_output_tokens"):
        if limit in body:
            body[limit] = 200
    text = "weather"
    body["input" if "input" in body else "messages"] = (
        text if "input" in body else [{"role": "user", "content": text}]
    )
    called = test_anthropic.CALL.replace("look", "weather")
    async with house(TextEngine({"weather": called})) as server:
        plain = await server.client.post(path, json=body)
        body |= {"stream": True}
        if "chat" in path:
            body["stream_options"] = {"include_usage": True}
        whole = streamed(path, await server.client.post(path, json=body))
    assert "the sky" in plain.text
    assert comparable(path, whole) == comparable(path, plain.json())
