"""Limits of a request: context, input, output, choices, characters, bytes, patience."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import time

import pytest
from pydantic import ValidationError

from scheduler.limits import SchedulerLimits
from server.anthropic.blocks import chat_messages
from server.anthropic.schemas import MessagesRequest, Turn
from server.body import parse_object
from server.config import ServerConfig
from server.schemas import ChatRequest, CompletionRequest, Strict
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    TextEngine,
    connect,
    events,
    eventually,
    house,
    in_loop,
    texts,
)
from tests.support.refusals import USER, greeter, refused, refused_field

LIMITED = ServerConfig(max_input_tokens=100, max_output_tokens=50)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_prompt_beyond_the_context_is_refused_with_numbers(stream: bool) -> None:
    """B028: one token over, three times over; with and without max_tokens."""
    async with house(greeter()) as server:
        info = server.core.info
        assert info is not None
        limit = info.max_model_len
        for size in (limit, limit + 1, 3 * limit):
            for more in ({}, {"max_tokens": 5}):
                body = {"prompt": [97] * size, "stream": stream, **more}
                error = await refused(server, COMPLETIONS, json.dumps(body).encode())
                assert error["code"] == "context_length_exceeded"
                assert f"maximum context length is {limit} tokens" in error["message"]
                assert str(size) in error["message"]
                messages = [{"role": "user", "content": "x" * size}]
                body = {"messages": messages, "stream": stream, **more}
                error = await refused(server, CHAT, json.dumps(body).encode())
                assert error["code"] == "context_length_exceeded"
        fits = await server.complete([97] * (limit - 1), max_tokens=5)
        assert fits.json()["usage"]["completion_tokens"] == 1


@in_loop
async def test_each_limit_has_its_own_message() -> None:
    async with house(greeter(), LIMITED) as server:
        error = await refused(server, COMPLETIONS, json.dumps({"prompt": [97] * 101}).encode())
        assert error["code"] == "max_input_tokens_exceeded"
        assert "100" in error["message"]
        body = {"prompt": "x", "max_tokens": 51}
        error = await refused(server, COMPLETIONS, json.dumps(body).encode(), param="max_tokens")
        assert error["code"] == "max_output_tokens_exceeded"
        assert "50" in error["message"]
        for name in ("max_tokens", "max_completion_tokens"):  # the one that was sent
            wish = json.dumps({"messages": USER, name: 51}).encode()
            await refused(server, CHAT, wish, param=name)
        chat = await server.chat("x")  # no wish: up to the output limit
    assert chat.json()["usage"]["completion_tokens"] == 50


@in_loop
async def test_no_wish_for_a_length_is_never_above_the_output_limit() -> None:
    """The default of completions is 16 elsewhere; a client that wished for nothing is no sinner."""
    async with house(greeter(), ServerConfig(max_output_tokens=3)) as server:
        for body in ({"prompt": "x"}, {"prompt": "x", "max_tokens": None, "stream": True}):
            answer = await server.client.post(COMPLETIONS, json=body)
            assert answer.status_code == 200, answer.text
        plain = await server.client.post(COMPLETIONS, json={"prompt": "x"})
        assert plain.json()["usage"]["completion_tokens"] == 3
        wish = json.dumps({"prompt": "x", "max_tokens": 16}).encode()
        await refused(server, COMPLETIONS, wish, param="max_tokens")


@in_loop
async def test_fields_that_contradict_each_other_are_refused() -> None:
    """B038, B086."""
    async with house(greeter()) as server:
        await refused_field(server, "min_tokens", 11, max_tokens=10)
        body = {"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}
        await refused(server, CHAT, json.dumps(body).encode(), param="max_tokens")
        await refused(server, COMPLETIONS, b'{"prompt":"a","max_tokens":0}', param="max_tokens")
        await refused(server, CHAT, json.dumps({"messages": USER, "max_tokens": 0}).encode())
        body = {"prompt": ["a"] * 100, "n": 100}
        await refused(server, COMPLETIONS, json.dumps(body).encode(), param="prompt")


@in_loop
async def test_more_choices_than_the_server_holds_are_refused_for_good() -> None:
    limits = SchedulerLimits(max_step_tokens=64, max_waiting=2, max_running=2, watermark_blocks=0)
    async with house(greeter(), limits=limits) as server:
        await refused_field(server, "n", 5)
        body = json.dumps({"prompt": ["greet"] * 5}).encode()
        await refused(server, COMPLETIONS, body, param="prompt")  # 429 would be tried for ever
        assert (await server.complete("greet", n=4)).status_code == 200
        assert (await server.complete(["greet"] * 4)).status_code == 200


@in_loop
async def test_unknown_model_is_404_whatever_it_looks_like() -> None:
    """B160, B164."""
    names = ["other", "../../etc/passwd", "/abs", "a/../../b", "x\u0000", "http://x", "", "a\nb"]
    async with house(greeter()) as server:
        for name in [*names, "x" * 1000]:
            body = json.dumps({"prompt": "greet", "model": name}).encode()
            error = await refused(server, COMPLETIONS, body, param="model", status=404)
            assert error["code"] == "model_not_found"
        assert (await server.complete("greet", model="scripted")).status_code == 200


@in_loop
async def test_text_that_cannot_fit_is_refused_unread() -> None:
    """B040: a million characters without a border, while health is polled and a stream runs."""
    slow = TextEngine({"greet": "Hello" * 40}, step_seconds=0.002)
    worst = 0.0
    async with house(slow) as server:
        stream = asyncio.create_task(server.complete("greet", max_tokens=300, stream=True))

        async def poll() -> None:
            nonlocal worst
            while True:
                begin = time.monotonic()
                assert (await server.client.get("/health")).status_code == 200
                worst = max(worst, time.monotonic() - begin)
                await asyncio.sleep(0.005)

        polling = asyncio.create_task(poll())
        for text in ("a" * 1_000_000, "_" * 500_000, " " * 500_000, "😀" * 200_000):
            body = json.dumps({"prompt": text}).encode()
            error = await refused(server, COMPLETIONS, body)
            assert error["code"] == "context_length_exceeded"
            messages = [{"role": "user", "content": text}]
            await refused(server, CHAT, json.dumps({"messages": messages}).encode())
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
        assert texts(events((await stream).text)) == {0: "Hello" * 40}
    assert worst < 1.0  # not a speed limit: a tokenizer on the loop would take many seconds


@in_loop
async def test_large_body_is_refused_before_it_is_read() -> None:
    """B137: by its declared length, or by counting where none is declared."""
    config = ServerConfig(max_body_bytes=10_000)
    async with house(greeter(), config, live=True) as server:
        await refused(server, COMPLETIONS, b"x" * 10_001, status=413)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {10**15}\r\n\r\n"
        reader, writer = await connect(server)
        writer.write(head.encode())
        answer_bytes = await reader.read()  # to the end: the connection is closed
        assert b" 413 " in answer_bytes
        writer.close()

        async def chunks():  # type: ignore[no-untyped-def]
            for _ in range(15):
                yield b"x" * 1000

        answer = await server.client.post(COMPLETIONS, content=chunks())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert (await server.complete("greet")).status_code == 200


@in_loop
async def test_a_compressed_body_is_refused_by_name() -> None:
    """Not as malformed JSON, which would send its author searching in the wrong place."""
    body = gzip.compress(b'{"prompt": "greet", "max_tokens": 1}')
    async with house(greeter()) as server:
        headers = {"content-encoding": "gzip"}
        answer = await server.client.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_encoding"
        headers = {"content-encoding": "identity"}
        plain = gzip.decompress(body)
        answer = await server.client.post(COMPLETIONS, content=plain, headers=headers)
        assert answer.status_code == 200


@in_loop
async def test_a_body_that_was_compressed_on_the_way_is_refused() -> None:
    """B037: as a coding of the transfer, which HTTP allows beside chunks."""
    body = gzip.compress(b'{"prompt": "greet", "max_tokens": 1}')
    async with house(live=True) as server:
        reader, writer = await connect(server)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(f"{head}transfer-encoding: gzip, chunked\r\n\r\n{len(body):x}\r\n".encode())
        writer.write(body + b"\r\n0\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b'"unsupported_encoding"' in answer


@in_loop
async def test_body_that_never_comes_is_given_up() -> None:
    """B151: slow bodies and lengths that promise more than comes."""
    async with house(greeter(), live=True, body_timeout_seconds=0.1) as server:
        reader, writer = await connect(server)
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{{".encode()
        )
        answer = await reader.read()  # to the end: the connection is closed
        assert b" 408 " in answer
        assert b"request_timeout" in answer
        writer.close()
        await eventually(lambda: server.core.num_open == 0)


FORM = "application/x-www-form-urlencoded"  # what curl -d sends


@pytest.mark.parametrize(
    ("kind", "outside", "browser"),
    [
        ("application/json", 200, 200),
        ("Application/JSON; charset=utf-8", 200, 200),
        ("application/vnd.api+json", 200, 200),
        (None, 200, 415),
        (FORM, 200, 415),
        ("text/plain;charset=UTF-8", 200, 415),
        ("multipart/form-data; boundary=x", 415, 415),
        ("application/xml", 415, 415),
        ("application/jsonp", 415, 415),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@in_loop
async def test_a_page_of_any_site_cannot_make_the_server_work_without_a_preflight(
    path: str, kind: str | None, outside: int, browser: int
) -> None:
    """The types that a browser sends without asking are taken from elsewhere only."""
    body = b'{"prompt": "greet", "max_tokens": 1}'
    async with house(greeter()) as server:
        for headers, status in (
            ({}, outside),
            ({"origin": "https://evil.example"}, browser),
            ({"origin": "null"}, browser),
            ({"sec-fetch-site": "cross-site"}, browser),
        ):
            typed = {**headers, **({"content-type": kind} if kind else {})}
            answer = await server.client.post(path, content=body, headers=typed)
            assert answer.status_code == status, (typed, answer.text)
            if status == 415:
                assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (ChatRequest, {"messages": ["x"] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * 1000}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 1000}]}),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": [-1] * 1000}),
        (MessagesRequest, {"model": "x", "max_tokens": 1, "messages": ["x"] * 1000}),
    ],
    ids=["messages", "parts", "calls", "token ids", "turns"],
)
def test_of_a_list_full_of_faults_the_first_is_found(
    schema: type[Strict], fields: dict[str, object]
) -> None:
    """B137: 300,000 of them held the interpreter for two seconds, and every stream with it."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(fields)
    assert caught.value.error_count() <= 3  # one for each member of a union


