"""Compiles grammars before the core hears of them: what does not compile is the client's error.

A few threads of their own, a bound on what waits for them, a time limit, and a memory of the
grammars that were good. The work itself is bounded by the compiler's fuel. Knows no fields.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from engine.grammar import GrammarCompiler, GrammarError, Vocabulary
from server.errors import InvalidRequest, Overloaded, retry_headers
from server.grammar_text import Grammar
from server.tokenizer import Tokenizer

THREADS = 1
MAX_WAITING = 64
MAX_SECONDS = 10.0
# The core has its own cache; this one only saves compiling the same twice to say "good".
MAX_CACHE_BYTES = 16 << 20


class GrammarChecks:
    """One for the life of the server; `check` is called on the event loop."""

    def __init__(self, tokenizer: Tokenizer, *, max_seconds: float = MAX_SECONDS) -> None:
        self._tokenizer = tokenizer
        self._max_seconds = max_seconds
        self._compiler: GrammarCompiler | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._num_open = 0

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for a grammar that cannot be used, Overloaded if many wait."""
        compiler = self._compiler
        spec = grammar.spec()
        if compiler is not None and compiler.knows(spec):
            return
        if self._num_open >= MAX_WAITING:
            raise Overloaded(
                "The server is busy compiling grammars.",
                code="grammar_queue_full",
                headers=retry_headers(1.0),
            )
        self._num_open += 1
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._compile, grammar)
        work.add_done_callback(self._closed)
        try:
            await asyncio.wait_for(asyncio.shield(work), self._max_seconds)
        except TimeoutError:
            raise InvalidRequest(
                f"Compiling this grammar takes longer than {self._max_seconds:g} s.",
                code="grammar_too_complex",
            ) from None
        except GrammarError as error:
            raise InvalidRequest(
                f"This constraint cannot be used: {error}.", code="invalid_schema"
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _closed(self, work: asyncio.Future[None]) -> None:
        self._num_open -= 1
        if not work.cancelled():
            work.exception()  # seen, also if the client has left

    def _compile(self, grammar: Grammar) -> None:
        if self._compiler is None:
            self._compiler = _compiler_for(self._tokenizer)
        try:
            self._compiler.start(grammar.spec())
        except GrammarError:
            self._blame(grammar, self._compiler)
            raise

    def _blame(self, grammar: Grammar, compiler: GrammarCompiler) -> None:
        """Raises GrammarError that names the part at fault, if one alone is."""
        for name, label in grammar.labels.items():
            try:
                compiler.start(Grammar(f"start: @{name}", {name: grammar.parts[name]}).spec())
            except GrammarError as error:
                raise GrammarError(f"{label}: {error}") from None


def _compiler_for(tokenizer: Tokenizer) -> GrammarCompiler:
    if not tokenizer.eos_token_ids:
        raise GrammarError("this model has no token that ends an answer")
    vocabulary = Vocabulary(
        tokenizer.all_token_bytes(),
        tuple(sorted(tokenizer.special_ids)),
        tuple(sorted(tokenizer.eos_token_ids)),
    )
    return GrammarCompiler(vocabulary, max_cache_bytes=MAX_CACHE_BYTES)
