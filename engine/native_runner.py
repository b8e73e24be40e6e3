"""The native CPU kernels as the ModelRunner of a TorchEngine.

Owns the loading of weights in the kernels' form and the arrays between torch and the kernels. It
must not know sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.gguf_file import open_gguf
from engine.loading import load_config
from engine.model_config import ModelConfig
from engine.native_cpu import Matrices, NativeModel, NativeOptions
from engine.native_sampling import NativeChooser
from engine.native_weights import GGUFMatrices, TensorMatrices
from engine.safetensors_files import SafetensorsWeights


@dataclass(frozen=True, slots=True)
class NativeFile:
    """Where a NativeModel's weights come from; `config` is what a TorchEngine asks of a model."""

    config: ModelConfig
    weights: Matrices


def open_native(path: Path, *, quantise: bool = False) -> NativeFile:
    """A Hugging Face directory or .gguf file; weights are read later. Raises ModelFileError.

    `quantise` rounds weights that are stored as floats to 8 bits.
    """
    config = load_config(path)
    if path.is_dir():
        return NativeFile(config, TensorMatrices(SafetensorsWeights(path), quantise=quantise))
    return NativeFile(config, GGUFMatrices(open_gguf(path), config, quantise=quantise))


def load_native(file: NativeFile, options: NativeOptions) -> NativeRunner:
    """Repacks the weights and allocates the KV pool. Raises KernelError, ModelFileError."""
    return NativeRunner(NativeModel(file.config, file.weights, options))


class NativeRunner:
    """Implements engine.torch_engine.ModelRunner."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.chooser = NativeChooser(model.choose)  # for the sampler; on the model's threads

    def kernel_seconds(self) -> dict[str, float]:
        """By phase of the kernels, since the last call."""
        return self._model.profile()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)

    def forward(self, batch: Batch) -> Tensor:
        """Stores the KV of all tokens; [tokens, hidden], valid until the next step."""
        hidden = self._model.forward(
            token_ids=batch.token_ids.numpy().astype(np.int32),
            positions=batch.positions.numpy().astype(np.int32),
            row_starts=batch.offsets.astype(np.int32),
            block_tables=batch.block_tables,
        )
        return torch.from_numpy(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab_size] float32, which the caller may overwrite.

        They are valid until the next call.
        """
        return torch.from_numpy(self._model.logits(hidden.numpy()))
