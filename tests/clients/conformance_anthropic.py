"""anthropic-python against the server: messages, streams, tools, counting and errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

KEY = "sk-conformance"
MODEL = "scripted"
HELLO = "Hello there, čau \U0001f600!"
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(params=["api_key", "auth_token"])
def client(url: str, request: pytest.FixtureRequest) -> Any:
    with Anthropic(base_url=url, max_retries=0, **{request.param: KEY}) as made:
        yield made


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_messages(client: Anthropic) -> None:
    made = client.messages.create(
        model=MODEL, max_tokens=100, messages=user("hello"), system="Be kind."
    )
    (block,) = made.content
    assert block.type == "text"
    assert block.text == HELLO
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    assert made.usage.output_tokens > 0
    assert made._request_id


def test_stream_helper(client: Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=user("hello")) as stream:
        assert "".join(stream.text_stream) == HELLO
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 0


def test_raw_events_come_in_order(client: Anthropic) -> None:
    stream = client.messages.create(model=MODEL, max_tokens=3, messages=user("count"), stream=True)
    kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_limits_and_stop_sequences(client: Anthropic) -> None:
    cut = client.messages.create(model=MODEL, max_tokens=3, messages=user("count"))
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model=MODEL, max_tokens=50, messages=user("stop early"), stop_sequences=["STOP"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")


def test_tools_there_and_back(client: Anthropic) -> None:
    messages = user("weather?")
    first = client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "22 degrees"}
    messages += [{"role": "assistant", "content": first.content}]
    messages += [{"role": "user", "content": [result]}]
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=messages, tools=[WEATHER]
    ) as stream:
        assert stream.get_final_text() == "It is 22 degrees in Paris."
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=user("weather?"), tools=[WEATHER]
    ) as stream:
        last = stream.get_final_message().content[-1]
    assert last.type == "tool_use"
    assert last.input == {"city": "Paris"}


def test_count_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user("hello"))
    used = client.messages.create(model=MODEL, max_tokens=2, messages=user("hello")).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


# As agents send it, whether or not a model can follow.
AGENT: Any = {
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1"},
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
    "betas": ["context-management-2025-06-27", "effort-2025-11-24"],
}


def test_hints_of_an_agent_do_not_keep_it_from_its_answer(client: Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 100, "messages": user("weather?"), **AGENT}
    raw = client.beta.messages.with_raw_response.create(**asked)
    assert "output_config.effort" in raw.headers["x-paceline-ignored-params"]
    with client.beta.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for made in (raw.parse(), streamed):
        call = made.content[-1]
        assert call.type == "tool_use"
        assert call.input == {"city": "Paris"}
        assert made.context_management is not None
        assert made.context_management.applied_edits == []
    del asked["max_tokens"], asked["metadata"]
    counted = client.beta.messages.count_tokens(**asked)
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens == counted.input_tokens


def test_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert model == client.models.retrieve(MODEL)
    assert model.created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.request_id


def test_errors_become_the_right_classes(client: Anthropic, url: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(
            model=MODEL, max_tokens=5, messages=user("hi"), extra_body={"temperature": 9}
        )
    assert "temperature" in bad.value.message
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=user("hi"))
    wrong = Anthropic(base_url=url, api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model=MODEL, max_tokens=5, messages=user("hi"))
