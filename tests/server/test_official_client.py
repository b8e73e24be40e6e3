"""openai-python's helpers over HTTP: parsed answers and tools, streamed and plain, must be equal.

The schemas are those that the client itself makes of pydantic models and sends as strict.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.http_server import TextEngine, house, in_loop


class Kind(StrEnum):
    SMALL = "klein"
    LARGE = "größer"


class Part(BaseModel):
    name: str = Field(description="as on the box", max_length=20)
    kind: Kind
    price: float | None = None


class Order(BaseModel):
    """Nested, with an enum, a union and a list, as clients write them."""

    number: int = Field(ge=1, le=999)
    parts: list[Part]
    note: str | int


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int = 1


ORDER = (
    '{"number": 7, "parts": [{"name": "Räder 😀", "kind": "größer", "price": null}], "note": "ö"}'
)
ARGUMENTS = '{"city": "Čáslav \\"x\\"", "days": 3}'
SCRIPTS = {
    "order": ORDER,
    "twice": f'Now.\n<tool_call>[{{"name": "Weather", "arguments": {ARGUMENTS}}}, '
    f'{{"name": "Weather", "arguments": {{"city": "", "days": 0}}}}]</tool_call>',
    "weather": f'<tool_call>[{{"name": "Weather", "arguments": {ARGUMENTS}}}]</tool_call>',
}


@asynccontextmanager
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        house(TextEngine(SCRIPTS), live=True) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}


async def both(asked: openai.AsyncOpenAI, wish: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The choices, plain and streamed, without what differs between any two answers."""
    plain = await asked.chat.completions.parse(**wish)
    async with asked.chat.completions.stream(**wish) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    for answer in (plain, streamed):
        for choice in answer.choices:
            for call in choice.message.tool_calls or []:
                assert call.id.count("call_") == 1
                call.id = ""
    return plain.choices, streamed.choices


def told(choice: Any) -> Any:
    message = choice.message
    calls = [
        (call.function.name, call.function.arguments, call.function.parsed_arguments)
        for call in message.tool_calls or []
    ]
    return choice.index, choice.finish_reason, message.content or None, message.parsed, calls


@in_loop
@pytest.mark.parametrize("n", [1, 3])
async def test_pydantic_response_format_is_parsed_streamed_and_plain(n: int) -> None:
    async with client() as asked:
        plain, streamed = await both(asked, body("order", response_format=Order, n=n))
    assert [told(choice) for choice in plain] == [told(choice) for choice in streamed]
    assert len(plain) == n
    for choice in plain:
        assert choice.message.parsed == Order.model_validate_json(ORDER)


@in_loop
@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "Weather"}}],
    ids=str,
)
async def test_pydantic_tools_are_parsed_streamed_and_plain(choice: Any) -> None:
    """Strict, as pydantic_function_tool makes them."""
    tools = [openai.pydantic_function_tool(Weather)]
    async with client() as asked:
        plain, streamed = await both(asked, body("weather", tools=tools, tool_choice=choice))
    assert told(plain[0]) == told(streamed[0])
    (call,) = plain[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city='Čáslav "x"', days=3)
    assert plain[0].finish_reason == ("tool_calls" if isinstance(choice, str) else "stop")


@in_loop
async def test_two_calls_with_text_before_them_beside_a_response_format() -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    async with client() as asked:
        plain, streamed = await both(asked, body("twice", tools=tools))
    assert told(plain[0]) == told(streamed[0])
    assert plain[0].message.content == "Now."
    assert [call.function.parsed_arguments.days for call in plain[0].message.tool_calls] == [3, 0]


@in_loop
async def test_cut_answers_raise_as_the_client_documents() -> None:
    async with client() as asked:
        for wish in (
            body("order", response_format=Order, max_tokens=9),
            body("weather", tools=[openai.pydantic_function_tool(Weather)], max_tokens=40),
        ):
            with pytest.raises(openai.LengthFinishReasonError):
                await asked.chat.completions.parse(**wish)
            with pytest.raises(openai.LengthFinishReasonError):
                async with asked.chat.completions.stream(**wish) as stream:
                    await stream.get_final_completion()


@in_loop
async def test_events_of_the_stream_helper_join_to_what_they_announce() -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    pieces: dict[int, str] = {}
    done = []
    async with (
        client() as asked,
        asked.chat.completions.stream(**body("twice", tools=tools)) as stream,
    ):
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces[event.index] = pieces.get(event.index, "") + event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.name, event.arguments))
    assert done == [
        (0, "Weather", ARGUMENTS),
        (1, "Weather", '{"city": "", "days": 0}'),
    ]
    assert [pieces[index] for index in (0, 1)] == [arguments for _, _, arguments in done]


@in_loop
async def test_responses_parse_and_stream_give_the_same() -> None:
    """With text_format and with strict tools; the other API over the same answers."""
    tool = openai.pydantic_function_tool(Weather)["function"]
    tools: Any = [{"type": "function", **tool}]
    async with client() as asked:
        for wish in (
            {"input": "order", "text_format": Order},
            {"input": "weather", "tools": tools},
            {"input": "twice", "tools": tools},
        ):
            plain = await asked.responses.parse(model="scripted", **wish)
            async with asked.responses.stream(model="scripted", **wish) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_response()
            assert plain.output_text == streamed.output_text
            assert plain.output_parsed == streamed.output_parsed
            calls = [
                [
                    (item.name, item.arguments)
                    for item in answer.output
                    if hasattr(item, "arguments")
                ]
                for answer in (plain, streamed)
            ]
            assert calls[0] == calls[1]
            if wish["input"] == "order":
                assert plain.output_parsed == Order.model_validate_json(ORDER)
            else:
                assert calls[0][0] == ("Weather", ARGUMENTS)
