"""Sampler: logits to token ids, each row by its own parameters.

Owns the table of sampling parameters by slot. Steps, in this order: repetition penalty, presence
and frequency penalties, logit_bias, token rules, stop ids before min_tokens, the grammar; then
log-probabilities, and greedy choice or a draw. Rows that need none of it cost one argmax. The
arithmetic on whole rows is a Chooser's: engine.torch_sampling, or engine.native_sampling for host
arrays. Must not know models or KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Array, Ints, to_device
from engine.grammar import GrammarCompiler, GrammarState
from engine.grammar_rows import GrammarRows, GrammarStep, TokenMasks, unwanted_by_row
from engine.logprobs import Logprobs
from engine.random import signed64
from engine.token_rules import TokenRules
from scheduler.types import Admission, SamplingParams

if TYPE_CHECKING:
    import torch

# Below it a draw is greedy: a logit that is 0.02 behind would come up once in 10^9 draws.
MIN_TEMPERATURE = 1e-3
MAX_PARAMETER = 1e9

# The first seven are paceline_parameters of engine/kernels/cpu/api.h.
SLOT_COLUMNS = np.dtype(
    [
        ("seed", np.int64),
        ("top_k", np.int64),  # vocab_limit = off
        ("num_logprobs", np.int64),  # -1 = none
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("greedy", np.bool_),
        ("ranked", np.bool_),  # has top_k or top_p
        ("penalised", np.bool_),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("min_tokens", np.int64),
        ("num_prompt_tokens", np.int64),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step sampled; arrays are on the device."""

    token_ids: Array  # [rows] int64
    peaks: Array  # [rows] float32: the best logit; not finite where the row is broken
    logprob_rows: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()  # alternatives wanted by each of logprob_rows
    logprobs: Logprobs | None = None  # of logprob_rows
    grammar: GrammarStep | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens of all rows; `logprobs` of the rows that want them, in order, or None."""

    token_ids: Array  # [rows] int64
    peaks: Array  # [rows] float32: the best logit; not finite where the row is broken
    logprobs: Logprobs | None


class Chooser(Protocol):
    """The sampler's arithmetic on rows of logits [rows, vocab_limit] float32.

    The rules of a choice are engine.draw's and engine.logprobs', whoever computes it.
    """

    def penalise(
        self,
        logits: Array,
        token_table: Array,
        columns: NDArray[np.void],
        *,
        rows: Ints,
        slots: Ints,
        lengths: Ints,
    ) -> None:
        """Apply to logits[rows], in place, the penalties of `columns` [rows].

        Repetition (prompt and output), then presence and frequency (output only). Counts come from
        token_table[slots, :lengths] at each step: no state to reset, restore or mix up.
        """
        ...

    def choose(
        self,
        logits: Array,
        columns: NDArray[np.void],
        indices: Ints,
        masks: TokenMasks | None = None,
    ) -> Choice:
        """From logits and masks to tokens and scores, with the parameters `columns` [rows].

        `indices` [rows]: how many tokens each sequence has generated before. A mask adds -inf to
        what may not come, in place.
        """
        ...

    def logprobs(self, logits: Array, token_ids: Array, *, num_top: int) -> Logprobs:
        """Logprobs.of."""
        ...


class Sampler:
    """Vectorised over rows; the host decides which rows need what, so it never waits."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        vocab_limit: int,
        device: torch.device | None,
        chooser: Chooser,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`vocab_limit`: ids from here on are padding of the model's vocab_size, never sampled."""
        assert 0 < vocab_limit <= vocab_size
        self._chooser = chooser
        self._vocab_size, self._vocab_limit = vocab_size, vocab_limit
        self._device = device
        self._table = np.zeros(num_slots, dtype=SLOT_COLUMNS)
        self._edited: set[int] = set()  # slots with penalties, biases or bans
        self._bias: dict[int, tuple[Ints, NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, Ints] = {}
        self._grammars = GrammarRows(grammars, device, num_slots=num_slots, vocab_limit=vocab_limit)
        self._token_rules = TokenRules(vocab_limit=vocab_limit, device=device)

    def fault(self, admission: Admission) -> str:
        """Why this admission can not be served, or "": the server refuses such requests before.

        The grammar of the slot is set on the way, since finding its fault is making it.
        """
        sampling = admission.sampling
        numbers = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            *(value for _, value in sampling.logit_bias),
        )
        if not all(abs(number) <= MAX_PARAMETER for number in numbers):  # NaN fails it too
            return "a sampling parameter is not a number within reason"
        if sampling.repetition_penalty <= 0:
            return "repetition_penalty is not positive"
        for name, ids in (
            ("token_ids", admission.token_ids),
            ("stop_token_ids", admission.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", tuple(token for word in sampling.bad_words for token in word)),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
                return f"{name}: an id is outside the vocabulary of {self._vocab_size}"
        return self._grammars.admit(admission)

    def admit(self, admission: Admission) -> None:
        """Reset the slot to the parameters of a sequence without fault."""
        sampling, slot, limit = admission.sampling, admission.slot, self._vocab_limit
        top_k = sampling.top_k if 0 < sampling.top_k < limit else limit
        self._table[slot] = (
            signed64(sampling.seed),
            top_k,
            -1 if sampling.num_logprobs is None else sampling.num_logprobs,
            sampling.top_p,
            max(sampling.temperature, MIN_TEMPERATURE),
            min(sampling.min_p, 1.0),
            sampling.temperature < MIN_TEMPERATURE,
            top_k < limit or sampling.top_p < 1,
            _penalises(sampling),
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.min_tokens,
            admission.num_prompt_tokens,
        )
        (self._edited.add if _edits(admission) else self._edited.discard)(slot)
        # Ids of the padding are never sampled anyway.
        bias = {token: value for token, value in sampling.logit_bias if token < limit}
        self._bias[slot] = (
            np.fromiter(bias.keys(), dtype=np.int64),
            np.fromiter(bias.values(), dtype=np.float32),
        )
        self._token_rules.admit(admission)
        stop_ids = [token for token in dict.fromkeys(admission.stop_token_ids) if token < limit]
        self._stop_ids[slot] = np.array(stop_ids, dtype=np.int64)

    def sample(self, logits: Array, slots: Ints, lengths: Ints, token_table: Array) -> Samples:
        """The next token of slots [rows], whose sequences have `lengths` [rows] tokens so far.

        logits [rows, vocab_size] float32 is overwritten; token_table [slots, positions] int64.
        """
        columns = self._table[slots]
        if self._vocab_limit < self._vocab_size:
            logits = logits[:, : self._vocab_limit]
        masks, states, faults = None, {}, {}
        if self._edited and not self._edited.isdisjoint(slots.tolist()):
            masks, states, faults = self._edit(logits, columns, slots, lengths, token_table)
        indices = lengths - columns["num_prompt_tokens"]
        choice = self._chooser.choose(logits, columns, indices, masks)
        grammar = self._grammars.watch(states, faults, choice.token_ids)
        if choice.logprobs is None:
            return Samples(choice.token_ids, choice.peaks, grammar=grammar)
        wanted = np.flatnonzero(columns["num_logprobs"] >= 0)
        return Samples(
            choice.token_ids,
            choice.peaks,
            logprob_rows=tuple(wanted.tolist()),
            num_top=tuple(columns["num_logprobs"][wanted].tolist()),
            logprobs=choice.logprobs,
            grammar=grammar,
        )

    def _edit(
        self,
        logits: Array,
        columns: NDArray[np.void],
        slots: Ints,
        lengths: Ints,
        token_table: Array,
    ) -> tuple[TokenMasks | None, dict[int, GrammarState], dict[int, str]]:
        """Everything that changes logits; the grammars' masks, and their states and faults by row.

        The masks are still to be put on the logits.
        """
        num_prompt = columns["num_prompt_tokens"]
        rows = np.flatnonzero(columns["penalised"])
        if len(rows):
            self._chooser.penalise(
                logits,
                token_table,
                columns[rows],
                rows=rows,
                slots=slots[rows],
                lengths=lengths[rows],
            )
        self._add_bias(logits, slots)
        self._token_rules.apply(logits, slots, lengths, num_prompt, token_table)
        unwanted = unwanted_by_row(
            lengths - num_prompt < columns["min_tokens"], slots, self._stop_ids
        )
        masks, states, faults = self._grammars.masks(slots, unwanted)
        self._ban(logits, {row: ids for row, ids in unwanted.items() if row not in states})
        return masks, states, faults

    def _add_bias(self, logits: Array, slots: Ints) -> None:
        found = [(row, *self._bias[slot]) for row, slot in enumerate(slots.tolist())]
        found = [entry for entry in found if len(entry[1])]
        if not found:
            return
        rows = self._upload(
            np.repeat([row for row, *_ in found], [len(ids) for _, ids, _ in found])
        )
        ids = self._upload(np.concatenate([ids for _, ids, _ in found]))
        logits[rows, ids] += self._upload(np.concatenate([values for *_, values in found]))

    def _ban(self, logits: Array, ids_by_row: dict[int, Ints]) -> None:
        """Where fewer than min_tokens are generated, no stop id may be next."""
        found = list(ids_by_row.items())
        if not found:
            return
        rows = self._upload(np.repeat([row for row, _ in found], [len(ids) for _, ids in found]))
        logits[rows, self._upload(np.concatenate([ids for _, ids in found]))] = -np.inf

    def _upload(self, array: NDArray[np.generic]) -> Array:
        return to_device(array, self._device)


def _penalises(sampling: SamplingParams) -> bool:
    return (
        sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
    )


def _edits(admission: Admission) -> bool:
    sampling = admission.sampling
    return bool(
        _penalises(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.min_tokens
        or admission.grammar
    )
