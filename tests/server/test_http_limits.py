"""The limits on the head of a request, byte by byte, before any route is known."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from server.http_limits import LimitedProtocol
from server.serve import HttpServer, bind
from tests.support.http_server import (
    COMPLETIONS,
    TextEngine,
    connect,
    events,
    eventually,
    house,
    texts,
)

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


class Quick(LimitedProtocol):
    max_header_bytes = 2000
    head_seconds = 0.4


async def echo(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
    assert scope["type"] == "http"
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connection(
    http: type[LimitedProtocol] = Quick,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    with bind("127.0.0.1", 0) as listener:
        config = uvicorn.Config(echo, http=http, ws="none", log_config=None, lifespan="off")
        server = HttpServer(config)
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            async with asyncio.timeout(10):
                yield reader, writer
        finally:
            writer.close()
            server.should_exit = True
            await serving


def run(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    async def test() -> None:
        async with connection() as (reader, writer):
            await talk(reader, writer)

    asyncio.run(test())


@pytest.mark.parametrize(
    "flood",
    [b"x: " + b"a" * 5000, b"x: a\r\n" * 300, b"y" * 5000],
    ids=["one long header", "many headers", "a name without end"],
)
def test_a_large_head_gets_431_whether_it_ends_or_not(flood: bytes) -> None:
    """B151."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + flood)
        answer = await reader.read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code": "headers_too_large"' in answer

    run(talk)


def test_a_head_that_comes_byte_by_byte_gets_408() -> None:
    """B151: slow loris."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in HEAD[:10]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.03)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")

    run(talk)


def test_a_connection_that_says_nothing_is_closed() -> None:
    async def talk(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""

    run(talk)


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01 hello\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n"]
)
def test_what_is_not_http_gets_400_in_the_envelope(junk: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(junk)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"error"' in answer

    run(talk)


def test_bodies_and_later_requests_are_not_limited_by_the_head() -> None:
    """A slow, large body and a second request on the same connection are fine."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEAD + b"content-length: 50000\r\n\r\n")
            for _ in range(5):
                writer.write(b"b" * 10_000)
                await asyncio.sleep(0.15)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(5) == b"50000"

    run(talk)


def test_a_body_of_broken_chunks_gets_400() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nno number\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1

    run(talk)


def test_what_follows_a_request_is_never_answered_before_it() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = HEAD + b"transfer-encoding: chunked\r\n\r\nno number\r\n"
        writer.write(HEAD + b"content-length: 3\r\n\r\nabc" + broken)
        answer = await reader.read()
        assert not answer.startswith(b"HTTP/1.1 400 ")

    run(talk)


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nHost: b\r\n"], ids=["none", "two"])
def test_http_1_1_without_one_host_gets_400(hosts: bytes) -> None:
    """RFC 9112, 3.2."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\n" + hosts + b"content-length: 3\r\n\r\nabc")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"one Host header" in answer
        assert answer.count(b"bad_request") == 1
        assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", answer)

    run(talk)


def test_http_1_0_needs_no_host() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")

    run(talk)


def test_an_http_1_0_client_gets_no_chunks() -> None:
    """It knows none: a stream ends with its connection, also where the client would keep it."""

    async def check() -> None:
        async with house(TextEngine({"greet": "Hello."}), live=True) as server:
            body = json.dumps({"prompt": "greet", "stream": True}).encode()
            chunked = await server.client.post(COMPLETIONS, content=body)
            for keep in (b"", b"connection: keep-alive\r\n"):
                reader, writer = await connect(server)
                writer.write(b"POST /v1/completions HTTP/1.0\r\n" + keep)
                writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
                head, _, text = (await reader.read(-1)).partition(b"\r\n\r\n")
                writer.close()
                assert b"transfer-encoding" not in head
                assert b"connection: close" in head
                assert texts(events(text.decode())) == texts(events(chunked.text))

    asyncio.run(check())


def test_what_is_no_request_behind_one_is_refused_once_that_is_answered() -> None:
    """A Content-Length that is too short: the rest of the body is no request."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: 3\r\n\r\nabcdef}")
        first, rest = (await reader.read()).split(b"HTTP/1.1 400 ")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert first.endswith(b"\r\n\r\n3")
        assert b'"error"' in rest

    run(talk)


