"""Responses that can be asked for again: in memory, each for a time, all within a bound.

Owns who may see what: an id is looked up under the tenant that made it, so another's is not there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from server.answers import Json

MAX_BYTES = 64 << 20
TTL_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` as it is sent; `items` all that was said, this response's output included.

    The first `num_earlier` of the items are of earlier responses, the next `num_input` its input.
    """

    body: Json
    items: tuple[Json, ...]
    num_earlier: int
    num_input: int


@dataclass(frozen=True, slots=True)
class _Entry:
    response: StoredResponse
    size: int
    until: float


class ResponseStore:
    """Safe to call from any thread. The oldest are dropped where there is no room."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        max_bytes: int = MAX_BYTES,
        ttl_seconds: float = TTL_SECONDS,
    ) -> None:
        self._now = now
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Takes the place of what had this id. One larger than the bound is not kept."""
        size = len(msgspec.json.encode((response.body, response.items)))
        with self._lock:
            self._drop((tenant, response_id))
            self._expire()
            if size > self._max_bytes:
                return
            while self._num_bytes + size > self._max_bytes:
                self._drop(next(iter(self._entries)))
            until = self._now() + self._ttl_seconds
            self._entries[tenant, response_id] = _Entry(response, size, until)
            self._num_bytes += size

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            self._expire()
            entry = self._entries.get((tenant, response_id))
            return None if entry is None else entry.response

    def delete(self, tenant: str, response_id: str) -> bool:
        with self._lock:
            self._expire()
            return self._drop((tenant, response_id))

    def _expire(self) -> None:
        """Entries are in order of their end."""
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key].until > self._now():
                return
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._num_bytes -= entry.size
        return True
