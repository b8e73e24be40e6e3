"""A whole model on the CPU through the native kernels: one call a step.

Owns the native model (weights repacked, KV pool, workspaces) and turns arrays into the kernels'
arguments. It must not know scheduling, sampling or text. The arithmetic is in engine/kernels/cpu.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kernels.cpu import library
from engine.kernels.cpu.library import KernelError, check
from engine.model_config import ModelConfig
from engine.native_weights import Matrix
from engine.parameters import EMBEDDING, HEAD, NORM, parameter_shapes
from engine.rope_tables import rope_tables

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {
    "attention": "input_layernorm",
    "mlp": "post_attention_layernorm",
    "q": "self_attn.q_norm",
    "k": "self_attn.k_norm",
}


class Matrices(Protocol):
    """Weights by Hugging Face name; see engine/native_weights.py."""

    quantised: bool

    def kind(self, name: str) -> str: ...
    def vector(self, name: str) -> Floats: ...
    def matrix(self, name: str) -> Matrix: ...


@dataclass(frozen=True, slots=True)
class NativeOptions:
    num_blocks: int
    block_size: int  # a multiple of 16
    max_model_len: int
    max_step_tokens: int
    num_threads: int
    kv_type: str = "int8"  # of library.KV_KINDS
    tier: str | None = None  # instruction set; None: the best one here


def refusal(config: ModelConfig) -> str | None:
    """Why the native kernels cannot run this model, in a few words; None if they can."""
    missing = library.why_missing()
    if missing is not None:
        return missing
    group = config.num_heads // config.num_kv_heads
    for name, value in (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("head_dim", config.head_dim),
    ):
        if value % 32:
            return f"{name} {value} is no multiple of 32"
    if group > 16:
        return f"{group} query heads share a KV head (at most 16)"
    return None


class NativeModel:
    """The model in native memory. Not thread-safe: one step at a time."""

    def __init__(self, config: ModelConfig, weights: Matrices, options: NativeOptions):
        """Raises KernelError for a model that `refusal` names, or without memory."""
        reason = refusal(config)
        loaded = library.load_library(options.tier)
        if reason is not None or loaded is None:
            raise KernelError(reason)
        self.config, self.options = config, options
        self._library = loaded
        self._handle = self._create(weights)
        weakref.finalize(self, loaded.paceline_destroy, self._handle)
        self._load(weights)
        self._hidden = np.empty((0, config.hidden_size), dtype=np.float32)
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)

    def forward(
        self,
        *,
        token_ids: Ints,  # [tokens]
        positions: Ints,  # [tokens], ascending by one within a row
        row_starts: Ints,  # [rows + 1]; row i is tokens row_starts[i] .. row_starts[i + 1] - 1
        block_tables: Ints,  # [rows, blocks]
        outputs: Ints | None = None,  # [outputs] tokens, ascending; None: all
    ) -> Floats:
        """Run a step: write KV at `positions`, attend causally.

        Returns hidden states of the outputs after the final norm, [outputs, hidden], valid until
        the next step. A token that met a nan or an infinity has nans, no other has. Raises
        KernelError, with nothing computed, when an index is out of range, the step has too many
        tokens, or tokens and no output.
        """
        if outputs is None:
            outputs = np.arange(len(token_ids), dtype=np.int32)
        arrays = [
            np.ascontiguousarray(a, dtype=np.int32)
            for a in (token_ids, positions, row_starts, block_tables, outputs)
        ]
        num_outputs = len(outputs)
        if len(self._hidden) < num_outputs:
            self._hidden = np.empty((num_outputs, self.config.hidden_size), dtype=np.float32)
        batch = library.Batch(
            len(arrays[0]), len(arrays[2]) - 1, arrays[3].shape[1], num_outputs,
            *(a.ctypes.data for a in arrays),
        )  # fmt: skip
        hidden = self._hidden[:num_outputs]
        check(self._library.paceline_forward(self._handle, ctypes.byref(batch), hidden.ctypes.data))
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        """[rows, hidden] of a step -> [rows, vocab], valid until the next call.

        Raises KernelError for more rows than a step may have tokens.
        """
        hidden = np.ascontiguousarray(hidden, dtype=np.float32)
        if len(self._logits) < len(hidden):
            self._logits = np.empty((len(hidden), self.config.vocab_size), dtype=np.float32)
        logits = self._logits[: len(hidden)]
        check(
            self._library.paceline_logits(
                self._handle, hidden.ctypes.data, len(hidden), logits.ctypes.data
            )
        )
        return logits

    def choose(self, choice: library.Choice) -> None:
        """Choose and score tokens, see api.h."""
        check(self._library.paceline_choose(self._handle, ctypes.byref(choice)))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks, (source, target) each, in order."""
        array = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        check(self._library.paceline_copy_blocks(self._handle, array.ctypes.data, len(array)))

    def profile(self) -> dict[str, float]:
        """Seconds by kind of phase since the last call."""
        nanoseconds = (ctypes.c_uint64 * len(library.PHASES))()
        self._library.paceline_profile(self._handle, nanoseconds)
        return {name: n / 1e9 for name, n in zip(library.PHASES, nanoseconds, strict=True)}

    def _create(self, weights: Matrices) -> int:
        config, options = self.config, self.options
        cos, sin = (
            np.ascontiguousarray(table)
            for table in rope_tables(config.rope, config.head_dim, options.max_model_len)
        )
        packed = library.Config(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            max_positions=options.max_model_len,
            rotary_dim=config.head_dim,
            dense=not weights.quantised,
            kv_kind=library.KV_KINDS[options.kv_type],
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_tokens=options.max_step_tokens,
            num_threads=options.num_threads,
            norm_eps=config.rms_norm_eps,
            weight_bytes=self._weight_bytes(weights),
        )
        windows = np.array([w or 0 for w in config.layer_windows], dtype=np.int32)
        error = ctypes.c_int32()
        handle: int | None = self._library.paceline_create(
            ctypes.byref(packed), cos.ctypes.data, sin.ctypes.data, windows.ctypes.data,
            ctypes.byref(error),
        )  # fmt: skip
        check(error.value)
        assert handle is not None
        return handle

    def _weight_bytes(self, weights: Matrices) -> int:
        return sum(
            self._library.paceline_packed_bytes(library.KINDS[weights.kind(name)], *shape)
            for name, shape in parameter_shapes(self.config).items()
            if len(shape) == 2
        )

    def _load(self, weights: Matrices) -> None:
        tied = self.config.tie_word_embeddings
        self._set_linear(0, "head", EMBEDDING if tied else HEAD, weights)
        if not tied:
            self._set_linear(0, "embedding", EMBEDDING, weights)
        self._set_norm(0, "final", NORM, weights)
        shapes = parameter_shapes(self.config)
        for index in range(self.config.num_layers):
            prefix = f"model.layers.{index}."
            for which, name in _LINEARS.items():
                self._set_linear(index, which, f"{prefix}{name}.weight", weights)
            for which, name in _NORMS.items():
                if f"{prefix}{name}.weight" in shapes:
                    self._set_norm(index, which, f"{prefix}{name}.weight", weights)

    def _set_linear(self, layer: int, which: str, name: str, weights: Matrices) -> None:
        matrix = weights.matrix(name)
        outputs, inputs = parameter_shapes(self.config)[name]
        bias_name = name.removesuffix("weight") + "bias"
        has_bias = bias_name in parameter_shapes(self.config)
        bias = weights.vector(bias_name) if has_bias else None
        check(
            self._library.paceline_set_linear(
                self._handle, layer, library.LINEARS.index(which), library.KINDS[matrix.kind],
                outputs, inputs, matrix.rows.ctypes.data, matrix.rows.shape[1],
                None if bias is None else bias.ctypes.data,
            )
        )  # fmt: skip

    def _set_norm(self, layer: int, which: str, name: str, weights: Matrices) -> None:
        vector = weights.vector(name)
        check(
            self._library.paceline_set_norm(
                self._handle, layer, library.NORMS.index(which), vector.ctypes.data
            )
        )
