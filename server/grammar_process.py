"""The parent's side of grammar_worker.py: one child, one grammar at a time, limits that hold.

The child is started on first use and again after a limit has ended it, so no failure outlives its
request. Knows no HTTP.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any

from engine.grammar import GrammarError, Vocabulary
from server.grammar_text import Grammar

_ROOT = Path(__file__).resolve().parent.parent
_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from server.grammar_worker import main; sys.exit(main())"
)
# Wall clock past the CPU limit, and for a start; reached only if the child hardly runs.
_GRACE_SECONDS = 30.0


class GrammarProcess:
    """Tries out grammars for one vocabulary; safe to call from any thread."""

    def __init__(self, vocabulary: Vocabulary, *, max_seconds: float) -> None:
        self._vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, where there is one."""
        return None if self._child is None else self._child.pid

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError, in one line, for a grammar that cannot be served."""
        request = {
            "spec": grammar.spec().decode(),
            "parts": [
                [label, Grammar(f"start: @{name}", {name: grammar.parts[name]}).spec().decode()]
                for name, label in grammar.labels.items()
            ],
            "seconds": self._max_seconds,
        }
        with self._lock:
            answer = self._ask(self._running(), request)
            if "is_spent" in answer:
                self._end()
        if "error" in answer:
            raise GrammarError(answer["error"])

    def close(self) -> None:
        """End the child; a later check starts another."""
        with self._lock:
            self._end()

    def _running(self) -> _Child:
        if self._child is None or not self._child.alive():
            self._end()
            self._child = _Child()
            self._ask(self._child, _as_message(self._vocabulary))
        return self._child

    def _ask(self, child: _Child, request: dict[str, Any]) -> dict[str, str]:
        """One exchange. What may have left the child odd ends it."""
        try:
            return child.ask(request, self._max_seconds + _GRACE_SECONDS)
        except (OSError, EOFError):
            late = child.exit_code() in (-signal.SIGPROF, None)
            self._end()
            why = f"takes longer than {self._max_seconds:g} s" if late else "needs too much memory"
            raise GrammarError(f"compiling it {why}") from None

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """The process and its pipes; ended with `end`, or when nobody holds this any more."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a compiler says when it gives up
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self.end = weakref.finalize(self, _end, self._process, self._to, self._from)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """How the child ended; None if it still has not, shortly after its pipe closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        return self._process.returncode

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, str]:
        """Raises OSError after a silence of `timeout`, EOFError or OSError at the end."""
        self._to.write(json.dumps(request).encode() + b"\n")
        self._to.flush()
        if not select.select([self._from], [], [], timeout)[0]:
            raise TimeoutError
        line = self._from.readline()  # short enough to come at once
        if not line:
            raise EOFError
        answer: dict[str, str] = json.loads(line)
        return answer


def _end(process: subprocess.Popen[bytes], *pipes: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in pipes:
        with contextlib.suppress(OSError):  # what was still to be written
            pipe.close()


def _as_message(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "tokens": [base64.b64encode(token).decode() for token in vocabulary.tokens],
        "special_ids": vocabulary.special_ids,
        "eos_token_ids": vocabulary.eos_token_ids,
    }
