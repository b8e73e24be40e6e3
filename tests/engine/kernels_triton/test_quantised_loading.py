"""--gpu-quantize while loading: the device never holds the whole model in its first form.

Bytes are counted on torch's meta device, where a checkpoint is loaded as onto a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.cuda_engine import prepare
from engine.decoder import Decoder
from engine.gpu_linear import PRODUCTS, Float8Linear, TritonLinear
from engine.kernels.triton import gemm
from engine.loading import load_weights, open_model
from engine.parameters import parameter_shapes
from engine.weights import LoadOptions, load_decoder
from tests.gpu.counting import META, LiveBytes
from tests.gpu.shapes import MODELS
from tests.support.gpu_linears import convert_linears
from tests.support.models import save_tiny_model

CPU = torch.device("cpu")
CONFIG = replace(
    MODELS["tiny"],
    hidden_size=256,
    intermediate_size=512,
    num_layers=6,
    layer_windows=(None,) * 6,
)
FORMS = ["int8", "int4", "fp8"]


class Checkpoint:
    """Implements engine.weights.WeightSource: zeros in bfloat16."""

    description = "a checkpoint"

    def __init__(self) -> None:
        self._shapes = parameter_shapes(CONFIG)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def num_bytes(self, name: str) -> int:
        return self.read(name).nbytes

    def read(self, name: str) -> Tensor:
        return torch.zeros(self._shapes[name], dtype=torch.bfloat16)


def tensors_of(product: torch.nn.Module) -> list[Tensor]:
    if isinstance(product, TritonLinear):
        return product.weight_tensors
    assert isinstance(product, Float8Linear)
    return [product.weight, product.scale]


def product_bytes(decoder: Decoder) -> int:
    products = [getattr(layer, name) for layer in decoder.layers for name in PRODUCTS]
    return sum(tensor.nbytes for product in products for tensor in tensors_of(product))


@pytest.mark.parametrize("form", FORMS)
def test_one_layer_at_a_time_is_there_in_its_first_form(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An 8B model in int4 is loaded into 8 GB, not into the 16 that its checkpoint has."""
    monkeypatch.setattr(gemm, "PIECE", 1 << 15)  # as small beside a weight as it is for a real one
    prepared = prepare(CONFIG, torch.bfloat16, "cpu", quantise=form)
    checkpoint = Checkpoint()
    layer_bytes = sum(
        checkpoint.num_bytes(name) for name in checkpoint.names() if ".layers.0." in name
    )
    peaks = []
    for change in (prepared.change, None):
        with LiveBytes() as live:
            decoder, _ = load_decoder(
                CONFIG, checkpoint, LoadOptions(torch.bfloat16, META, 64, change)
            )
            if change is None:
                convert_linears(decoder, prepared.scheme, dtype=torch.bfloat16)
        peaks.append(live.peak)
    rest = sum(checkpoint.num_bytes(name) for name in checkpoint.names() if ".layers." not in name)
    small, large = peaks
    assert small < product_bytes(decoder) + rest + 2 * layer_bytes
    assert large > 6 * layer_bytes + rest
    assert small < 0.75 * large


@pytest.mark.parametrize("form", FORMS)
def test_every_bit_is_that_of_a_model_quantised_as_a_whole(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("llama-biases", tmp_path)
    files = open_model(tmp_path)
    options = {"dtype": torch.float32, "device": CPU}
    prepared = prepare(files.config, torch.float32, "cpu", quantise=form)
    whole = load_weights(files, **options).decoder
    convert_linears(whole, prepared.scheme, dtype=torch.float32)
    monkeypatch.setattr(gemm, "PIECE", 1000)  # no weight's rows are so few that this holds them
    layered = load_weights(files, **options, change=prepared.change).decoder
    for ours, expected in zip(layered.layers, whole.layers, strict=True):
        for name in PRODUCTS:
            one, other = getattr(ours, name), getattr(expected, name)
            assert torch.equal(one.bias, other.bias)
            pairs = zip(tensors_of(one), tensors_of(other), strict=True)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
