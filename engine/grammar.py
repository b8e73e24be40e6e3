"""Grammars: what a sequence may say next, as a mask over token ids.

Owns the compiler with its limits and its cache, and the state of one sequence in its grammar. All
is llguidance (Rust); neither torch nor text beyond the bytes of tokens. A specification is JSON in
UTF-8, as server/grammar_text.py writes it: llguidance's own, and `thoughts`, a bound on thinking.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance import TokenizerWrapper as _Wrapper
from numpy.typing import NDArray

from engine.errors import GrammarError
from engine.thought_budget import ThoughtBudget, ThoughtRules
from engine.vocabulary import Vocabulary

Mask = NDArray[np.bool_]  # [vocab]
Words = NDArray[np.uint32]  # bits, the lowest first

MAX_SPEC_BYTES = 1 << 20
MAX_CACHE_BYTES = 64 << 20
MAX_CACHED = 256
# A compiled grammar holds tables that no interface tells the size of; a guess on the high side.
_BYTES_PER_GRAMMAR = 128 << 10
# Fuel bounds the work, whatever the machine: tens of milliseconds to compile, fewer for a mask.
# Lexer states cost one or two kilobytes each.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 60_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# A row of what a schema makes is as long as it has properties; of what a client wrote as rules, as
# long as it is ambiguous, and then the work of a token grows with its square.
_ITEMS_OF_RULES = 400
# Tokens of a kind are allowed all at once where a grammar lets in whatever is of that kind.
# Patterns of names and identifiers let in lower-case letters; of white space alone there are few
# tokens.
_LOWER_CASE = "[a-z]{1,10}"
# What fuel does not count: a sequence may need so much CPU time for a token, and fall so far
# behind that. Hundreds of times what a schema needs, since CPU time is no exact measure.
SECONDS_PER_TOKEN = 0.003
MAX_SECONDS_BEHIND = 0.1


class GrammarCompiler:
    """Specifications to states, for one vocabulary; safe to call from any thread.

    The vocabulary's tables are built with the first grammar. Compiled grammars are kept, the least
    recently used go first; a refusal is not kept, since it is quick.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._max_cache_bytes = max_cache_bytes
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[bytes, tuple[_Compiled, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._building = threading.Lock()

    def knows(self, spec: bytes) -> bool:
        """Whether `start` would be a matter of microseconds."""
        with self._lock:
            return hashlib.sha256(spec).digest() in self._known

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def num_cached(self) -> int:
        return len(self._known)

    @property
    def cache_bytes(self) -> int:
        """What the cached grammars are reckoned to hold."""
        return self._num_bytes

    def start(self, spec: bytes) -> GrammarState:
        """A sequence at the beginning of its grammar. Raises GrammarError."""
        if len(spec) > MAX_SPEC_BYTES:
            raise GrammarError(f"the grammar has {len(spec)} bytes, the limit is {MAX_SPEC_BYTES}")
        digest = hashlib.sha256(spec).digest()
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known[0].state(self.vocab_size)
        compiled = self._compile(spec)
        self._keep(digest, compiled, _BYTES_PER_GRAMMAR + 8 * len(spec))
        return compiled.state(self.vocab_size)

    def prepare(self) -> None:
        """Builds the tables of the vocabulary, which holds the interpreter lock for a while."""
        self._tables()

    def _compile(self, spec: bytes) -> _Compiled:
        try:
            text, thoughts, has_rules = _taken_apart(spec)
        except (ValueError, LookupError, TypeError, RecursionError):
            raise GrammarError("the grammar is not a specification") from None
        limits = {**_LIMITS, "max_items_in_row": _ITEMS_OF_RULES} if has_rules else _LIMITS
        # Releases the interpreter lock.
        matcher = LLMatcher(self._tables(), text, log_level=0, limits=LLParserLimits(**limits))
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        rules = None
        if thoughts is not None:
            rules = ThoughtRules.of(*thoughts, tokens=self._vocabulary.tokens)
        compiled = _Compiled(matcher, rules)
        allowed = compiled.state(self.vocab_size).allowed()
        allowed[list(self._vocabulary.eos_token_ids)] = False
        if not allowed.any():
            raise GrammarError("only the empty answer, or none, can satisfy the grammar")
        return compiled

    def _keep(self, digest: bytes, compiled: _Compiled, num_bytes: int) -> None:
        with self._lock:
            if digest in self._known or num_bytes > self._max_cache_bytes:
                return
            self._known[digest] = (compiled, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_cache_bytes or len(self._known) > MAX_CACHED:
                _, (_, freed) = self._known.popitem(last=False)
                self._num_bytes -= freed

    def _tables(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = _tables_of(self._vocabulary)
            return self._tokenizer


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    thoughts: ThoughtRules | None

    def state(self, vocab_size: int) -> GrammarState:
        return GrammarState(self.matcher.deep_copy(), vocab_size, self.thoughts)


class GrammarState:
    """Where one sequence is in its grammar. Not safe to share between threads."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, thoughts: ThoughtRules | None = None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._thoughts = None if thoughts is None else ThoughtBudget(thoughts)
        self._seconds_behind = 0.0

    @property
    def ended(self) -> bool:
        """Nothing can follow: the sequence is complete."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self) -> Mask:
        """[vocab] which ids may be next; an end-of-sequence id where the grammar may end.

        Raises GrammarError if a limit of work was passed.
        """
        words = np.zeros(num_words(self._vocab_size), dtype=np.uint32)
        self.write_allowed(words)
        return unpack(words, self._vocab_size)

    def write_allowed(self, words: Words) -> None:
        """The same as bits, the lowest first, into words [num_words(vocab)]."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))
        if self._thoughts is not None and (forced := self._thoughts.forced()) is not None:
            words &= _bits(forced, len(words))
        self._seconds_behind += time.thread_time() - begin
        if self._seconds_behind > MAX_SECONDS_BEHIND:
            raise GrammarError("it needs too much work for a token")

    def accept(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these. Raises GrammarError for one that may not come."""
        begin = time.thread_time()
        for token_id in token_ids:
            if (
                not self._matcher.is_stopped()
                and (self._thoughts is None or self._thoughts.accept(token_id))
                and self._matcher.consume_token(token_id)
            ):
                continue
            reason = _reason(self._matcher) if self._matcher.is_error() else ""
            if reason and "satisfy the grammar" not in reason:  # a limit was passed
                raise GrammarError(reason)
            raise GrammarError(f"token {token_id} is outside the grammar")
        spent = time.thread_time() - begin - SECONDS_PER_TOKEN * len(token_ids)
        self._seconds_behind = max(0.0, self._seconds_behind + spent)


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def unpack(words: Words, vocab_size: int) -> Mask:
    """[..., words] -> [..., vocab]."""
    octets = words.view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little", count=vocab_size).view(np.bool_)


def _tables_of(vocabulary: Vocabulary) -> LLTokenizer:
    wrapper = _Wrapper(_TokenSource(vocabulary))
    _white_space, *texts = LLTokenizer.general_slices()
    tables = LLTokenizer(
        wrapper,
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.eos_token_ids),
        slices=[_LOWER_CASE, *texts],
    )
    wrapper.tokens = []  # they are in the tables now, and the wrapper lives as long
    return tables


class _TokenSource:
    """What llguidance asks of a tokenizer. It encodes no text for us: grammars are bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(vocabulary.special_ids)
        self.tokens = vocabulary.tokens

    def __call__(self, text: bytes | str) -> list[int]:
        """Longest match; only asked for hints, so rarely that no index is kept."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        known = {token: index for index, token in enumerate(self.tokens) if token in data}
        ids: list[int] = []
        while data:
            for size in range(min(len(data), 32), 0, -1):
                found = known.get(data[:size])
                if found is not None or size == 1:
                    ids.append(found or 0)
                    data = data[size:]
                    break
        return ids


def _bits(ids: NDArray[np.int64], count: int) -> Words:
    bits = np.zeros(count, dtype=np.uint32)
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return bits


def _taken_apart(spec: bytes) -> tuple[str, tuple[int, bytes, bytes] | None, bool]:
    """What the compiler is given, the bound on thoughts, and whether a client wrote rules.

    The first part is the frame that the server writes; a client's grammar is a part by itself.
    """
    given = json.loads(spec.decode())
    thoughts = given.pop("thoughts", None)
    has_rules = any("lark_grammar" in part for part in given["grammars"][1:])
    bound = None
    if thoughts is not None:
        bound = (thoughts["budget"], thoughts["opening"].encode(), thoughts["closing"].encode())
    return json.dumps(given, ensure_ascii=False), bound, has_rules


def _reason(matcher: LLMatcher) -> str:
    """One line of bounded length."""
    text = matcher.get_error().replace("<non-verbose/>", "").replace("^", " ")
    text = text.replace("NoExtensionBias", "no text can satisfy it")  # the library's own name
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return " ".join(line for line in lines if line and "|" not in line)[:300] or "no reason given"
