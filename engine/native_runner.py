"""The native CPU kernels as the ModelRunner of a TorchEngine.

Owns the loading of weights in the kernels' form and the order of calls. The native step ends in
logits, so no hidden states exist here: `forward` returns tickets, one number a token, its index in
the batch, and `logits` answers for tickets. It must not know sampling or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch
from engine.gguf_file import open_gguf
from engine.loading import load_config
from engine.model_config import ModelConfig
from engine.native_cpu import Matrices, NativeModel, NativeOptions, NativeOutput
from engine.native_weights import GGUFMatrices, TensorMatrices
from engine.safetensors_files import SafetensorsWeights

Ints = NDArray[np.int32]


class StepModel(Protocol):
    """What is used of a NativeModel."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...

    def forward(
        self,
        *,
        token_ids: Ints,
        positions: Ints,
        row_starts: Ints,
        block_tables: Ints,
        sample_tokens: Ints,
    ) -> NativeOutput: ...


@dataclass(frozen=True, slots=True)
class NativeFile:
    """Where a NativeModel's weights come from; `config` is what a TorchEngine asks of a model."""

    config: ModelConfig
    weights: Matrices


def open_native(path: Path) -> NativeFile:
    """A Hugging Face directory or .gguf file; weights are read later. Raises ModelFileError."""
    config = load_config(path)
    if path.is_dir():
        return NativeFile(config, TensorMatrices(SafetensorsWeights(path), quantise=False))
    return NativeFile(config, GGUFMatrices(open_gguf(path), config))


def load_native(file: NativeFile, options: NativeOptions) -> NativeRunner:
    """Repacks the weights and allocates the KV pool. Raises KernelError, ModelFileError."""
    return NativeRunner(NativeModel(file.config, file.weights, options))


class NativeRunner:
    """Implements engine.torch_engine.ModelRunner."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._batch: Batch | None = None
        self._logits = torch.empty(0)  # of the tokens `_computed`, in that order
        self._computed: Ints | None = None

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)

    def forward(self, batch: Batch) -> Tensor:
        """Stores the KV of all tokens; tickets [tokens, 1] float64.

        The last token of each row gets its logits on the way: that is where sampling happens.
        """
        self._batch = batch
        self._run(batch.offsets[1:] - 1)
        return torch.arange(len(batch.token_ids), dtype=torch.float64).unsqueeze(1)

    def logits(self, tickets: Tensor) -> Tensor:
        """[rows, 1] -> [rows, vocab_size] float32, which the caller may overwrite.

        Tokens inside a row (prompt log-probabilities) cost the step again; it stores the same KV.
        """
        wanted = tickets.squeeze(1).numpy().astype(np.int32)
        if self._computed is None or not np.isin(wanted, self._computed).all():
            self._run(wanted)
        assert self._computed is not None
        if np.array_equal(wanted, self._computed):
            self._computed = None  # the caller's now
            return self._logits
        rows = np.searchsorted(self._computed, wanted)
        return self._logits[torch.from_numpy(rows)]

    def _run(self, sample_tokens: NDArray[np.integer]) -> None:
        batch = self._batch
        assert batch is not None
        # Positions of a row end at num_blocks * block_size; unused entries are never looked at.
        tables = np.where(batch.block_tables < 0, 0, batch.block_tables)
        output = self._model.forward(
            token_ids=batch.token_ids.numpy().astype(np.int32),
            positions=batch.positions.numpy().astype(np.int32),
            row_starts=batch.offsets.astype(np.int32),
            block_tables=tables.astype(np.int32),
            sample_tokens=sample_tokens.astype(np.int32),
        )
        self._logits = torch.from_numpy(output.logits)
        self._computed = sample_tokens.astype(np.int32)
