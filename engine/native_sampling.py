"""The CPU kernels' choice of tokens behind the sampler: whole rows chosen and scored in one call.

Owns the parameters in the kernels' form and the arrays for their answers. Must not know slots,
penalties or models; the rules of a choice are engine.draw's.
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
from engine.kernels.cpu.library import Chosen, LogitsView, check
from engine.logprobs import Logprobs
from engine.sampler import Choice

# paceline_choice of api.h
CHOICE = np.dtype(
    [
        ("seed", np.int64),
        ("index", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("num_top", np.int32),
        ("token", np.int32),
    ],
    align=True,
)
# (logits, address of the choices, where the answers go); raises KernelError
Kernel = Callable[[LogitsView, int, Chosen], None]


class NativeChooser:
    """Implements engine.sampler.Chooser. Logits are on the CPU, the steps between rows free."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def choose(self, logits: Tensor, columns: NDArray[np.void], indices: Ints) -> Choice:
        choices = np.empty(len(columns), dtype=CHOICE)
        for name in ("seed", "top_k", "top_p", "min_p"):
            choices[name] = columns[name]
        choices["index"] = indices
        choices["temperature"] = np.where(columns["greedy"], 0, columns["temperature"])
        choices["num_top"] = np.minimum(columns["num_logprobs"], logits.shape[1])
        choices["token"] = -1
        token_ids, peaks, logprobs = self._run(logits, choices)
        rows = np.flatnonzero(choices["num_top"] >= 0)
        if not len(rows):
            return Choice(token_ids, peaks, None)
        if len(rows) < len(choices):
            of_rows = torch.from_numpy(rows)
            logprobs = Logprobs(
                logprobs.chosen[of_rows], logprobs.top[of_rows], logprobs.top_ids[of_rows]
            )
        return Choice(token_ids, peaks, logprobs)

    def logprobs(self, logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
        """engine.logprobs.Logprobs.of, of logits [rows, vocab] and token_ids [rows]."""
        choices = np.zeros(len(logits), dtype=CHOICE)
        choices["num_top"] = min(num_top, logits.shape[1])
        choices["token"] = token_ids.numpy()
        return self._run(logits, choices)[2]

    def _run(self, logits: Tensor, choices: NDArray[Any]) -> tuple[Tensor, Tensor, Logprobs]:
        assert logits.dtype is torch.float32
        assert logits.stride(1) == 1
        num_rows, max_top = len(choices), max(int(choices["num_top"].max(initial=0)), 0)
        token_ids = np.empty(num_rows, dtype=np.int64)
        peaks = np.empty(num_rows, dtype=np.float32)
        chosen = np.empty(num_rows, dtype=np.float32)
        top = np.empty((num_rows, max_top), dtype=np.float32)
        top_ids = np.empty((num_rows, max_top), dtype=np.int64)
        view = LogitsView(logits.data_ptr(), logits.stride(0), num_rows, logits.shape[1])
        addresses = (array.ctypes.data for array in (token_ids, peaks, chosen, top, top_ids))
        self._kernel(view, choices.ctypes.data, Chosen(*addresses, max_top))
        return (
            torch.from_numpy(token_ids),
            torch.from_numpy(peaks),
            Logprobs(*map(torch.from_numpy, (chosen, top, top_ids))),
        )


def chooser_alone(library: ctypes.CDLL, *, num_threads: int = 1) -> NativeChooser:
    """With its own threads in each call: for tests and measurement."""

    def kernel(view: LogitsView, choices: int, chosen: Chosen) -> None:
        check(
            library.paceline_choose_alone(
                num_threads, ctypes.byref(view), choices, ctypes.byref(chosen)
            )
        )

    return NativeChooser(kernel)
