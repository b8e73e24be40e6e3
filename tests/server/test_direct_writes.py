"""Tokens that go from the core to the socket without waking a task: nobody sees a difference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.types import Finished, FinishReason, Tokens
from server.core_client import CoreStream
from server.http_limits import ChunkWriter
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    TextEngine,
    events,
    eventually,
    house,
    in_loop,
)

BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "story", "max_tokens": 60}),
    (COMPLETIONS, {"prompt": "story", "max_tokens": 60, "stop": ["mid"]}),
    (COMPLETIONS, {"prompt": ["story", "x"], "max_tokens": 40, "n": 2, "logprobs": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "story"}], "max_tokens": 60, "n": 3}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "story"}],
            "max_tokens": 60,
            "stop": "mid",
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
]
TEXT = "Once 😀 upon a time in the middle of č nowhere."


def by_choice(text: str) -> dict[int, tuple[str, list[str], list[str]]]:
    """Text, tokens and ends of each choice; where events are cut is a matter of time."""
    found: dict[int, tuple[str, list[str], list[str]]] = {}
    for event in events(text):
        for choice in event["choices"]:
            shown, tokens, ends = found.get(choice["index"], ("", [], []))
            shown += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            tokens += (choice["logprobs"] or {}).get("tokens", [])
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            found[choice["index"]] = (shown, tokens, ends)
    return found


def engine() -> TextEngine:
    return TextEngine({"story": TEXT, "x": TEXT}, step_seconds=0.002)


@in_loop
@pytest.mark.parametrize(("path", "fields"), BODIES)
async def test_what_is_sent_is_the_same_with_and_without_a_task(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[bytes] = []
    write: Callable[[ChunkWriter, bytes], None] = ChunkWriter.write

    def counted(self: ChunkWriter, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(ChunkWriter, "write", counted)
    async with house(engine()) as server:
        expected = await server.client.post(path, json={**fields, "stream": True})
    assert not parts
    async with house(engine(), live=True) as server:
        for _ in range(20):  # a reader that is always late is woken each time
            answer = await server.client.post(path, json={**fields, "stream": True})
            await eventually(lambda: server.core.num_unfinished == server.core.num_open == 0)
            if parts:
                break
    assert by_choice(answer.text) == by_choice(expected.text)
    assert parts
    assert all(part.startswith(b"data: ") and part.endswith(b"\n\n") for part in parts)


@in_loop
async def test_only_a_reader_that_waits_is_offered_tokens() -> None:
    stream = CoreStream(["a"])
    offered: list[tuple[int, ...]] = []
    takes = True

    def take(tokens: Tokens) -> bool:
        offered.append(tokens.token_ids)
        return takes

    stream.direct = take
    stream.add_tokens(Tokens("a", (1,)))  # nobody has asked yet
    assert await anext(stream) == Tokens("a", (1,))
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.add_tokens(Tokens("a", (2,)))
    takes = False
    stream.add_tokens(Tokens("a", (3,)))
    stream.add_tokens(Tokens("a", (4,)))  # behind 3, so not past it
    assert await reading == Tokens("a", (3, 4))
    assert offered == [(2,), (3,)]
    end = Finished("a", FinishReason.LENGTH)
    stream.add_finished(end)
    assert await anext(stream) == end
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@in_loop
async def test_a_fault_of_the_direct_way_is_its_readers_own() -> None:
    stream = CoreStream(["a"])

    def take(tokens: Tokens) -> bool:
        raise ValueError(tokens.request_id)

    stream.direct = take
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.add_tokens(Tokens("a", (1,)))
    with pytest.raises(ValueError, match="a"):
        await reading


@in_loop
async def test_a_stream_that_is_ended_gives_no_more() -> None:
    stream = CoreStream(["a", "b"])
    stream.add_tokens(Tokens("a", (1,)))
    stream.end()
    assert [event async for event in stream] == []
