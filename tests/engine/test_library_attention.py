"""Attention by a library: what it is called with, by a stand-in that does what theirs documents."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.attention.library import LibraryAttention, flash3
from tests.engine.test_attention import Pool, Shape, dense, random_sequence


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    offsets: Tensor,
    key_lengths: Tensor,
    block_table: Tensor,
    left: int,
) -> Tensor:
    """Causal from the end of each sequence; `left`: keys seen before a query's own, -1 for all."""
    parts = []
    for row, length in enumerate(key_lengths.tolist()):
        queries = q[offsets[row] : offsets[row + 1]]
        of_row = [pool[block_table[row].long()].flatten(0, 1)[:length] for pool in (keys, values)]
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in of_row)
        query = torch.arange(length - len(queries), length)[:, None]
        key = torch.arange(length)
        hidden = key > query
        if left >= 0:
            hidden |= key < query - left
        scores = torch.einsum("qhd,khd->hqk", queries, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)


def fake_flash3(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: object) -> Tensor:
    assert options["causal"] is True
    assert options["num_splits"] == 1
    assert options["page_table"].dtype is options["cache_seqlens"].dtype is torch.int32
    assert q.is_contiguous()
    assert k_cache.shape[1:] == (v_cache.shape[1], v_cache.shape[2], q.shape[2])
    assert options["max_seqlen_q"] == options["cu_seqlens_q"].diff().max()
    return paged_attention(
        q,
        k_cache,
        v_cache,
        offsets=options["cu_seqlens_q"],
        key_lengths=options["cache_seqlens"],
        block_table=options["page_table"],
        left=options["window_size"][0],
    )


@pytest.mark.parametrize("window", [None, 9])
def test_the_library_is_told_what_dense_attention_computes(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, a first chunk and a later one, in blocks dealt out at random."""
    package = ModuleType("flash_attn_interface")
    package.flash_attn_with_kvcache = fake_flash3
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    pool = Pool(Shape(), window=window)
    pool.cache.layers[:, :, : pool.cache.num_blocks] = 0
    pool.attention = LibraryAttention(pool.cache, windows=(window,), library=flash3)
    sequences = [random_sequence(Shape(), length, length) for length in (40, 17, 33)]
    first = pool.step(
        [(0, sequences[0], 0, 39), (1, sequences[1], 0, 17), (2, sequences[2], 0, 12)]
    )
    second = pool.step([(2, sequences[2], 12, 33), (0, sequences[0], 39, 40)])
    expected = [dense(sequence, window).float() for sequence in sequences]
    torch.testing.assert_close(first[1], expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second[0], expected[2][12:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second[1], expected[0][39:], rtol=1e-5, atol=1e-5)
