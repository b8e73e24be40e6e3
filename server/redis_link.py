"""The way to Redis: what was asked for within a moment, or RedisGone.

Owns the bounds (time, connections, size), the pause after a failure and the log lines of an outage.
Knows no meaning of names and values. Needs the extra `redis`; imported only with --redis-url.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger("paceline.redis")

PREFIX = "paceline:1:"  # a new form of what is kept needs a new number
PATIENCE_SECONDS = 1.0
# After a failure nothing is tried for so long: a Redis that is gone costs a moment, not each call.
PAUSE_SECONDS = 1.0
MAX_CONNECTIONS = 16
MAX_VALUE_BYTES = 64 << 20


class RedisGone(Exception):
    """Redis did not answer in time, refused, or answered something else."""


def name_of(use: str, *parts: str) -> str:
    """Distinct for distinct parts, short, and without a word of theirs."""
    digest = hashlib.sha256(msgspec.json.encode([use, *parts])).hexdigest()
    return f"{PREFIX}{use}:{digest}"


T = TypeVar("T", covariant=True)


class Decoder(Protocol[T]):
    def decode(self, value: bytes, /) -> T: ...


class RedisLink:
    """One for a server. A value holds its own name, and is not believed under another one.

    Raises ValueError for a `url` that is none.

    `count_failure` gets the use (what stands first in a name) of each call that failed.
    """

    def __init__(
        self, url: str, now: Callable[[], float], count_failure: Callable[[str], None]
    ) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=PATIENCE_SECONDS,
            socket_timeout=PATIENCE_SECONDS,
            socket_connect_timeout=PATIENCE_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis: Redis = Redis.from_pool(pool)
        self._now = now
        self._count_failure = count_failure
        self._quiet_until = -1.0
        self._is_down = False

    async def read(self, name: str, decoder: Decoder[T]) -> T | None:
        """What is there, unless it is damaged: that is as good as nothing."""
        found = await self.get(name)
        try:
            return None if found is None else decoder.decode(found)
        except msgspec.MsgspecError as error:
            self._count_failure(_use(name))
            log.warning("redis has a damaged value under %s: %s", name, str(error)[:200])
            return None

    async def get(self, name: str) -> bytes | None:
        return self._opened(name, await self._call(name, lambda: self._redis.get(name)))

    async def get_and_extend(self, name: str, ttl_seconds: float) -> bytes | None:
        """What is there, which then lives on for so long."""
        milliseconds = _milliseconds(ttl_seconds)
        found = await self._call(name, lambda: self._redis.getex(name, px=milliseconds))
        return self._opened(name, found)

    async def put(self, name: str, value: bytes, ttl_seconds: float) -> None:
        await self._set(name, value, ttl_seconds, xx=False)

    async def replace(self, name: str, value: bytes, ttl_seconds: float) -> None:
        """`put` where something is there already; else nothing."""
        await self._set(name, value, ttl_seconds, xx=True)

    async def delete(self, name: str) -> bool:
        """Whether it was there."""
        return bool(await self._call(name, lambda: self._redis.delete(name)))

    async def check(self, name: str) -> None:
        """Raises RedisGone if a call for this name would fail now."""
        await self._call(name, lambda: self._redis.ping())

    async def greet(self) -> None:
        """At the start: whoever mistyped the address reads of it now, not at the first request."""
        try:
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                await self._redis.ping()
        except (RedisError, OSError, TimeoutError) as error:
            self._say(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        await self._redis.aclose()

    async def _set(self, name: str, value: bytes, ttl_seconds: float, *, xx: bool) -> None:
        if len(value) > MAX_VALUE_BYTES:
            return
        whole = name.encode() + b"\n" + value
        milliseconds = _milliseconds(ttl_seconds)
        await self._call(name, lambda: self._redis.set(name, whole, px=milliseconds, xx=xx))

    async def _call(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        use = _use(name)
        if self._now() < self._quiet_until:
            self._count_failure(use)
            raise RedisGone
        try:
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                value = await work()
        except (RedisError, OSError, TimeoutError) as error:
            self._fail(use, f"{type(error).__name__}: {error}")
            raise RedisGone from None
        if self._is_down:
            self._is_down = False
            log.warning("redis answers again")
        return value

    def _opened(self, name: str, whole: bytes | None) -> bytes | None:
        if whole is None:
            return None
        own, _, value = whole.partition(b"\n")
        if own != name.encode():
            self._fail(_use(name), "a value of another name")
            raise RedisGone
        return value

    def _fail(self, use: str, reason: str) -> None:
        self._quiet_until = self._now() + PAUSE_SECONDS
        self._count_failure(use)
        self._say(reason)

    def _say(self, reason: str) -> None:
        """One line an outage."""
        if not self._is_down:
            self._is_down = True
            log.warning("redis fails, so nothing is shared until it is back: %s", reason[:200])


def _use(name: str) -> str:
    return name.removeprefix(PREFIX).partition(":")[0]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
