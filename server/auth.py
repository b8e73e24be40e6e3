"""Who may call what: API keys, the tenant that each key stands for, and which are operators'.

Decides by scope["path"], which is what the router sees; never by a URL built from headers.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from server.error_answers import error_answer
from server.errors import ApiError, Forbidden, Unauthorized
from server.keys import digest_of, parse_entry

OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN_PATHS = "/admin/"


class Key(NamedTuple):
    tenant: str
    is_admin: bool


class ApiKeys:
    """The keys of this server, in the form of keys.py. Two keys may share a tenant.

    An operator's sees the requests of all, others those of their tenant. Once there is such a key,
    what is for operators asks for one.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._keys: dict[bytes, Key] = {}
        for entry in map(parse_entry, entries):
            self._keys[entry.digest] = Key(entry.tenant, entry.is_admin)
        self.has_admins = any(key.is_admin for key in self._keys.values())

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: bytes) -> Key | None:
        """Compares with every key in constant time each, so time tells nothing about any."""
        wanted = digest_of(given)
        found = None
        for digest, key in self._keys.items():
            if hmac.compare_digest(digest, wanted):
                found = key
        return found


class AuthMiddleware:
    """401 for whatever has no valid key, unknown paths included; open paths match exactly.

    403 for other keys than operators' where only those may look.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        open_paths: frozenset[str],
        count_error: Callable[[ApiError], None],
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        key = self._keys.find(_key(scope["headers"]))
        if key is not None:  # before a refusal, whose line in the log tells whose key it was
            scope["paceline"].tenant = key.tenant
            scope["paceline"].sees = None if key.is_admin else key.tenant
        refusal = self._refusal(key, scope["path"])
        if refusal is not None:
            self._count_error(refusal)
            await error_answer(refusal, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, key: Key | None, path: str) -> ApiError | None:
        if key is None and path not in self._open_paths:
            return Unauthorized(
                "A valid API key is needed: Authorization: Bearer KEY, or x-api-key.",
                headers={"www-authenticate": "Bearer"},
            )
        is_operator = key is not None and key.is_admin
        if path.startswith(ADMIN_PATHS) and self._keys.has_admins and not is_operator:
            return Forbidden("This is for keys that are marked as an operator's.")
        return None


def _key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The bearer token, else x-api-key; b"", which is no key, if there is neither, or two that
    differ: a proxy before us may have looked at the other one."""
    bearers, plain = set(), set()
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearers.add(value[7:].strip())
        elif name == b"x-api-key":
            plain.add(value.strip())
    given = bearers or plain
    return given.pop() if len(given) == 1 else b""
