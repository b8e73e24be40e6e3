"""An API key as people write it: `KEY`, or `NAME:KEY` with marks behind the name.

    team:sk-1    ops+admin:sk-2    big+weight=3:sk-3    lead+admin+weight=0.5:sk-4

The name is the tenant. Imports no libraries, since settings are read before the server is loaded.
Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from server.plain_number import plain_number

MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0
_MARKED = re.compile(r"([A-Za-z0-9_.-]{0,64})(\+[^:]*):.+")
_ENTRY = re.compile(r"([A-Za-z0-9_.-]{1,64})((?:\+admin|\+weight=[^:+]*)*):(.+)")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """`weight` None is not said: 1, or what another key of the tenant says."""

    tenant: str
    digest: bytes
    is_admin: bool = False
    weight: float | None = None


def parse_entry(text: str) -> KeyEntry:
    """A key without a name stands for itself: its tenant is a digest of it.

    Raises ValueError where a mark is wrong, rather than take the whole for a key: with a slip in
    an operator's mark there would be no operator, and /admin open to all keys.
    """
    found = _ENTRY.fullmatch(text)
    digest = digest_of(secret_of(text).encode())
    if found is None and (marked := _MARKED.fullmatch(text)):
        name = marked[1] or "a key without a name"
        raise ValueError(f"{name}: a mark is +admin or +weight=NUMBER, not {marked[2]}")
    if found is None:
        return KeyEntry("key-" + digest.hex()[:16], digest)
    marks = found[2].split("+")[1:]
    weights = [_weight(mark.removeprefix("weight=")) for mark in marks if mark != "admin"]
    if len(set(marks)) < len(marks) or len(weights) > 1:
        raise ValueError(f"{found[1]}: a mark is given twice")
    return KeyEntry(found[1], digest, "admin" in marks, weights[0] if weights else None)


def secret_of(text: str) -> str:
    """What a client sends: the entry without its name and marks."""
    found = _ENTRY.fullmatch(text)
    return found[3] if found else text


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _weight(text: str) -> float:
    weight = plain_number(text)
    if weight is None or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"a weight is a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight


def tenants(entries: Iterable[str]) -> dict[str, float]:
    """The weight of each tenant. Raises ValueError where two keys of one disagree, or entries do
    of whose, or of what rank, a key is."""
    said: dict[str, float | None] = {}
    owners: dict[bytes, tuple[str, bool]] = {}
    for text in entries:
        entry = parse_entry(text)
        owner = owners.setdefault(entry.digest, (entry.tenant, entry.is_admin))
        if owner != (entry.tenant, entry.is_admin):
            raise ValueError(f"one key stands in two entries, of {owner[0]} and of {entry.tenant}")
        before = said.get(entry.tenant)
        if None not in (before, entry.weight) and before != entry.weight:
            raise ValueError(f"{entry.tenant} has two weights, {before:g} and {entry.weight:g}")
        said[entry.tenant] = before if entry.weight is None else entry.weight
    return {tenant: 1.0 if weight is None else weight for tenant, weight in said.items()}
