"""The parent's side of template_worker.py: one child, one render at a time, limits that hold.

The child is started on first use and again after a limit has ended it, so no failure outlives its
request. Knows nothing of messages.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from typing import Any

from server.child import Child
from server.text import TextError

_WORKER = "from server.template_worker import main; main()"
_START_SECONDS = 30.0  # a Python start on a busy machine
_GRACE_SECONDS = 10.0  # wall clock past the CPU limit; reached only if the child hardly runs


class RenderFailed(Exception):
    """`kind`: what went wrong.

    "raised" is the template's own message to the client and "failed" its fault with these
    variables; "limit" and "broken" (it does not compile) say that no variables may help.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TemplateProcess:
    """Renders a fixed set of named templates; safe to call from any thread."""

    def __init__(
        self, sources: Mapping[str, str], *, max_seconds: float, max_output_chars: int
    ) -> None:
        self._sources = dict(sources)
        self._max_seconds = max_seconds
        self._max_output_chars = max_output_chars
        self._lock = threading.Lock()
        self._child: Child | None = None

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The text of one template.

        Raises RenderFailed, or TextError if a variable holds a lone surrogate.
        """
        request = _encoded(
            {
                "name": name,
                "variables": variables,
                "max_chars": self._max_output_chars,
                "seconds": self._max_seconds,
            }
        )
        with self._lock:
            return self._ask(self._running(), request)

    def close(self) -> None:
        """End the child; a later render starts another."""
        with self._lock:
            self._end()

    def _running(self) -> Child:
        if self._child is not None and self._child.alive():
            return self._child
        self._end()
        self._child = child = Child(_WORKER)
        try:
            child.receive(_START_SECONDS)
        except (OSError, EOFError):
            self._end()
            raise RenderFailed("limit", "its process did not start") from None
        try:
            self._ask(child, _encoded({"sources": self._sources, "seconds": self._max_seconds}))
        except RenderFailed as error:
            self._end()
            raise RenderFailed("broken", str(error)) from None
        return child

    def _ask(self, child: Child, request: bytes) -> str:
        """One exchange. Whatever may have left the child odd ends it."""
        try:
            child.send(request, self._max_seconds + _GRACE_SECONDS)
            reply = child.receive(self._max_seconds + _GRACE_SECONDS)
        except (OSError, EOFError):
            late = child.exit_code() in (-signal.SIGPROF, None)
            self._end()
            why = f"it takes longer than {self._max_seconds:g} s" if late else "its process died"
            raise RenderFailed("limit", why) from None
        if "text" in reply:
            text: str = reply["text"]
            return text
        if reply["kind"] == "limit":
            self._end()
        raise RenderFailed(reply["kind"], reply["error"])

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _encoded(message: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise TextError(
            f"the messages are not valid Unicode: lone surrogate U+{code:04X}"
        ) from None
