"""The CPU kernels' choice of tokens behind the sampler: whole rows chosen and scored in one call.

Owns the arrays of such a call. Must not know slots, penalties or models; the rules of a choice are
engine.draw's, and the kernels read its parameters where the sampler keeps them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Ints
from engine.kernels.cpu.library import Choice as Call
from engine.kernels.cpu.library import check
from engine.logprobs import Logprobs
from engine.sampler import SLOT_COLUMNS, Choice


class NativeChooser:
    """Implements engine.sampler.Chooser for logits on the CPU."""

    def __init__(self, kernel: Callable[[Call], None]) -> None:
        """`kernel` raises KernelError."""
        self._kernel = kernel

    def choose(self, logits: Tensor, columns: NDArray[np.void], indices: Ints) -> Choice:
        num_logprobs = columns["num_logprobs"].tolist()
        token_ids, peaks, logprobs = self._run(logits, columns, max(num_logprobs), indices=indices)
        if logprobs is not None and min(num_logprobs) < 0:
            rows = torch.from_numpy(np.flatnonzero(columns["num_logprobs"] >= 0))
            logprobs = Logprobs(logprobs.chosen[rows], logprobs.top[rows], logprobs.top_ids[rows])
        return Choice(token_ids, peaks, logprobs)

    def logprobs(self, logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
        """engine.logprobs.Logprobs.of, of logits [rows, vocab] and token_ids [rows]."""
        columns = np.zeros(len(logits), dtype=SLOT_COLUMNS)
        columns["num_logprobs"] = num_top
        logprobs = self._run(logits, columns, num_top, given=token_ids.contiguous())[2]
        assert logprobs is not None
        return logprobs

    def _run(
        self,
        logits: Tensor,
        columns: NDArray[Any],
        num_top: int,
        *,
        indices: Ints | None = None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Logprobs | None]:
        num_rows, vocab = logits.shape
        stride, step = logits.stride()
        assert step == 1
        assert logits.dtype is torch.float32
        max_top = min(max(num_top, 0), vocab)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        peaks = torch.empty(num_rows)
        logprobs = None
        if num_top >= 0:
            logprobs = Logprobs(
                chosen=torch.empty(num_rows),
                top=torch.empty((num_rows, max_top)),
                top_ids=torch.empty((num_rows, max_top), dtype=torch.int64),
            )
        self._kernel(
            Call(
                logits=logits.data_ptr(),
                stride=stride,
                rows=num_rows,
                vocab=vocab,
                parameters=columns.ctypes.data,
                parameter_bytes=columns.strides[0],
                indices=None if indices is None else np.ascontiguousarray(indices).ctypes.data,
                given=None if given is None else given.data_ptr(),
                tokens=token_ids.data_ptr(),
                peaks=peaks.data_ptr(),
                logprobs=None if logprobs is None else logprobs.chosen.data_ptr(),
                top=None if logprobs is None else logprobs.top.data_ptr(),
                top_ids=None if logprobs is None else logprobs.top_ids.data_ptr(),
                max_top=max_top,
            )
        )
        return token_ids, peaks, logprobs


def chooser_alone(library: ctypes.CDLL, *, num_threads: int = 1) -> NativeChooser:
    """With its own threads in each call: for tests and measurement."""

    def kernel(call: Call) -> None:
        check(library.paceline_choose_alone(num_threads, ctypes.byref(call)))

    return NativeChooser(kernel)
