"""The sampler's arithmetic in torch: penalties, the choice of tokens and their log-probabilities.

Implements engine.sampler.Chooser for tensors on any device, and defines what other forms are held
against; masks are put on logits here. Must not know slots, grammars or models.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.arrays import Ints, to_device
from engine.draw import Filters, draw_from_all, draw_from_best, weights_of
from engine.grammar_rows import TokenMasks
from engine.logprobs import MAX_LOGITS, Logprobs
from engine.random import uniform
from engine.sampler import Choice

# [256, 8] float32, by byte of a mask: 0 for each bit that is set, lowest first, -inf for the rest.
_BYTE_BIASES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)


class SamplerKernels(Protocol):
    """Fused forms of the two parts that cost most, for a device that has them."""

    def draw(
        self,
        logits: Tensor,
        peaks: Tensor,
        token_ids: Tensor,
        columns: NDArray[np.void],
        *,
        rows: Ints,
        indices: Ints,
    ) -> None:
        """Replace token_ids[rows] by draws with the parameters `columns` [rows]."""
        ...

    def penalise(
        self,
        logits: Tensor,
        token_table: Tensor,
        columns: NDArray[np.void],
        *,
        rows: Ints,
        slots: Ints,
        lengths: Ints,
    ) -> None:
        """Apply penalties to logits[rows] in place."""
        ...


class TorchSampling:
    """Implements engine.sampler.Chooser.

    It never waits for the device, but for rows with top_p and no top_k on the CPU, where nothing is
    asynchronous.
    """

    def __init__(
        self, *, vocab_size: int, device: torch.device, kernels: SamplerKernels | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels

    def logprobs(self, logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
        return Logprobs.of(logits, token_ids, num_top=num_top)

    def penalise(
        self,
        logits: Tensor,
        token_table: Tensor,
        columns: NDArray[np.void],
        *,
        rows: Ints,
        slots: Ints,
        lengths: Ints,
    ) -> None:
        for part in _parts(np.arange(len(rows)), logits.shape[1]):
            if self._kernels is not None:
                self._kernels.penalise(
                    logits,
                    token_table,
                    columns[part],
                    rows=rows[part],
                    slots=slots[part],
                    lengths=lengths[part],
                )
                continue
            self._penalise(
                logits, token_table, columns[part], rows[part], slots[part], lengths[part]
            )

    def _penalise(
        self,
        logits: Tensor,
        token_table: Tensor,
        columns: NDArray[np.void],
        rows_on_host: Ints,
        slots: Ints,
        lengths: Ints,
    ) -> None:
        rows, length = self._upload(rows_on_host), self._upload(lengths)[:, None]
        tokens = token_table[:, : int(lengths.max())][self._upload(slots)]
        position = torch.arange(tokens.shape[1], device=self._device)
        is_known = position < length
        is_output = is_known & (position >= self._upload(columns["num_prompt_tokens"])[:, None])
        num_known = self._counts(tokens, is_known, logits.shape[1])
        num_output = self._counts(tokens, is_output, logits.shape[1])

        repetition, presence, frequency = (
            self._upload(columns[name])[:, None] for name in ("repetition", "presence", "frequency")
        )
        old = logits[rows]
        repeated = torch.where(old > 0, old / repetition, old * repetition)
        new = torch.where(num_known > 0, repeated, old)
        logits[rows] = new - frequency * num_output - presence * (num_output > 0)

    def _counts(self, tokens: Tensor, counted: Tensor, num_ids: int) -> Tensor:
        """[rows, num_ids] float32: how often each id occurs where `counted`."""
        counts = torch.zeros((len(tokens), self._vocab_size), device=self._device)
        counts.scatter_add_(1, tokens, counted.to(torch.float32))
        return counts[:, :num_ids]

    def choose(
        self,
        logits: Tensor,
        columns: NDArray[np.void],
        indices: Ints,
        masks: TokenMasks | None = None,
    ) -> Choice:
        if masks is not None:
            self._mask(logits, masks)
        peaks, token_ids = logits.max(1)
        for part in _parts(np.flatnonzero(~columns["greedy"]), logits.shape[1]):
            if self._kernels is not None:
                self._kernels.draw(
                    logits, peaks, token_ids, columns[part], rows=part, indices=indices[part]
                )
                continue
            rows = self._upload(part)
            drawn = self._draw(logits[rows], peaks[rows], columns[part], indices[part])
            token_ids[rows] = drawn

        wanted = np.flatnonzero(columns["num_logprobs"] >= 0)
        if not len(wanted):
            return Choice(token_ids, peaks, None)
        num_top = int(columns["num_logprobs"].max())
        parts = []
        for part in _parts(wanted, logits.shape[1]):
            rows = self._upload(part)
            parts.append(Logprobs.of(logits[rows], token_ids[rows], num_top=num_top))
        return Choice(token_ids, peaks, Logprobs.joined(parts))

    def _mask(self, logits: Tensor, masks: TokenMasks) -> None:
        """One operation for all rows from the first to the last that has a mask."""
        low, high = int(masks.rows[0]), int(masks.rows[-1]) + 1
        words = masks.words
        if len(words) < high - low:
            words = np.full((high - low, words.shape[1]), 0xFFFFFFFF, dtype=np.uint32)
            words[masks.rows - low] = masks.words
        logits[low:high] += self._upload(_biases(words)[:, : logits.shape[1]])

    def _draw(
        self, logits: Tensor, peaks: Tensor, columns: NDArray[np.void], indices: Ints
    ) -> Tensor:
        """[rows] int64; `indices`: how many tokens each sequence has generated before."""
        weights = weights_of(logits, peaks, self._upload(columns["temperature"]))
        uniforms = uniform(self._upload(columns["seed"]), self._upload(indices))
        tokens = torch.empty(len(columns), dtype=torch.int64, device=self._device)

        plain = np.flatnonzero(~columns["ranked"])
        if len(plain):
            rows, min_p = self._upload(plain), self._upload(columns["min_p"][plain])
            tokens[rows] = draw_from_all(weights[rows], min_p, uniforms[rows])
        ranked = np.flatnonzero(columns["ranked"])
        if len(ranked):
            rows, of = self._upload(ranked), columns[ranked]
            tokens[rows] = draw_from_best(
                logits[rows],
                weights[rows],
                Filters(*(self._upload(of[name]) for name in ("top_k", "top_p", "min_p"))),
                uniforms[rows],
                max_top_k=int(of["top_k"].max()),
            )
        return tokens

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        uploaded: Tensor = to_device(array, self._device)
        return uploaded


def _biases(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """[rows, words] -> [rows, 32 * words]: 0 for what may come, -inf for the rest.

    By bytes, and to be added: filling by a mask takes several times as long.
    """
    biases = np.take(_BYTE_BIASES, words.view(np.uint8), axis=0, mode="clip")
    return biases.reshape(len(words), -1)


def _parts(rows: Ints, vocab: int) -> list[Ints]:
    """Rows in pieces whose logits stay below MAX_LOGITS."""
    size = max(1, MAX_LOGITS // vocab)
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]
