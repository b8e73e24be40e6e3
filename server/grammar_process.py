"""The parent's side of grammar_worker.py: one child, one grammar at a time, limits that hold.

The child is started on first use, and again after a limit or `close` has ended it, so no failure
outlives its request. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from array import array

from engine.errors import GrammarError
from engine.vocabulary import Vocabulary
from server.child import Child
from server.grammar_text import Grammar

_WORKER = "from server.grammar_worker import main; main()"
# Wall clock past the CPU limit, and for a start; reached only if the child hardly runs.
_GRACE_SECONDS = 30.0
_TOO_MUCH_MEMORY = "compiling it needs too much memory"


class _Killed(Exception):
    """Somebody ended the child; if it is the kernel, it may be for what the grammar took."""


class GrammarProcess:
    """Tries out grammars for one vocabulary; safe to call from any thread."""

    def __init__(self, vocabulary: Vocabulary, *, max_seconds: float) -> None:
        self._vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, where there is one."""
        return None if self._child is None else self._child.pid

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError, in one line, for a grammar that cannot be served.

        Raises OSError where no child can be had.
        """
        request = {
            "spec": grammar.spec().decode(),
            "parts": [
                [label, Grammar(f"start: @{name}", {name: grammar.parts[name]}).spec().decode()]
                for name, label in grammar.labels.items()
            ],
            "seconds": self._max_seconds,
        }
        message = json.dumps(request).encode()
        with self._lock:
            answer = self._judge(message)
            if "is_spent" in answer:
                self._end()
        if "error" in answer:
            raise GrammarError(answer["error"])

    def close(self) -> None:
        """End the child; a later check starts another."""
        with self._lock:
            self._end()

    def _judge(self, message: bytes) -> dict[str, str]:
        """Once more if the child was killed: none of our limits does that, others may have."""
        for _ in range(2):
            with contextlib.suppress(_Killed):
                return self._ask(self._running(), message)
        raise GrammarError(_TOO_MUCH_MEMORY)

    def _running(self) -> Child:
        if self._child is None or not self._child.alive():
            self._end()
            self._child = Child(_WORKER, stderr=subprocess.DEVNULL)  # compilers that give up
            try:
                self._ask(self._child, *_as_messages(self._vocabulary))
            except (GrammarError, _Killed):  # it has got no grammar
                raise OSError("the process that tries out grammars did not start") from None
        return self._child

    def _ask(self, child: Child, *messages: bytes) -> dict[str, str]:
        """One exchange. What may have left the child odd ends it."""
        timeout = self._max_seconds + _GRACE_SECONDS
        try:
            for message in messages:
                child.send(message, timeout)
            return child.receive(timeout)
        except (OSError, EOFError):
            code = child.exit_code()
            self._end()
            if code in (-signal.SIGPROF, None):
                why = f"compiling it takes longer than {self._max_seconds:g} s"
                raise GrammarError(why) from None
            if code == -signal.SIGKILL:
                raise _Killed from None
            raise GrammarError(_TOO_MUCH_MEMORY) from None

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _as_messages(vocabulary: Vocabulary) -> tuple[bytes, bytes, bytes]:
    """The ids, the length of each token and the tokens one after another."""
    ids = {"special_ids": vocabulary.special_ids, "eos_token_ids": vocabulary.eos_token_ids}
    lengths = array("I", map(len, vocabulary.tokens))
    return json.dumps(ids).encode(), lengths.tobytes(), b"".join(vocabulary.tokens)