@pytest.mark.parametrize("begun", [b"content-length: 30\r\n\r\nabc", b"content-le"])
def test_a_request_that_is_cut_off_is_told(begun: bytes) -> None:
    """A Content-Length that is too long; a head without an end."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + begun)
        writer.write_eof()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"ends before its end" in answer

    run(talk)


def test_a_line_end_behind_a_body_is_no_request() -> None:
    """RFC 9112, 2.2. It does not set the clock of a head either."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEAD + b"content-length: 3\r\n\r\nabc")
            assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"\r\n")
            await asyncio.sleep(2 * Quick.head_seconds)

    run(talk)


def test_a_head_that_begins_in_the_last_piece_of_a_body_goes_on() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: 6\r\n\r\nabc")
        await asyncio.sleep(0.05)
        writer.write(b"def" + HEAD.removesuffix(b"\r\n"))
        assert (await reader.readuntil(b"\r\n\r\n6")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 ")

    run(talk)


@pytest.mark.parametrize(("limit", "at_least"), [(1 << 20, 121), (1, 0)], ids=["room", "crowd"])
def test_an_idle_connection_outlives_those_of_proxies(
    monkeypatch: pytest.MonkeyPatch, limit: int, at_least: int
) -> None:
    """kserve/kserve#5446: what we close first, a proxy may just be sending its next request on."""
    monkeypatch.setattr("server.http_limits.resource.getrlimit", lambda _kind: (limit, limit))
    left: list[float] = []

    class Noted(Quick):
        def on_response_complete(self) -> None:
            super().on_response_complete()
            assert self.timeout_keep_alive_task is not None
            left.append(self.timeout_keep_alive_task.when() - self.loop.time())

    async def check() -> None:
        async with connection(Noted) as (reader, writer):
            writer.write(HEAD + b"content-length: 3\r\n\r\nabc")
            await reader.readuntil(b"\r\n\r\n3")

    asyncio.run(check())
    assert len(left) == 1
    assert at_least < left[0] < at_least + 10


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


@pytest.mark.parametrize(
    ("about_body", "body"),
    [
        (b"content-length: 3\r\n", b"abc"),
        (b"transfer-encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
        (b"", b""),
    ],
    ids=["length", "chunks", "no body"],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_an_offer_of_another_protocol_costs_no_body(
    about_body: bytes, body: bytes, is_split: bool
) -> None:
    """vllm-project/vllm#57203, Kludex/uvicorn#2722: Java's client offers HTTP/2 every time."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = b"3" if body else b"0"
        for _ in range(2):
            writer.write(HEAD + H2C + about_body + b"\r\n")
            for byte in body:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01 * is_split)
            answer = await reader.readuntil(b"\r\n\r\n" + size)
            assert answer.startswith(b"HTTP/1.1 200 ")
        writer.write((HEAD + H2C + about_body + b"\r\n" + body) * 3 + b"no request\r\n\r\n")
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"\r\n\r\n" + size) == 3
        assert answers.count(b"HTTP/1.1 400 ") == 1

    run(talk)


def test_a_hang_up_ends_the_answer_that_runs_and_not_only_the_last_request() -> None:
    """B017, with a second request behind the first on the same connection."""

    async def check() -> None:
        async with house(TextEngine(step_seconds=0.05), live=True) as server:
            body = json.dumps({"prompt": "endless", "max_tokens": 4000}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            _, writer = await connect(server)
            writer.write(2 * (head % len(body) + body))
            await eventually(lambda: server.core.num_open == 1)
            writer.close()
            await eventually(lambda: server.core.num_open == 0)

    asyncio.run(check())


@pytest.mark.parametrize(
    "header",
    ["x-request-timeout-seconds: 60 \t", "x-request-id: me  ", "content-encoding:\tidentity "],
)
def test_white_space_around_the_value_of_a_header_is_none_of_it(header: str) -> None:
    """RFC 9110, 5.5; a proxy may leave some."""

    async def test() -> None:
        async with house(TextEngine({"x": "Hello"}), live=True) as server:
            reader, writer = await connect(server)
            body = b'{"prompt": "x", "max_tokens": 1}'
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert (b"x-request-id: me\r\n" in answer) == header.startswith("x-request-id")

    asyncio.run(test())
