"""Stored responses of all servers on one Redis: whichever is asked, it knows what another made.

A response in the making has a second entry, its lease, which the server that makes it renews. One
whose lease has run out was lost with its server, and is told as failed. A wish to cancel is written
into the lease, where its holder finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from server.errors import Unavailable, retry_headers
from server.redis_link import RedisGone, RedisLink, name_of
from server.responses.store import MAX_BYTES, TTL_SECONDS, Key, StoredResponse

LEASE_SECONDS = 30.0
_RUNNING, _CANCEL = b"running", b"cancel"
_LOST = {"code": "server_error", "message": "The server that made this response has stopped."}
_DECODER = msgspec.json.Decoder(StoredResponse)


class RedisResponses:
    """A ResponseStore. How much room there is in all is for the Redis to say (maxmemory)."""

    def __init__(self, link: RedisLink, *, ttl_seconds: float = TTL_SECONDS) -> None:
        self._link = link
        self._ttl_seconds = ttl_seconds

    async def check(self) -> None:
        with _told():
            await self._link.check(_name(("", "")))

    async def put(self, key: Key, response: StoredResponse) -> None:
        value = msgspec.json.encode(response)
        if len(value) > MAX_BYTES:
            return
        with _told():
            if _is_made(response):
                await self._link.put(_lease(key), _RUNNING, LEASE_SECONDS)
            await self._link.put(_name(key), value, self._ttl_seconds)

    async def replace(self, key: Key, response: StoredResponse) -> None:
        with _told():
            await self._link.replace(_name(key), msgspec.json.encode(response), self._ttl_seconds)

    async def get(self, key: Key) -> StoredResponse | None:
        with _told():
            stored = await self._link.read(_name(key), _DECODER)
            if stored is None:
                return None
            if _is_made(stored) and await self._link.get(_lease(key)) is None:
                # It may have been finished between the two looks.
                stored = await self._link.read(_name(key), _DECODER) or stored
                if _is_made(stored):
                    lost = {**stored.body, "status": "failed", "error": _LOST}
                    return replace(stored, body=lost)
        return stored

    async def delete(self, key: Key) -> bool:
        with _told():
            return await self._link.delete(_name(key))

    async def hold(self, keys: Sequence[Key]) -> list[Key]:
        """While Redis is away nothing is renewed and nobody can ask."""
        wanted = []
        with contextlib.suppress(RedisGone):
            for key in keys:
                found = await self._link.get_and_extend(_lease(key), LEASE_SECONDS)
                if found is None:
                    await self._link.put(_lease(key), _RUNNING, LEASE_SECONDS)
                elif found == _CANCEL:
                    wanted.append(key)
        return wanted

    async def ask_to_cancel(self, key: Key) -> None:
        with _told():
            await self._link.replace(_lease(key), _CANCEL, LEASE_SECONDS)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RedisGone:
        raise Unavailable(
            "Stored responses cannot be reached now; with store: false none is needed.",
            code="store_unavailable",
            headers=retry_headers(1.0),
        ) from None


def _is_made(response: StoredResponse) -> bool:
    return bool(response.body["status"] == "in_progress")


def _name(key: Key) -> str:
    return name_of("responses", *key)


def _lease(key: Key) -> str:
    return name_of("responses", *key, "lease")
