"""Tries out grammars before the core hears of them: what does not serve is the client's error.

One child process that does it, a bound on what waits for it, and a memory of how grammars fared.
Knows no fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from engine.grammar import GrammarError, Vocabulary
from server.errors import InvalidRequest, Overloaded, retry_headers
from server.grammar_process import GrammarProcess
from server.grammar_text import Grammar
from server.tokenizer import Tokenizer

MAX_WAITING = 64
# Of CPU time; a large schema takes a tenth of it.
MAX_SECONDS = 1.0
MAX_REMEMBERED = 4_096


class GrammarChecks:
    """One for the life of the server; `check` is called on the event loop."""

    def __init__(self, tokenizer: Tokenizer, *, max_seconds: float = MAX_SECONDS) -> None:
        self._tokenizer = tokenizer
        self._max_seconds = max_seconds
        self._process: GrammarProcess | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._num_open = 0
        # By digest: why a grammar is refused, or "".
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def start(self) -> None:
        """Begins to start the child, so that the first grammar need not wait for it."""
        self._pool.submit(self._start)

    async def check(self, grammar: Grammar, spec: bytes) -> None:
        """`spec` is what the grammar makes, and what the core will get.

        Raises InvalidRequest for a grammar that cannot be used, Overloaded if many wait.
        """
        digest = hashlib.sha256(spec).digest()
        fault = self._known.get(digest)
        if fault is None:
            if self._num_open >= MAX_WAITING:
                raise Overloaded(
                    "The server is busy compiling grammars.",
                    code="grammar_queue_full",
                    headers=retry_headers(1.0),
                )
            self._num_open += 1
            work = asyncio.get_running_loop().run_in_executor(self._pool, self._try_out, grammar)
            work.add_done_callback(self._closed)
            fault = await asyncio.shield(work)
        self._remember(digest, fault)
        if fault:
            raise InvalidRequest(f"This constraint cannot be used: {fault}.", code="invalid_schema")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _closed(self, work: asyncio.Future[str]) -> None:
        self._num_open -= 1
        if not work.cancelled():
            work.exception()  # seen, also if the client has left

    def _remember(self, digest: bytes, fault: str) -> None:
        self._known[digest] = fault
        self._known.move_to_end(digest)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def _try_out(self, grammar: Grammar) -> str:
        try:
            self._child().check(grammar)
        except GrammarError as error:
            return str(error)
        return ""

    def _start(self) -> None:
        """What cannot be started now is the next grammar's to find out."""
        with contextlib.suppress(GrammarError, OSError):
            self._child().start()

    def _child(self) -> GrammarProcess:
        if self._process is None:
            self._process = GrammarProcess(
                _vocabulary_of(self._tokenizer), max_seconds=self._max_seconds
            )
        return self._process


def _vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    if not tokenizer.eos_token_ids:
        raise GrammarError("this model has no token that ends an answer")
    return Vocabulary(
        tokenizer.all_token_bytes(),
        tuple(sorted(tokenizer.special_ids)),
        tuple(sorted(tokenizer.eos_token_ids)),
    )
