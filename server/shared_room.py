"""One room of so many bytes for the things of several tenants: none can push out another's.

Where there is no room, the tenant that holds most gives up what it used least recently. Things end
with their time. Knows neither what they are nor where a time comes from.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

IdT = TypeVar("IdT", str, bytes)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class _Thing(Generic[ValueT]):
    value: ValueT
    size: int
    until: float


@dataclass(slots=True)
class _Share(Generic[IdT, ValueT]):
    """Of one tenant: what it used least recently comes first."""

    things: OrderedDict[IdT, _Thing[ValueT]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class SharedRoom(Generic[IdT, ValueT]):
    """Keys are (tenant, id)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shares: dict[str, _Share[IdT, ValueT]] = {}
        self.num_bytes = 0

    def put(
        self, key: tuple[str, IdT], value: ValueT, *, size: int, until: float, now: float
    ) -> None:
        """Takes the place of what had this key. What is too large is not kept: it would need more
        than the whole room, or push out others who hold less."""
        tenant, name = key
        self.drop(key)
        self.expire(now)
        rivals = [share.num_bytes for who, share in self._shares.items() if who != tenant]
        if size + sum(min(held, size) for held in rivals) > self._max_bytes:
            return
        share = self._shares.get(tenant) or _Share[IdT, ValueT]()
        while self.num_bytes + size > self._max_bytes:
            held = {who: share.num_bytes for who, share in self._shares.items()}
            held[tenant] = share.num_bytes + (size if share.things else 0)
            self._drop_oldest(max(held, key=lambda who: held[who]))
        self._shares[tenant] = share
        share.things[name] = _Thing(value, size, until)
        share.num_bytes += size
        self.num_bytes += size

    def get(self, key: tuple[str, IdT], now: float) -> ValueT | None:
        thing = self._shares.get(key[0], _Share[IdT, ValueT]()).things.get(key[1])
        if thing is not None and thing.until <= now:
            self.drop(key)
            return None
        return None if thing is None else thing.value

    def use(self, key: tuple[str, IdT]) -> None:
        """It was used now."""
        self._shares[key[0]].things.move_to_end(key[1])

    def drop(self, key: tuple[str, IdT]) -> bool:
        tenant, name = key
        share = self._shares.get(tenant)
        thing = None if share is None else share.things.pop(name, None)
        if share is None or thing is None:
            return False
        share.num_bytes -= thing.size
        self.num_bytes -= thing.size
        if not share.things:
            del self._shares[tenant]
        return True

    def expire(self, now: float) -> None:
        """Of each tenant what is at its end, up to the first thing that is not."""
        for tenant, share in list(self._shares.items()):
            while share.things and next(iter(share.things.values())).until <= now:
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        self.drop((tenant, next(iter(self._shares[tenant].things))))
