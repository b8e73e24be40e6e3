"""--gpu-quantize and --kv-dtype fp8: what the server builds gives the tokens of a twin in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.cuda_engine import prepare
from engine.decoder import Decoder
from engine.errors import ModelFileError
from engine.gpu_linear import PRODUCTS, Float8Linear, TritonLinear, describe_weights
from engine.kernels.triton.gemm import dequantise, quantise_int4, quantise_int8
from engine.kv_cache import KVCache
from engine.kv_scales import MARGIN, calibrated_scales
from engine.linear import make_linear
from engine.loading import LoadedModel, open_model
from engine.torch_engine import TorchEngine, TorchRunner
from scheduler.types import KVCapacity, Request
from server.config import DEFAULT_LIMITS, EngineConfig
from server.core_build import Built, _build_cuda, _choose_kernels
from server.wire import Start
from tests.engine.test_attention import Shape
from tests.engine.test_torch_engine import GREEDY, load_tiny, random_prompt, serve

CPU = torch.device("cpu")
QUANTISERS = {"int8": quantise_int8, "int4": quantise_int4}


class Float8Twin(nn.Module):
    """Float8Linear in float32: rounded operands, one exact product, the result in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.linear = Float8Linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448.0
        narrow = (x / scale).to(torch.float8_e4m3fn).float()
        out = narrow @ self.linear.weight.float().t() * scale * self.linear.scale
        out = out.to(torch.bfloat16).float()
        return out if self.linear.bias is None else out + self.linear.bias


def replace_products(decoder: Decoder, form: str) -> None:
    for layer in decoder.layers:
        for name in PRODUCTS:
            old = getattr(layer, name)
            weight = old.packed.to_dense()
            if form == "fp8":
                new = Float8Twin(weight, old.bias)
            else:
                new = make_linear(dequantise(QUANTISERS[form](weight)), old.bias)
            setattr(layer, name, new)


def build(model: LoadedModel, path: Path, **flags: object) -> Built:
    """What `paceline serve` builds on cuda, on the interpreter's CPU."""
    config = EngineConfig(model=str(path), kv_memory=1 << 20, max_model_len=64, **flags)
    limits = replace(DEFAULT_LIMITS, max_running=3, max_step_tokens=32)
    start = Start(config, limits, model.config.vocab_size)
    return _build_cuda(start, open_model(path), "cpu", lambda *_: None)


def twin(model: LoadedModel, form: str, kv_dtype: str) -> TorchEngine:
    if form != "none":
        replace_products(model.decoder, form)
    dtype, scales = torch.float32, None
    if kv_dtype == "fp8":
        dtype, scales = torch.float8_e4m3fn, calibrated_scales(model.decoder)
    capacity = KVCapacity(64, 16, 3, 64)
    runner = TorchRunner(
        model.decoder, num_blocks=64, block_size=16, dtype=dtype, device=CPU, kv_scales=scales
    )
    return TorchEngine(model, device=CPU, dtype=dtype, capacity=capacity, runner=runner)


@pytest.mark.parametrize(
    ("form", "kv_dtype", "deterministic"),
    [
        ("int8", "auto", False),
        ("int4", "auto", True),
        ("fp8", "auto", False),
        ("none", "fp8", False),
        ("int4", "fp8", False),
    ],
)
def test_each_form_gives_the_tokens_of_its_twin(
    form: str,
    kv_dtype: str,
    *,
    deterministic: bool,
    tmp_path: Path,
) -> None:
    """Few tokens: the interpreter's cast to float8 loses a carry (7.96 becomes 4, on a GPU 8), a
    fault in one number of fifty that shows in time.
    """
    model = load_tiny("llama", tmp_path, num_hidden_layers=1)
    built = build(
        model, tmp_path, gpu_quantize=form, kv_dtype=kv_dtype, deterministic=deterministic
    )
    work = [
        Request("a", random_prompt(21, 1), 4, sampling=GREEDY),
        Request("b", random_prompt(3, 2), 4, sampling=GREEDY),
    ]
    served = serve(built.engine, work, depth=1, max_step_tokens=16)
    assert served.token_ids == serve(twin(model, form, kv_dtype), work).token_ids
    product = built.engine._runner._decoder.layers[0].qkv
    cache = built.engine._runner._cache.layers
    if form in QUANTISERS:
        assert isinstance(product, TritonLinear)
        assert product._weight.bits == int(form[-1])
        assert form in built.weights
    elif form == "fp8":
        assert product.weight.dtype is torch.float8_e4m3fn
    assert cache.dtype is (torch.float8_e4m3fn if kv_dtype == "fp8" else torch.float32)


