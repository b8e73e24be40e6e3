"""Responses that can be asked for again: each for a time, all within a bound.

Owns who may see what: an id is looked up under the tenant that made it, so another's is not there.
In memory here; redis_store.py keeps them for several servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from server.answers import Json
from server.shared_room import SharedRoom

MAX_BYTES = 64 << 20
TTL_SECONDS = 24 * 3600.0

# The tenant, and the id of a response.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` as it is sent; `items` all that was said, this response's output included.

    The first `num_earlier` of the items are of earlier responses, the next `num_input` its input.
    `cuts` are (characters, log-probabilities) of the deltas of each output item, as they were sent.
    """

    body: Json
    items: tuple[Json, ...]
    num_earlier: int
    num_input: int
    cuts: tuple[tuple[tuple[int, int], ...], ...] = ()


class ResponseStore(Protocol):
    """Methods raise Unavailable where what keeps the responses does not answer."""

    async def check(self) -> None:
        """Raises Unavailable if nothing could be kept now."""
        ...

    async def put(self, key: Key, response: StoredResponse) -> None: ...

    async def replace(self, key: Key, response: StoredResponse) -> None:
        """`put` where this id is still there; else nothing."""
        ...

    async def get(self, key: Key) -> StoredResponse | None: ...

    async def delete(self, key: Key) -> bool: ...

    async def hold(self, keys: Sequence[Key]) -> list[Key]:
        """Says that these are being made here; those of them that somebody wants cancelled."""
        ...

    async def ask_to_cancel(self, key: Key) -> None:
        """For whichever server makes it."""
        ...


class MemoryResponses:
    """A ResponseStore of one process. The oldest of who has most are dropped for want of room."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        max_bytes: int = MAX_BYTES,
        ttl_seconds: float = TTL_SECONDS,
    ) -> None:
        self._now = now
        self._ttl_seconds = ttl_seconds
        self._room: SharedRoom[str, StoredResponse] = SharedRoom(max_bytes)

    @property
    def num_bytes(self) -> int:
        return self._room.num_bytes

    async def check(self) -> None:
        """There is always room, for the oldest make it."""

    async def put(self, key: Key, response: StoredResponse) -> None:
        """Takes the place of what had this id. One larger than the bound is not kept."""
        size, now = len(msgspec.json.encode(response)), self._now()
        self._room.put(key, response, size=size, until=now + self._ttl_seconds, now=now)

    async def replace(self, key: Key, response: StoredResponse) -> None:
        if await self.get(key) is not None:
            await self.put(key, response)

    async def get(self, key: Key) -> StoredResponse | None:
        now = self._now()
        self._room.expire(now)
        return self._room.get(key, now)

    async def delete(self, key: Key) -> bool:
        self._room.expire(self._now())
        return self._room.drop(key)

    async def hold(self, keys: Sequence[Key]) -> list[Key]:
        """What is made in this process is cancelled in this process."""
        del keys
        return []

    async def ask_to_cancel(self, key: Key) -> None:
        """Nobody else makes responses that are kept here."""
