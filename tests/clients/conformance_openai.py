"""openai-python against the server: what the client offers works as its own documentation says."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

KEY = "sk-conformance"
MODEL = "scripted"
HELLO = "Hello there, čau \U0001f600!"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


class Place(BaseModel):
    city: str
    country: str


@pytest.fixture
def client(url: str) -> Any:
    with OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_chat(client: OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=user("hello"), temperature=0)
    assert made.choices[0].message.content == HELLO
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens_details is not None
    assert made._request_id


def test_chat_with_parts_names_developer_and_logprobs(client: OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "hello"}]},
    ]
    made = client.chat.completions.create(
        model=MODEL, messages=messages, n=2, logprobs=True, top_logprobs=2, seed=1, user="u"
    )
    assert [choice.index for choice in made.choices] == [0, 1]
    for choice in made.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        data = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert data.decode() == HELLO


def test_chat_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=user("hello"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == HELLO
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


def test_chat_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user("hello"), n=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    for choice in final.choices:
        assert choice.message.content == HELLO
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"


def test_chat_parse(client: OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=user("as json"), response_format=Place
    )
    assert made.choices[0].message.parsed == Place(city="Paris", country="France")


def test_chat_stream_helper_parses(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user("as json"), response_format=Place
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Place(city="Paris", country="France")


def test_chat_tools_there_and_back(client: OpenAI) -> None:
    messages = user("weather?")
    made = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert made.choices[0].finish_reason == "tool_calls"
    message = made.choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}]
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert last.choices[0].message.content == "It is 22 degrees in Paris."


def test_chat_stream_helper_with_tools(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=user("weather?"),
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    call: Any = final.choices[0].message.tool_calls[0]  # type: ignore[index]
    assert call.function.name == "get_weather"
    assert call.function.parsed_arguments == {"city": "Paris"}
    assert call.id.count("call_") == 1
    assert "tool_calls.function.arguments.done" in {event.type for event in events}


def test_completions(client: OpenAI) -> None:
    made = client.completions.create(
        model=MODEL, prompt=["count", "hello"], max_tokens=8, logprobs=2, echo=True, seed=3
    )
    assert [choice.text for choice in made.choices] == ["count1 2 3 4 ", "helloHello th"]
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.tokens is not None
    assert made.choices[0].finish_reason == "length"


def test_completions_stream_and_stop(client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="stop early", stop=["STOP"], stream=True, max_tokens=50
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_responses(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello", metadata={"a": "b"})
    assert first.output_text == HELLO
    assert first.status == "completed"
    assert first.metadata == {"a": "b"}
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        model=MODEL, input="count", previous_response_id=first.id, instructions="Be brief."
    )
    assert second.output_text == "1 2 3 4 5 6 7 8 9"
    items = client.responses.input_items.list(second.id, order="asc")
    assert len(list(items)) == 3
    pages = client.responses.input_items.list(second.id, order="asc", limit=1)
    assert len(pages.data) == 1
    assert len(list(pages)) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_stream(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hello") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == HELLO
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    plain = client.responses.create(model=MODEL, input="hello", stream=True)
    assert "".join(e.delta for e in plain if e.type == "response.output_text.delta") == HELLO


def test_responses_parse_and_tools(client: OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="as json", text_format=Place)
    assert parsed.output_parsed == Place(city="Paris", country="France")
    first = client.responses.create(model=MODEL, input="weather?", tools=[FLAT_WEATHER])  # type: ignore[list-item]
    call: Any = first.output[0]
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "get_weather",
        '{"city": "Paris"}',
    )
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    second = client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=first.id,
        tools=[FLAT_WEATHER],  # type: ignore[list-item]
    )
    assert second.output_text == "It is 22 degrees in Paris."
    with client.responses.stream(
        model=MODEL,
        input="weather?",
        tools=[FLAT_WEATHER],  # type: ignore[list-item]
    ) as stream:
        final: Any = stream.get_final_response()
    assert final.output[0].parsed_arguments == {"city": "Paris"}


def test_responses_in_the_way_of_an_agent(client: OpenAI) -> None:
    """A group of functions, and a tool that only OpenAI runs, which is not offered."""
    group: Any = {"type": "namespace", "name": "sky", "description": "", "tools": [FLAT_WEATHER]}
    asked: Any = {
        "model": MODEL,
        "input": "weather?",
        "tools": [group, {"type": "web_search"}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "store": False,
    }
    raw = client.responses.with_raw_response.create(**asked)
    assert raw.headers["x-paceline-ignored-params"] == "tools.web_search"
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for made in (raw.parse(), streamed):
        call = made.output[-1]
        assert call.type == "function_call"
        assert (call.name, call.namespace) == ("get_weather", "sky")


def test_responses_in_the_background(client: OpenAI) -> None:
    started = client.responses.create(model=MODEL, input="hello", background=True)
    assert started.status == "in_progress"
    for _ in range(200):
        found = client.responses.retrieve(started.id)
        if found.status == "completed":
            break
    assert found.output_text == HELLO
    assert client.responses.cancel(started.id).status == "completed"


def test_responses_told_again(client: OpenAI) -> None:
    """A stored response as a stream, whole and from an event on, and by the helper."""
    stream = client.responses.create(model=MODEL, input="hello", stream=True)
    events = list(stream)
    started: Any = events[0]
    response_id = started.response.id
    assert list(client.responses.retrieve(response_id, stream=True)) == events
    rest = client.responses.retrieve(response_id, stream=True, starting_after=3)
    assert list(rest) == events[4:]
    with client.responses.stream(response_id=response_id) as helped:
        assert helped.get_final_response().output_text == HELLO


def test_responses_stream_in_the_background(client: OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="hello", background=True, stream=True)
    first: Any = next(iter(stream))
    stream.close()
    rest = client.responses.retrieve(
        first.response.id, stream=True, starting_after=first.sequence_number
    )
    last: Any = list(rest)[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == HELLO


def test_responses_count(client: OpenAI) -> None:
    used = client.responses.create(model=MODEL, input="hello").usage
    counted = client.responses.input_tokens.count(model=MODEL, input="hello")
    assert used is not None
    assert counted.input_tokens == used.input_tokens


def test_embeddings(client: OpenAI) -> None:
    plain = client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    coded = client.embeddings.create(model=MODEL, input=["a", "b"])  # base64 by itself
    assert [row.index for row in plain.data] == [0, 1]
    for one, other in zip(plain.data, coded.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-5)
    short = client.embeddings.create(model=MODEL, input="a", dimensions=4)
    assert len(short.data[0].embedding) == 4
    raw = client.embeddings.with_raw_response.create(
        model=MODEL, input="a", encoding_format="base64"
    )
    data = base64.b64decode(raw.http_response.json()["data"][0]["embedding"])
    assert array("f", data).tolist() == pytest.approx(plain.data[0].embedding, abs=1e-6)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_errors_become_the_right_classes(client: OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=user("hi"), temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=user("hi"))
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=user("x" * 100_000))
    assert long.value.code == "context_length_exceeded"
    wrong = OpenAI(base_url=url + "/v1", api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_async_client(url: str) -> None:
    async def many() -> list[str | None]:
        async with AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
            made = await asyncio.gather(
                *(
                    client.chat.completions.create(model=MODEL, messages=user("hello"))
                    for _ in range(8)
                )
            )
        return [one.choices[0].message.content for one in made]

    assert asyncio.run(many()) == [HELLO] * 8
