"""A tiny OpenAI-compatible server whose every byte and delay is scripted, for tests of the bench.

It owns the answers only. `python -m tests.bench.fake_server PORT` runs it with an honest script.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.http_stream import HttpClient


@dataclass(frozen=True)
class Answer:
    """What a request gets. Each part is written after its delay; `hang_up` drops the connection."""

    parts: Sequence[tuple[float, bytes]] = ()
    status: str = "200 OK"
    headers: Sequence[str] = ()
    hang_up: bool = False
    raw: bytes | None = None


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


def num_tokens(body: dict[str, Any]) -> int:
    """This server's tokenizer: 3 tokens of its own, then one a word or id."""
    prompt = body.get("prompt") or body["messages"][0]["content"]
    return 3 + len(prompt.split() if isinstance(prompt, str) else prompt)


def honest(body: dict[str, Any], *, first: float = 0.0, gap: float = 0.0) -> Answer:
    """max_tokens chunks of one token each, then usage and [DONE]."""
    count, prompt = body["max_tokens"], num_tokens(body)
    if not body.get("stream"):
        counts = {"prompt_tokens": prompt, "completion_tokens": count}
        return Answer([(0, json.dumps({"choices": [{"text": "x"}], "usage": counts}).encode())])
    parts = [(first if not index else gap, chunk(" x")) for index in range(count)]
    parts.append((0.0, chunk("", "length") + usage(prompt, count) + DONE))
    return Answer(parts)


Script = Callable[[dict[str, Any]], Answer]


@dataclass
class FakeServer:
    script: Script
    metrics: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    num_aborted: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = [line for line in head.split("\r\n") if line.startswith("Content-Length")]
                data = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
                if not await self._answer(head, data, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, head: str, data: bytes, writer: asyncio.StreamWriter) -> bool:
        """False when the connection is to be dropped."""
        if head.startswith("GET"):
            text = self.metrics if "/metrics" in head else json.dumps({"data": [{"id": "fake"}]})
            body = text.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
            return True
        self.bodies.append(json.loads(data))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._write(self.script(self.bodies[-1]), writer)
        except ConnectionError:
            self.num_aborted += 1
            raise
        finally:
            self.num_open -= 1

    async def _write(self, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        if answer.raw is not None:
            writer.write(answer.raw)
            await writer.drain()
            return False
        lines = [f"HTTP/1.1 {answer.status}", "Transfer-Encoding: chunked", *answer.headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        for delay, part in answer.parts:
            await asyncio.sleep(delay)
            if writer.transport.is_closing():
                raise ConnectionResetError
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        if answer.hang_up:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@asynccontextmanager
async def fake_server(script: Script, metrics: str = "") -> AsyncIterator[FakeServer]:
    fake = FakeServer(script, metrics)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, limit=2**22)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()


@asynccontextmanager
async def client_of(fake: FakeServer) -> AsyncIterator[HttpClient]:
    client = HttpClient(fake.url, {})
    try:
        yield client
    finally:
        client.close()
        await asyncio.sleep(0.01)  # lets the fake's connections see the end


async def _main(port: int) -> None:
    server = await asyncio.start_server(FakeServer(honest).serve, "127.0.0.1", port, limit=2**22)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
