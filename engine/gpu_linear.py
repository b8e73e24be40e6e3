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
from engine.model_config import ModelConfig

FP8_MAX = 448.0  # of float8_e4m3fn
PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a layer


class TritonLinear(nn.Module):
    """y = x W^T + b by engine.kernels.triton.gemm; weight only quantised where it has few bits."""

    def __init__(self, weight: gemm.Weight, bias: Tensor | None, *, tile_rows: int | None) -> None:
        """`tile_rows` None: tiles as suit the batch, which may change a row's last bit."""
        super().__init__()
        self._weight, self._tile_rows = weight, tile_rows
        self.register_buffer("bias", bias)

    @property
    def weight_tensors(self) -> list[Tensor]:
        weight = self._weight
        return [part for part in (weight.data, weight.scale, weight.zero) if part is not None]

    def forward(self, x: Tensor) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        return gemm.multiply(x.contiguous(), self._weight, self.bias, tile_rows=self._tile_rows)


class Float8Linear(nn.Module):
    """Weights and activations in float8_e4m3 with a scale a row of each, by torch's scaled product.

    Its library may choose another kernel for another number of rows, so it is not bitwise
    batch-invariant.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scales = weight.new_empty((len(weight), 1), dtype=torch.float32)
        for rows in gemm.row_pieces(weight):
            exact = weight[rows].float()
            scales[rows] = exact.abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
            stored[rows] = (exact / scales[rows]).to(torch.float8_e4m3fn)
        self.register_buffer("weight", stored)
        self.register_buffer("scale", scales.t().contiguous())  # [1, outputs]
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        # Few launches: a decode has them for each product.
        peaks = torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True, dtype=torch.float32)
        scale = peaks.clamp_(min=1e-12) / FP8_MAX
        narrow = (x / scale).to(torch.float8_e4m3fn)  # the quotient is float32, as the scale is
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


def refusal(config: ModelConfig, scheme: str) -> str | None:
    """Why the products of a model can not be kept in this form, or None."""
    multiple = {"int4": 32, "int4-invariant": 32, "float8": 16}.get(scheme, 1)
    attention = config.num_heads * config.head_dim
    inputs = {config.hidden_size, attention, config.intermediate_size}
    outputs = {
        attention + 2 * config.num_kv_heads * config.head_dim,
        config.hidden_size,
        2 * config.intermediate_size,
    }
    sizes = inputs | outputs if scheme == "float8" else inputs
    wrong = sorted(size for size in sizes if size % multiple)
    if wrong:
        return f"the model has a product of width {wrong[0]}, which is no multiple of {multiple}"
    return None


def describe_weights(decoder: Decoder) -> str:
    """What the weights take, as printed at start: the products of the layers, and the rest."""
    layers = sum(
        sum(tensor.nbytes for tensor in _tensors(getattr(layer, name)))
        for layer in decoder.layers
        for name in PRODUCTS
    )
    # The head and the embedding may be one.
    everything = {
        tensor.data_ptr(): tensor.nbytes
        for module in decoder.modules()
        for tensor in _tensors(module)
    }
    rest = sum(everything.values()) - layers
    return (
        f"weights: {layers} bytes of products + {rest} of embedding, head, norms and tables "
        f"= {(layers + rest) / (1 << 30):.2f} GiB"
    )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Of the module itself, not of those in it."""
    found = list(module.buffers(recurse=False))
    if isinstance(module, TritonLinear):
        found += module.weight_tensors
    return found


def convert_layer(layer: DecoderLayer, scheme: str, *, dtype: torch.dtype) -> None:
    """Replace its products, one after the other.

    `dtype` is that of the activations, for linears whose weight is kept in another form.
    """
    for name in PRODUCTS:
        setattr(layer, name, _converted(getattr(layer, name), SCHEMES[scheme], dtype))


def convert_head(decoder: Decoder, scheme: str, *, dtype: torch.dtype) -> None:
    """Where that is exact. The head of a quantised model stays as it is: it decides the tokens."""
    if scheme.endswith("invariant"):
        exact = SCHEMES["invariant"]
        decoder.head = _converted(decoder.head, exact, dtype)


def _converted(linear: nn.Module, make: Make, dtype: torch.dtype) -> nn.Module:
    weight = linear.weight if hasattr(linear, "weight") else _unpacked(linear)
    return make(weight.to(dtype), linear.bias)


def _unpacked(linear: nn.Module) -> Tensor:
    """The weight of a linear that keeps it packed (the CPU's)."""
    return linear.packed.to_dense()
