"""Who may call what: API keys, and the tenant that each key stands for.

Decides by scope["path"], which is what the router sees; never by a URL built from headers.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.error_answers import error_answer
from server.errors import ApiError, Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})
_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)")


class ApiKeys:
    """The keys of this server. An entry is a key, or `name:key`; the name becomes the tenant.

    A key without a name stands for itself: its tenant is a digest of it. Two keys may share a name.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._tenants: dict[bytes, str] = {}
        for entry in entries:
            named = _NAMED_KEY.fullmatch(entry)
            digest = _digest((named[2] if named else entry).encode())
            self._tenants[digest] = named[1] if named else "key-" + digest.hex()[:16]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, key: bytes) -> str | None:
        """Compares with every key in constant time each, so time tells nothing about any."""
        given = _digest(key)
        found = None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AuthMiddleware:
    """401 for whatever has no valid key, unknown paths included; open paths match exactly."""

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
        tenant = self._keys.tenant(_key(scope["headers"]))
        if tenant is not None:
            scope["paceline"].tenant = tenant
        elif scope["path"] not in self._open_paths:
            refusal = Unauthorized(
                "A valid API key is needed: Authorization: Bearer KEY, or x-api-key.",
                headers={"www-authenticate": "Bearer"},
            )
            self._count_error(refusal)
            await error_answer(refusal, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The bearer token, else x-api-key; b"" if there is neither, which is no key."""
    found = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            found = value.strip()
    return found