def test_the_cache_twin_rounds_to_the_nearest_and_knows_the_range() -> None:
    """Powers of two between, so that the scale itself rounds nothing; a broken number is 0."""
    scales = torch.tensor([[[0.5], [4.0]]])
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=16)
    cache = KVCache(
        shape, num_blocks=1, block_size=4, dtype=torch.float8_e4m3fn, device=CPU, scales=scales
    )
    numbers = torch.tensor([7.96, -0.26, 1e6, -torch.inf, torch.nan, 0.0, 3.0, -1e-9])
    states = numbers.repeat(2)[None, None].expand(2, 1, 16)
    cache.write(0, torch.tensor([2, 1]), states, states)
    keys, values = cache.gather(0, torch.tensor([[0]]))
    expected = torch.tensor([8.0, -0.25, 224.0, 0, 0, 0, 3.0, 0])
    torch.testing.assert_close(keys[0, 1, 0, :8], expected, rtol=0.04, atol=1e-3)
    torch.testing.assert_close(
        values[0, 2, 0, :8],
        expected.clamp(max=0) + torch.tensor([8.0, 0, 1792.0, 0, 0, 0, 3.0, 0]),
        rtol=0.04,
        atol=1e-2,
    )


def test_memory_formulas_count_the_smaller_forms(tmp_path: Path) -> None:
    """Half the bytes of a 16-bit KV, so twice the blocks; products by their own bytes."""
    model = load_tiny("llama", tmp_path, num_hidden_layers=1)
    plain = build(model, tmp_path, dtype="bfloat16")
    small = build(model, tmp_path, dtype="bfloat16", gpu_quantize="int8", kv_dtype="fp8")
    blocks = plain.engine.capacity.num_blocks, small.engine.capacity.num_blocks
    assert blocks[1] + 1 == 2 * (blocks[0] + 1)
    assert "x 1 byte x" in small.notes[1]
    layer = model.decoder.layers[0]
    numbers = sum(getattr(layer, name).packed.to_dense().numel() for name in PRODUCTS)
    scales = sum(getattr(layer, name).packed.to_dense().shape[0] for name in PRODUCTS)
    assert f"weights: {2 * numbers} bytes of products" in plain.notes[0]
    assert f"weights: {numbers + 4 * scales} bytes of products" in small.notes[0]
    assert describe_weights(small.engine._runner._decoder) == small.notes[0]


def test_scales_leave_room_above_what_was_seen(tmp_path: Path) -> None:
    """Each head has its own, and they are the same ones every time."""
    model = load_tiny("llama", tmp_path, num_hidden_layers=2)
    scales = calibrated_scales(model.decoder)
    assert torch.equal(scales, calibrated_scales(model.decoder))
    assert scales.shape == (2, 2, model.config.num_kv_heads)
    assert len(scales.unique()) == scales.numel()
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.attention_norm.weight *= 2
    # The norm's weight comes before the products: keys and values of the first layer double.
    doubled = calibrated_scales(model.decoder)
    torch.testing.assert_close(doubled[0], 2 * scales[0])
    assert MARGIN >= 2


WRONG = {
    "float8 in any batch": ({"quantise": "fp8", "deterministic": True}, "depend on the batch"),
    "int4 of an odd width": ({"quantise": "int4"}, "width 72, which is no multiple of 32"),
    "float8 of an odd width": ({"quantise": "fp8"}, "width 72, which is no multiple of 16"),
}


@pytest.mark.parametrize(("options", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_can_not_be_is_refused_in_one_line(
    options: dict[str, object], words: str, tmp_path: Path
) -> None:
    config = load_tiny("llama", tmp_path, num_hidden_layers=1).config
    config = replace(config, intermediate_size=72) if "72" in words else config
    with pytest.raises(ValueError, match=words) as caught:
        prepare(config, torch.bfloat16, "cpu", **options)
    assert "\n" not in str(caught.value)
    assert "--gpu-quantize" in str(caught.value)


@pytest.mark.parametrize("flags", [{"gpu_quantize": "int4"}, {"kv_dtype": "fp8"}])
def test_without_a_gpu_the_flags_are_refused(flags: dict[str, str], tmp_path: Path) -> None:
    config = load_tiny("llama", tmp_path, num_hidden_layers=1).config
    with pytest.raises(ModelFileError, match="needs a CUDA device"):
        _choose_kernels(EngineConfig(**flags), "cpu", config)
