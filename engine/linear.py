"""Matrix products with weights: one module for each way to store and multiply them.

A row's result must depend neither on how many rows there are nor on the row's place, since batch
mates change from step to step. It must not know what the products are for.

On the CPU in float32, torch's plain product (MKL) breaks that rule: it picks kernels by the number
of rows. oneDNN with weights packed once keeps it, bit for bit, with one exception: a lone row of
a long input takes a path of its own. So a lone row is computed as two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The number of rows that the packing is made for; any from 8 up gives the same bits and speed.
_PACKED_FOR_ROWS = 32


class Linear(nn.Module):
    """y = x W^T + b as torch does it; weight [outputs, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        return nn.functional.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """Float32 on the CPU, the weight in oneDNN's blocked layout; bitwise the same for any batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self._product(x.expand(2, -1).contiguous())[:1]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class RowLinear(nn.Module):
    """Where there is no oneDNN: one product a row, each from aligned memory. Slow, but it holds."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0], self.weight.shape[0])
        for place, row in enumerate(x):
            result[place] = nn.functional.linear(row.clone(), self.weight, self.bias)
        return result


def make_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """The module that suits the weight's device and dtype."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return Linear(weight, bias)
    if torch.backends.mkldnn.is_available():
        return PackedLinear(weight, bias)
    return RowLinear(weight, bias)
