"""Streamed and plain answers are equal, for every endpoint that streams and every field it has."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest

from server.tokenizer import Tokenizer
from tests.server import test_anthropic, test_responses
from tests.server.test_openapi import BASES, NEEDS, SPEC, fields_of
from tests.server.test_reasoning import MAY_THINK
from tests.support.http_server import MODEL, House, Script, TextEngine, events, house, in_loop, run
from tests.support.tokenizers import BOS, byte_tokenizer

# A special token within the text is shown only where that is asked for.
SCRIPTS: dict[str, Script] = {
    "greet": [*b'<think>\nHm.\n</think>\n\n{"ci', BOS, *b'ty": "Paris"}'],
    "weather": test_anthropic.CALL,
}
STREAMING = sorted(
    path
    for path, methods in SPEC["paths"].items()
    if "text/event-stream"
    in methods.get("post", {"responses": {"200": {"content": {}}}})["responses"]["200"]["content"]
)
# Not with a stream, or the difference itself, or of one value; a plain background response has
# nothing to compare (test_responses_again has), a second key is a hit (test_answer_cache), and a
# suffix needs another vocabulary (test_rest_of_sampling).
NOT_COMPARED = {
    *("answer_cache", "background", "prompt_logprobs", "stream", "suffix", "truncation"),
}
# Where the example is the default, or says nothing in this answer.
VALUES: dict[str, list[Any]] = {
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "echo": [True],
    "ignore_eos": [True],
    "include_reasoning": [False],
    "include_stop_str_in_output": [True],
    "model": [MODEL],
    "previous_response_id": ["of the first answer"],
    "skip_special_tokens": [False],
    "store": [False],
    "tool_choice": ["none"],
    "truncation_side": ["right"],
}
SAID = [{"role": "user", "content": "greet"}, {"role": "assistant", "content": '{"ci'}]
BESIDE: dict[str, dict[str, Any]] = {
    "continue_final_message": {"messages": SAID, "add_generation_prompt": False},
    "include_stop_str_in_output": {"stop": ["ar"]},
    "truncation_side": {"truncate_prompt_tokens": 30},
}
LIMITS = ("max_tokens", "max_output_tokens")
BESIDE_TOOLS = {"parallel_tool_calls", "tool_choice"}


@functools.cache
def thinker() -> Tokenizer:
    return byte_tokenizer(MAY_THINK)


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


def values_of(path: str, name: str) -> list[Any]:
    """What to try: each is not the default, which every other case has already."""
    field = fields_of(path)[name]
    shown = [value for value in field.get("examples", []) if value != field.get("default")]
    return shown or VALUES.get(name, [])


@pytest.mark.parametrize("path", STREAMING)
def test_every_field_has_a_value_that_is_not_its_default(path: str) -> None:
    """So a field without a case of its own cannot come."""
    assert len(STREAMING) == 4
    missing = [name for name in fields_of(path) if not values_of(path, name)]
    assert set(missing) <= NOT_COMPARED


@pytest.mark.parametrize("path", STREAMING)
def test_a_stream_adds_up_to_the_plain_answer_for_every_field(path: str) -> None:
    """With each value of the field, in an answer of thoughts and of text."""
    names = [name for name in fields_of(path) if name not in NOT_COMPARED]

    async def check() -> None:
        async with house(TextEngine(SCRIPTS), tokenizer=thinker()) as server:
            first = (await server.client.post("/v1/responses", json=BASES["/v1/responses"])).json()
            for name in names:
                for value in values_of(path, name):
                    given = first["id"] if name == "previous_response_id" else value
                    await compare(server, path, name, given)

    run(check, timeout_seconds=150)


async def compare(server: House, path: str, name: str, given: Any) -> None:
    limits = {limit: 48 for limit in LIMITS if limit in BASES[path]}
    body = {**BASES[path], **limits, "seed": 5, **NEEDS.get(name, {}), **BESIDE.get(name, {})}
    body |= {name: given, "stream": False, "stream_options": None}
    if name == "top_logprobs" and "chat" in path:
        body["logprobs"] = True
    if name in BESIDE_TOOLS:
        body["tools"] = fields_of(path)["tools"]["examples"][0]
    plain = await server.client.post(path, json=body)
    assert plain.status_code == 200, (name, given, plain.text)
    body["stream"] = True
    options = {"include_usage": True} if "completions" in path else {}
    body["stream_options"] = options | (given if name == "stream_options" else {})
    made = await server.client.post(
        path, json={**body, "stream_options": body["stream_options"] or None}
    )
    assert made.headers["content-type"].startswith("text/event-stream"), made.text
    whole = streamed(path, made)
    assert comparable(path, whole) == comparable(path, plain.json()), (name, given)
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
