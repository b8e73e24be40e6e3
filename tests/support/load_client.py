"""A client for measuring: raw HTTP/1.1 over kept connections, with as little of its own as can be.

It streams completions and notes when it sent, saw the first text and saw the last byte. Import
nothing of the house: it must see what any client sees.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Seen:
    """One answer as the client saw it; instants are of the monotonic clock."""

    id: str
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    status: int = 0
    body: bytes = b""
    arrivals: list[float] = field(default_factory=list)

    @property
    def e2e_seconds(self) -> float:
        return self.ended - self.sent

    @property
    def ttft_seconds(self) -> float:
        return self.first - self.sent

    def events(self) -> list[Any]:
        lines = self.body.decode().split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        return [json.loads(item) for item in data]


class Connection:
    """One connection, one request at a time."""

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self._address = (host, port)
        self._key = f"authorization: Bearer {key}\r\n" if key else ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: dict[str, Any], request_id: str) -> Seen:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        assert self._reader is not None
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\nx-request-id: {request_id}\r\n"
            f"{self._key}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        seen = Seen(request_id, sent=time.monotonic())
        self._writer.write(head.encode() + content)
        header = await self._reader.readuntil(b"\r\n\r\n")
        seen.status = int(header.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in header.lower():
            await self._read_chunks(seen)
        else:
            length = int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            seen.body = await self._reader.readexactly(length)
        seen.ended = time.monotonic()
        return seen

    async def _read_chunks(self, seen: Seen) -> None:
        assert self._reader is not None
        parts = []
        while True:
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size + 2)
            if not size:
                break
            now = time.monotonic()
            seen.arrivals.append(now)
            seen.first = seen.first or now
            parts.append(data[:-2])
        seen.body = b"".join(parts)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def run_load(
    host: str,
    port: int,
    bodies: Iterable[tuple[str, str, dict[str, Any]]],
    concurrency: int,
    *,
    key: str = "",
) -> list[Seen]:
    """Every (id, path, body), at most `concurrency` at a time, in order."""
    queue = iter(bodies)
    found: list[Seen] = []

    async def worker() -> None:
        connection = Connection(host, port, key)
        try:
            for request_id, path, body in queue:
                found.append(await connection.post(path, body, request_id))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())
    return found
