"""Norms, SiLU, rotation and KV store in the interpreter, each against its twin in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.decoder import RMSNorm
from engine.decoder import gated_silu as gated_silu_twin
from engine.kernels.triton.norms import add_rms_norm, gated_silu, rms_norm
from engine.kernels.triton.rotary import rotate_and_store
from engine.kv_cache import KVCache
from engine.model_config import RopeConfig
from engine.rope import apply_rope, rope_tables
from tests.engine.test_attention import Shape

CPU = torch.device("cpu")
# Widths that are and are not powers of two; one row, several, none.
SIZES = [(1, 64), (3, 576), (5, 100), (0, 64)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-3 if actual.dtype is torch.float16 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_with_and_without_residual(rows: int, width: int, dtype: torch.dtype) -> None:
    hidden, delta = normal(rows, width, dtype=dtype), normal(rows, width, seed=1, dtype=dtype)
    twin = RMSNorm(normal(width, seed=2, dtype=dtype), 1e-5)
    assert_close(rms_norm(hidden, twin.weight, twin.eps), twin(hidden))
    total, normed = add_rms_norm(hidden, delta, twin.weight, twin.eps)
    assert torch.equal(total, hidden + delta)
    assert_close(normed, twin(hidden + delta))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1500), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_silu(rows: int, width: int, dtype: torch.dtype) -> None:
    x = normal(rows, 2 * width, dtype=dtype) * 3
    assert_close(gated_silu(x), gated_silu_twin(x.clone()))


def rotate_with_twins(
    qkv: Tensor, shape: Shape, norms: tuple[RMSNorm, RMSNorm] | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    cos, sin = rope_tables(RopeConfig(), shape.head_dim, 64)
    cos, sin = cos[positions], sin[positions]
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def rotate(
    qkv: Tensor,
    shape: Shape,
    norms: tuple[RMSNorm, RMSNorm] | None,
    positions: Tensor,
    kv_slots: Tensor,
    cache: Tensor,
    **options: object,
) -> Tensor:
    q_out = torch.full((len(qkv), shape.num_heads, shape.head_dim), torch.nan, dtype=qkv.dtype)
    rotate_and_store(
        qkv,
        norms=norms and (norms[0].weight, norms[1].weight, norms[0].eps),
        tables=rope_tables(RopeConfig(), shape.head_dim, 64),
        positions=positions,
        kv_slots=kv_slots,
        q_out=q_out,
        keys=cache[0],
        values=cache[1],
        **options,
    )
    return q_out


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, heads, kv_heads, dim)
        for heads, kv_heads, dim in [(6, 2, 16), (5, 1, 24), (2, 2, 80), (8, 1, 64)]
    ],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_store(shape: Shape, has_norms: bool) -> None:
    tokens = 3
    qkv = normal(tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    norms = None
    if has_norms:
        norms = tuple(RMSNorm(normal(shape.head_dim, seed=s), 1e-5) for s in (3, 4))
    positions, kv_slots = torch.tensor([0, 63, 7]), torch.tensor([9, 30, 0])
    cache = KVCache(shape, num_blocks=4, block_size=8, dtype=torch.float32, device=CPU)
    expected = KVCache(shape, num_blocks=4, block_size=8, dtype=torch.float32, device=CPU)
    q, k, v = rotate_with_twins(qkv, shape, norms, positions)
    expected.write(0, kv_slots, k, v)
    assert_close(rotate(qkv, shape, norms, positions, kv_slots, cache.layers[0]), q)
    assert_close(cache.layers, expected.layers)


def test_padding_tokens_are_stored_nowhere_and_broken_numbers_as_zero() -> None:
    shape = Shape(1, 2, 1, 16)
    qkv = normal(3, 4 * 16)
    qkv[1, 2 * 16 : 3 * 16] = torch.nan
    qkv[1, 3 * 16 :] = 1e30
    cache = torch.full((2, 1, 8, 1, 16), 7.0)
    rotate(qkv, shape, None, torch.tensor([1, 2, 3]), torch.tensor([-1, 5, -1]), cache)
    assert (cache[:, 0, 5] == 0).all()
    cache[:, 0, 5] = 7
    assert (cache == 7).all()


def test_an_fp8_cache_holds_the_values_over_their_scales() -> None:
    """Numbers that float8 has exactly, since the interpreter rounds to float8 unlike torch."""
    shape = Shape(1, 2, 2, 16)
    qkv = (normal(1, 6 * 16) * 8).round().clamp(-15, 15)
    scales = (torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1e-4]))
    cache = torch.zeros((2, 1, 4, 2, 16), dtype=torch.float8_e4m3fn)
    rotate(qkv, shape, None, torch.tensor([0]), torch.tensor([2]), cache, scales=scales)
    _, k, v = rotate_with_twins(qkv, shape, None, torch.tensor([0]))
    for stored, exact, scale in zip(cache[:, 0, 2].float(), (k[0], v[0]), scales, strict=True):
        assert torch.equal(stored, (exact / scale[:, None]).clamp(-448, 448))
