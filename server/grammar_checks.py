"""Tries out grammars before the core hears of them: what does not serve is the client's error.

One child process that does it, while there is work for it, a bound on what waits for it, and a
memory of how grammars fared. Knows no fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine.errors import GrammarError
from engine.vocabulary import Vocabulary
from server.errors import InvalidRequest, Overloaded, Unavailable, retry_headers
from server.grammar_process import GrammarProcess
from server.grammar_text import Grammar
from server.tokenizer import Tokenizer

log = logging.getLogger("paceline.grammars")

MAX_WAITING = 64
# Of CPU time; a large schema takes a tenth of it.
MAX_SECONDS = 1.0
MAX_REMEMBERED = 4_096
# A child without work for so long ends and gives back its memory, some 40 MB; a start takes a
# quarter of a second.
MAX_IDLE_SECONDS = 120.0


class GrammarChecks:
    """One for the life of the server; `check` is called on the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_seconds: float = MAX_SECONDS,
        max_idle_seconds: float = MAX_IDLE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_seconds = max_seconds
        self._max_idle_seconds = max_idle_seconds
        self._process: GrammarProcess | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._trying: dict[bytes, asyncio.Future[str]] = {}  # by digest
        self._is_closed = False
        self._idle: asyncio.TimerHandle | None = None
        # By digest: why a grammar is refused, or "".
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: Grammar, spec: bytes) -> None:
        """`spec` is what the grammar makes, and what the core will get.

        Raises InvalidRequest for a grammar that cannot be used, Overloaded if many wait,
        Unavailable if none can be tried out.
        """
        digest = hashlib.sha256(spec).digest()
        fault = self._known.get(digest)
        if fault is None:
            # Many may come at once with one grammar, as the calls of an agent do.
            work = self._trying.get(digest) or self._begin(digest, grammar)
            try:
                fault = await asyncio.shield(work)
            except OSError as error:
                log.warning("no grammar can be tried out: %s", error)
                raise Unavailable(
                    "The server cannot compile a grammar now.", headers=retry_headers(1.0)
                ) from None
        self._remember(digest, fault)
        if fault:
            raise InvalidRequest(f"This constraint cannot be used: {fault}.", code="invalid_schema")

    def _begin(self, digest: bytes, grammar: Grammar) -> asyncio.Future[str]:
        if len(self._trying) >= MAX_WAITING:
            raise Overloaded(
                "The server is busy compiling grammars.",
                code="grammar_queue_full",
                headers=retry_headers(1.0),
            )
        self._stop_waiting()
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._try_out, grammar)
        self._trying[digest] = work
        work.add_done_callback(partial(self._tried, digest))
        return work

    def close(self) -> None:
        self._is_closed = True
        self._stop_waiting()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _tried(self, digest: bytes, work: asyncio.Future[str]) -> None:
        del self._trying[digest]
        if not work.cancelled():
            work.exception()  # seen, also if the client has left
        if not self._trying and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._max_idle_seconds, self._pool.submit, self._end_child)

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_child(self) -> None:
        """The next grammar starts another."""
        if self._process is not None:
            self._process.close()

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