MANY = {
    "messages": {"messages": [{"role": "user", "content": "x"}] * 60_000},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}]},
    "lists": {"prompt": [[1]] * 120_000},
    "names": {f"k{number}": 1 for number in range(120_000)},
}


@pytest.mark.parametrize("name", MANY)
@in_loop
async def test_a_body_of_more_pieces_than_any_request_has_is_refused_before_it_is_looked_at(
    name: str,
) -> None:
    """B137: 300,000 messages were validated, dumped and counted for ten seconds."""
    async with house(config=ServerConfig(max_body_bytes=1 << 24)) as server:
        for path in (CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/tokenize"):
            answer = await server.client.post(path, json=MANY[name])
            assert answer.status_code == 400, path
            assert "100000 fields and lists" in answer.text, path


def test_what_looks_like_pieces_in_a_text_is_text() -> None:
    body = json.dumps({"prompt": '{"a": [1]}' * 60_000}).encode()
    assert len(parse_object(body)["prompt"]) == 600_000
    assert len(parse_object(b'{"prompt": [' + b"5," * 200_000 + b"5]}")["prompt"]) == 200_001
    assert gc.isenabled()


def test_turns_in_a_row_are_joined_in_one_go() -> None:
    """B137: each was copied once for every later one; a body of them took 48 seconds."""
    turns = [
        Turn.model_validate({"role": "assistant", "content": [block]})
        for number in range(30_000)
        for block in (
            {"type": "text", "text": str(number)},
            {"type": "thinking", "thinking": f"t{number}"},
        )
    ]
    (message,) = chat_messages(None, turns)
    assert [part["text"] for part in message["content"]] == [str(n) for n in range(30_000)]
    assert message["reasoning_content"] == "\n".join(f"t{n}" for n in range(30_000))
