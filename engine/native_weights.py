"""Weights in the forms that the native CPU kernels read: GGUF blocks of 4 and 8 bits, or floats.

Owns the choice of form for each matrix and the conversions. Q4_0, Q4_1 and Q8_0 pass as they are,
Q4_K becomes Q4_1 (its sub-blocks of 32 have a scale and a minimum too), anything else in a file
with quantised matrices becomes Q8_0; a model of plain floats keeps its type. It must not know the
kernels' layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.gguf_file import GGMLType, GGUFFile
from engine.gguf_weights import GGUFWeights, huggingface_name, unpermute
from engine.model_config import GGUF_ARCHITECTURES, ModelConfig
from engine.parameters import parameter_shapes

if TYPE_CHECKING:
    from engine.weights import WeightSource

Bytes = NDArray[np.uint8]

_PACKED = {
    GGMLType.Q4_0: "Q4_0",
    GGMLType.Q4_1: "Q4_1",
    GGMLType.Q4_K: "Q4_1",
    GGMLType.Q8_0: "Q8_0",
}
_FLOAT = {GGMLType.F32: "F32", GGMLType.F16: "F16", GGMLType.BF16: "BF16"}
_TORCH_KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """`kind` is a key of library.KINDS; `rows` is [outputs, bytes of a row], C-contiguous."""

    kind: str
    rows: Bytes


class GGUFMatrices:
    """The matrices of a GGUF file under Hugging Face names.

    `quantise` rounds a file of plain floats to 8 bits; quantised ones stay as they are.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, *, quantise: bool = False):
        self._file = file
        self._config = config
        self._floats = GGUFWeights(file, config)
        self._stored = {huggingface_name(name): name for name in file.tensors}
        self.quantised = quantise or any(
            file.tensors[self._stored[name]].type not in _FLOAT
            for name, shape in parameter_shapes(config).items()
            if len(shape) == 2
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._floats.array(name))

    def kind(self, name: str) -> str:
        stored = self._file.tensors[self._stored[name]].type
        kinds = _PACKED if self.quantised else _FLOAT
        return kinds.get(stored, "Q8_0")

    def matrix(self, name: str) -> Matrix:
        stored = self._stored[name]
        kind = self.kind(name)
        if kind == "Q8_0" and self._file.tensors[stored].type is not GGMLType.Q8_0:
            return q8_0(self._floats.array(name))
        rows = self._file.data(stored)
        if self._file.tensors[stored].type is GGMLType.Q4_K:
            rows = q4_1_from_q4_k(rows)
        return Matrix(kind, self._ordered(name, rows))

    def _ordered(self, name: str, rows: Bytes) -> Bytes:
        """Rows of q and k as the rotation wants them: pairs of halves."""
        if GGUF_ARCHITECTURES[self._config.architecture].permuted_in_gguf:
            if ".self_attn.q_proj." in name:
                return unpermute(rows, self._config.num_heads)
            if ".self_attn.k_proj." in name:
                return unpermute(rows, self._config.num_kv_heads)
        return rows


class TensorMatrices:
    """The matrices of any other source, as they are or rounded to 8 bits; needs torch."""

    def __init__(self, source: WeightSource, *, quantise: bool):
        self._source = source
        self.quantised = quantise
        import torch

        kinds = {source.read(name).dtype for name in _matrix_names(source)}
        # one type a model: the kernels take any, but a step's activations are of one form
        self._dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        if str(self._dtype) not in _TORCH_KINDS:
            self._dtype = torch.float32

    def vector(self, name: str) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._source.read(name).float().numpy())

    def kind(self, name: str) -> str:
        """The same for every matrix."""
        del name
        return "Q8_0" if self.quantised else _TORCH_KINDS[str(self._dtype)]

    def matrix(self, name: str) -> Matrix:
        tensor = self._source.read(name)
        if self.quantised:
            return q8_0(tensor.float().numpy())
        import torch

        rows = tensor.to(self._dtype).contiguous().view(torch.uint8)
        return Matrix(self.kind(name), rows.numpy())


def _matrix_names(source: WeightSource) -> Iterator[str]:
    return (name for name in source.names() if len(source.shape(name)) == 2)


def q8_0(values: NDArray[np.float32]) -> Matrix:
    """Round a matrix [outputs, inputs] to 8 bits, a scale for each 32 values of a row."""
    import gguf

    return Matrix("Q8_0", gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0))


def q4_1_from_q4_k(rows: Bytes) -> Bytes:
    """Q4_K super-blocks as Q4_1 blocks: the same nibbles, scale and minimum rounded to half.

    A Q4_K block of 256 holds two half factors, eight 6-bit scales and minima, and 8 x 32 nibbles;
    w = d * scale * q - dmin * minimum. Source: ggml's block_q4_K.
    """
    blocks = rows.reshape(-1, 144)
    factors = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    packed = blocks[:, 4:16].astype(np.uint8)
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1)
    minima = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), axis=1)
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, 32)
    out: NDArray[Any] = np.empty((len(blocks), 8, 20), dtype=np.uint8)
    halves = np.stack((factors[:, :1] * scales, -factors[:, 1:] * minima), axis=2)
    out[:, :, :4] = halves.astype(np.float16).view(np.uint8)
    out[:, :, 4:] = values[:, :, :16] | values[:, :, 16:] << 4
    return out.reshape(rows.shape[0], -1)
