"""The sampler's arithmetic on host arrays: whole rows chosen and scored in one call of the kernels.

Owns the arrays of such a call, and penalties in numpy. Must not know slots or models; the rules of
a choice are engine.draw's, and the kernels read its parameters where the sampler keeps them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Ints
from engine.grammar_rows import TokenMasks
from engine.kernels.cpu.library import Choice as Call
from engine.kernels.cpu.library import check
from engine.logprobs import Logprobs
from engine.sampler import SLOT_COLUMNS, Choice

Floats = NDArray[np.float32]


class NativeChooser:
    """Implements engine.sampler.Chooser for host arrays."""

    def __init__(self, kernel: Callable[[Call], None]) -> None:
        """`kernel` raises KernelError."""
        self._kernel = kernel

    def penalise(
        self,
        logits: Floats,
        token_table: Ints,
        columns: NDArray[np.void],
        *,
        rows: Ints,
        slots: Ints,
        lengths: Ints,
    ) -> None:
        for row, slot, length, of in zip(
            rows.tolist(), slots.tolist(), lengths.tolist(), columns, strict=True
        ):
            scores, tokens = logits[row], token_table[slot, :length]
            # np.unique would do, and import numpy.ma for it: 2 MB.
            known = np.flatnonzero(np.bincount(tokens)[: len(scores)])
            old = scores[known]
            scores[known] = np.where(old > 0, old / of["repetition"], old * of["repetition"])
            counts = np.bincount(tokens[of["num_prompt_tokens"] :])[: len(scores)]
            ids = np.flatnonzero(counts)
            scores[ids] -= of["frequency"] * counts[ids].astype(np.float32)
            scores[ids] -= of["presence"]

    def choose(
        self,
        logits: Floats,
        columns: NDArray[np.void],
        indices: Ints,
        masks: TokenMasks | None = None,
    ) -> Choice:
        num_logprobs = columns["num_logprobs"].tolist()
        token_ids, peaks, logprobs = self._run(
            logits, columns, max(num_logprobs), indices=indices, masks=masks
        )
        if logprobs is not None and min(num_logprobs) < 0:
            rows = np.flatnonzero(columns["num_logprobs"] >= 0)
            logprobs = Logprobs(logprobs.chosen[rows], logprobs.top[rows], logprobs.top_ids[rows])
        return Choice(token_ids, peaks, logprobs)

    def logprobs(self, logits: Floats, token_ids: Ints, *, num_top: int) -> Logprobs:
        """engine.logprobs.Logprobs.of, of logits [rows, vocab] and token_ids [rows]."""
        columns = np.zeros(len(logits), dtype=SLOT_COLUMNS)
        columns["num_logprobs"] = num_top
        logprobs = self._run(logits, columns, num_top, given=np.ascontiguousarray(token_ids))[2]
        assert logprobs is not None
        return logprobs

    def _run(
        self,
        logits: Floats,
        columns: NDArray[Any],
        num_top: int,
        *,
        indices: Ints | None = None,
        given: Ints | None = None,
        masks: TokenMasks | None = None,
    ) -> tuple[Ints, Floats, Logprobs | None]:
        num_rows, vocab = logits.shape
        stride, step = (size // 4 for size in logits.strides)
        assert step == 1
        assert logits.dtype == np.float32
        max_top = min(max(num_top, 0), vocab)
        token_ids = np.empty(num_rows, dtype=np.int64)
        peaks = np.empty(num_rows, dtype=np.float32)
        logprobs = None
        if num_top >= 0:
            logprobs = Logprobs(
                chosen=np.empty(num_rows, dtype=np.float32),
                top=np.empty((num_rows, max_top), dtype=np.float32),
                top_ids=np.empty((num_rows, max_top), dtype=np.int64),
            )
        if indices is not None:
            indices = np.ascontiguousarray(indices)
        if masks is not None:
            assert masks.words.flags.c_contiguous
            mask_rows = np.full(num_rows, -1, dtype=np.int32)
            mask_rows[masks.rows] = np.arange(len(masks.rows))
        self._kernel(
            Call(
                logits=logits.ctypes.data,
                stride=stride,
                rows=num_rows,
                vocab=vocab,
                masks=None if masks is None else masks.words.ctypes.data,
                mask_rows=None if masks is None else mask_rows.ctypes.data,
                num_masks=0 if masks is None else len(masks.words),
                mask_words=0 if masks is None else masks.words.shape[1],
                parameters=columns.ctypes.data,
                parameter_bytes=columns.strides[0],
                indices=None if indices is None else indices.ctypes.data,
                given=None if given is None else given.ctypes.data,
                tokens=token_ids.ctypes.data,
                peaks=peaks.ctypes.data,
                logprobs=None if logprobs is None else logprobs.chosen.ctypes.data,
                top=None if logprobs is None else logprobs.top.ctypes.data,
                top_ids=None if logprobs is None else logprobs.top_ids.ctypes.data,
                max_top=max_top,
            )
        )
        return token_ids, peaks, logprobs


def chooser_alone(library: ctypes.CDLL, *, num_threads: int = 1) -> NativeChooser:
    """With its own threads in each call: for tests and measurement."""

    def kernel(call: Call) -> None:
        check(library.paceline_choose_alone(num_threads, ctypes.byref(call)))

    return NativeChooser(kernel)
