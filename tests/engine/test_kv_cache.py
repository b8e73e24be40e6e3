"""KV cache: the budget's arithmetic, writing and copying blocks."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_memory import (
    IntegerKV,
    _address_headroom,
    available_memory,
    blocks_for,
    describe,
    kv_bytes_per_token,
    useful_blocks,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64


SMALL = Shape(num_layers=2, num_kv_heads=2, head_dim=4)


def make_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(SMALL, num_blocks=6, block_size=4, dtype=dtype, device=CPU)


def test_bytes_per_token_is_the_stated_product() -> None:
    assert kv_bytes_per_token(Shape(), torch.float32) == 2 * 30 * 3 * 64 * 4
    assert kv_bytes_per_token(Shape(), torch.bfloat16) == 2 * 30 * 3 * 64 * 2


def test_blocks_and_the_spare_one_fit_the_budget_exactly() -> None:
    per_token = kv_bytes_per_token(SMALL, torch.float32)
    for budget in (2 * 4 * per_token, 1000 * per_token, 1000 * per_token + 1):
        num_blocks = blocks_for(budget, bytes_per_token=per_token, block_size=4)
        cache = KVCache(SMALL, num_blocks=num_blocks, block_size=4, dtype=torch.float32, device=CPU)
        assert cache.layers.nbytes <= budget < cache.layers.nbytes + 4 * per_token


def test_budget_below_one_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"100 bytes holds no block: 16 tokens x 50 bytes = 800"):
        blocks_for(100, bytes_per_token=50, block_size=16)


def test_useful_blocks_hold_every_running_sequence_at_full_length() -> None:
    assert useful_blocks(max_running=3, max_model_len=33, block_size=16) == 9


def test_description_states_formula_tokens_and_both_units() -> None:
    assert describe(Shape(), torch.float32, num_blocks=1000, block_size=16) == (
        "KV cache: 2 x 30 layers x 3 kv_heads x 64 head_dim x 4 bytes x 16000 tokens "
        "= 737280000 bytes = 0.69 GiB = 0.74 GB (1000 blocks of 16)"
    )


def test_scales_of_integers_count() -> None:
    """One float32 for 64 elements."""
    assert kv_bytes_per_token(Shape(), IntegerKV(2)) == 2 * 30 * 3 * (2 * 64 + 4)
    assert "x (64 head_dim x 2 bytes + 4 of scale) x 16 tokens = 380160 bytes" in describe(
        Shape(), IntegerKV(2), num_blocks=1, block_size=16
    )
    assert kv_bytes_per_token(Shape(), IntegerKV(1)) == 2 * 30 * 3 * (64 + 4)
    assert describe(Shape(), IntegerKV(1), num_blocks=2048, block_size=16) == (
        "KV cache: 2 x 30 layers x 3 kv_heads x (64 head_dim x 1 byte + 4 of scale) x 32768 tokens "
        "= 401080320 bytes = 0.37 GiB = 0.40 GB (2048 blocks of 16)"
    )


def test_available_memory_is_what_a_machine_may_have() -> None:
    assert 1 << 20 < available_memory("cpu") < 1 << 50


def test_a_limit_of_the_address_space_is_a_limit_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `ulimit -v` sets it: else the pool is sized for the machine and can not be had."""
    limit = 1 << 45
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    assert _address_headroom() < limit
    assert _address_headroom() > 0
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (4096, 4096))
    assert available_memory("cpu") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_tokens_are_gathered_from_scattered_blocks(dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    keys, values = torch.randn(2, 6, 2, 4).to(dtype)
    # Positions 0..5 of a sequence in blocks 5, 2.
    cache.write(1, torch.tensor([20, 21, 22, 23, 8, 9]), keys, values)
    got_keys, got_values = cache.gather(1, torch.tensor([[5, 2], [2, 5]]))
    assert torch.equal(got_keys[0, :6], keys.float())
    assert torch.equal(got_values[1, 4:], values[:4].float())
    assert cache.layers[0].count_nonzero() == 0


def test_what_can_not_be_multiplied_by_zero_is_not_stored() -> None:
    cache = make_cache(torch.float16)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e6]).expand(1, 2, 4)
    cache.write(0, torch.tensor([0]), bad, bad)
    assert cache.layers.count_nonzero() == 0


def test_copies_take_every_layer_in_order() -> None:
    cache = make_cache()
    cache.layers[:, :, :6] = torch.randn(cache.layers[:, :, :6].shape)
    before = cache.layers.clone()
    cache.copy_blocks([(0, 3), (3, 4), (1, 0)])
    for target, source in ((3, 0), (4, 0), (0, 1), (1, 1), (2, 2), (5, 5)):
        assert torch.equal(cache.layers[:, :, target], before[:, :, source])
    assert cache.layers[:, :, cache.spare_block].count_nonzero() == 0
