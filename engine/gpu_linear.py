"""Linears of the cuda path: batch-invariant, weight-only int8 and int4, float8; and their choice.

Each keeps engine.linear's rule that a row's result does not depend on its batch mates, except
where it says so. Must not know what the products are for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.decoder import Decoder, DecoderLayer
from engine.kernels.triton import gemm

FP8_MAX = 448.0  # of float8_e4m3fn


class TritonLinear(nn.Module):
    """y = x W^T + b by engine.kernels.triton.gemm; weight only quantised where it has few bits."""

    def __init__(self, weight: gemm.Weight, bias: Tensor | None, *, tile_rows: int | None) -> None:
        """`tile_rows` None: tiles as suit the batch, which may change a row's last bit."""
        super().__init__()
        self._weight, self._tile_rows = weight, tile_rows
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        return gemm.multiply(x.contiguous(), self._weight, self.bias, tile_rows=self._tile_rows)


class Float8Linear(nn.Module):
    """Weights and activations in float8_e4m3 with a scale a row of each, by torch's scaled product.

    Its library may choose another kernel for another number of rows, so it is not bitwise
    batch-invariant.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        self.register_buffer("weight", (weight.float() / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())  # [1, outputs]
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        narrow = (x.float() / scale).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(
            narrow, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16
        )
        out = out.to(x.dtype)
        return out if self.bias is None else out + self.bias


Make = Callable[[Tensor, Tensor | None], nn.Module]

# scheme -> how a linear is made from its weight [outputs, inputs] and bias
SCHEMES: dict[str, Make] = {
    "invariant": lambda weight, bias: TritonLinear(
        gemm.dense(weight), bias, tile_rows=gemm.FIXED_ROWS
    ),
    "int8": lambda weight, bias: TritonLinear(gemm.quantise_int8(weight), bias, tile_rows=None),
    "int4": lambda weight, bias: TritonLinear(gemm.quantise_int4(weight), bias, tile_rows=None),
    "int8-invariant": lambda weight, bias: TritonLinear(
        gemm.quantise_int8(weight), bias, tile_rows=gemm.FIXED_ROWS
    ),
    "int4-invariant": lambda weight, bias: TritonLinear(
        gemm.quantise_int4(weight), bias, tile_rows=gemm.FIXED_ROWS
    ),
    "float8": Float8Linear,
}


def convert_linears(decoder: Decoder, scheme: str, *, dtype: torch.dtype) -> None:
    """Replace the products of all layers, and of the head where that is exact.

    `dtype` is that of the activations, for linears whose weight is kept in another form. The head
    of a quantised model stays as it is: it decides the tokens.
    """
    make = SCHEMES[scheme]
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(layer, name, _converted(getattr(layer, name), make, dtype))
    if scheme.endswith("invariant"):
        exact = SCHEMES["invariant"]
        decoder.head = _converted(decoder.head, exact, dtype)


def _converted(linear: nn.Module, make: Make, dtype: torch.dtype) -> nn.Module:
    weight = linear.weight if hasattr(linear, "weight") else _unpacked(linear)
    return make(weight.to(dtype), linear.bias)


def _unpacked(linear: nn.Module) -> Tensor:
    """The weight of a linear that keeps it packed (the CPU's)."""
    return linear.packed.to_dense()
