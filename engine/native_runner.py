"""The native CPU kernels as an engine: the runner of their model, and their sampling.

Owns the loading of weights in the kernels' form. It must not know scheduling, nor torch, which only
weights in safetensors files need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Ints
from engine.batch import Batch
from engine.gguf_weights import GGUFWeights
from engine.grammar import GrammarCompiler
from engine.loading import ModelFiles
from engine.model_config import ModelConfig
from engine.native_cpu import Matrices, NativeModel, NativeOptions
from engine.native_sampling import NativeChooser
from engine.native_weights import GGUFMatrices, TensorMatrices
from engine.parameters import check_names
from engine.step_engine import StepEngine
from scheduler.types import KVCapacity

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NativeFile:
    """Where a NativeModel's weights come from. `warnings` are lines for the operator."""

    config: ModelConfig
    weights: Matrices
    warnings: tuple[str, ...] = ()


def native_file(files: ModelFiles, *, quantise: bool = False) -> NativeFile:
    """The weights of open files, to be read later. Raises ModelFileError.

    `quantise` rounds those that are stored as floats to 8 bits.
    """
    config = files.config
    if files.gguf is None:
        from engine.safetensors_files import SafetensorsWeights

        source = SafetensorsWeights(files.path)
        warnings = tuple(check_names(config, source))
        return NativeFile(config, TensorMatrices(source, quantise=quantise), warnings)
    warnings = tuple(check_names(config, GGUFWeights(files.gguf, config)))
    return NativeFile(config, GGUFMatrices(files.gguf, config, quantise=quantise), warnings)


def load_native(file: NativeFile, options: NativeOptions) -> NativeRunner:
    """Repacks the weights and allocates the KV pool. Raises KernelError, ModelFileError."""
    return NativeRunner(NativeModel(file.config, file.weights, options))


def native_engine(
    runner: NativeRunner,
    *,
    capacity: KVCapacity,
    vocab_limit: int | None = None,
    grammars: GrammarCompiler | None = None,
) -> StepEngine:
    """`capacity` is that of the runner's options; the rest as in StepEngine."""
    return StepEngine(
        runner,
        runner.chooser,
        vocab_size=runner.config.vocab_size,
        device=None,
        capacity=capacity,
        vocab_limit=vocab_limit,
        grammars=grammars,
    )


class NativeRunner:
    """Implements engine.step_engine.ModelRunner on host arrays."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.config = model.config
        self.chooser = NativeChooser(model.choose)  # for the sampler; on the model's threads

    def kernel_seconds(self) -> dict[str, float]:
        """By phase of the kernels, since the last call."""
        return self._model.profile()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)

    def forward(self, batch: Batch, outputs: Ints) -> Floats:
        """Stores the KV of all tokens; [outputs, hidden], valid until the next step."""
        return self._model.forward(
            token_ids=batch.token_ids.astype(np.int32),
            positions=batch.positions.astype(np.int32),
            row_starts=batch.offsets.astype(np.int32),
            block_tables=batch.block_tables,
            outputs=outputs.astype(np.int32),
        )

    def logits(self, hidden: Floats) -> Floats:
        """[rows, hidden] -> [rows, vocab_size] float32, which the caller may overwrite.

        They are valid until the next call.
        """
        return self._model.logits(hidden)
