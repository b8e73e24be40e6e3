"""The events of a response that is being made, for any number of clients that come and go.

Takes what an endpoint sends to one client that listens to the end. Knows no response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message


class EventLog:
    """Of events only; comments are dropped."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._is_over = False
        self._news = asyncio.Condition()

    async def send(self, message: Message) -> None:
        """In the place of a client's `send`."""
        data: bytes = message.get("body", b"")
        if data.startswith(b"event:"):
            self._events.append(data.decode("ascii").removesuffix("\n\n"))
            await self._tell()

    async def end(self) -> None:
        self._is_over = True
        await self._tell()

    async def after(self, number: int) -> AsyncIterator[str]:
        """Those with a higher number, as they come, to the last."""
        position = number + 1
        while True:
            async with self._news:
                while len(self._events) <= position and not self._is_over:
                    await self._news.wait()
            if position >= len(self._events):
                return
            for event in self._events[position:]:
                position += 1
                yield event

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
