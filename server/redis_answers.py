"""The answer cache of all servers on one Redis, which must serve the same under one model name.

All that sets answers apart is in the key, and the key in the name. How much room there is in all is
for the Redis to say (maxmemory); one answer is bounded here, and each has its time to live.
"""

from __future__ import annotations

import contextlib

import msgspec

from server.answer_cache import CachedAnswer, Key
from server.redis_link import RedisGone, RedisLink, name_of

MAX_ANSWER_BYTES = 8 << 20
_USE = "answer_cache"
# msgpack has a minus infinity, which log-probabilities need.
_DECODER = msgspec.msgpack.Decoder(CachedAnswer)


class RedisAnswers:
    """An AnswerCache; without its Redis all is missed."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def get(self, key: Key) -> CachedAnswer | None:
        try:
            return await self._link.read(name_of(_USE, key[1].hex()), _DECODER)
        except RedisGone:
            return None

    async def put(self, key: Key, answer: CachedAnswer, ttl_seconds: float) -> None:
        if answer.size() > MAX_ANSWER_BYTES:
            return
        with contextlib.suppress(RedisGone):
            await self._link.put(
                name_of(_USE, key[1].hex()), msgspec.msgpack.encode(answer), ttl_seconds
            )
