"""The kernels on bfloat16, which is what a GPU runs, against float32 of the same numbers.

The interpreter keeps bfloat16 as its 16 bits: what reads them without a widening computes nonsense.
And its narrowing cuts bits off where a GPU rounds: one may be off by a unit in the last place, and
results are held to as many units as there are narrowings on the way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.triton import TritonAttention
from engine.batch import Batch
from engine.cuda_engine import TritonSampling
from engine.cuda_runner import CudaRunner
from engine.decoder import RMSNorm
from engine.decoder import gated_silu as gated_silu_twin
from engine.kernels.triton import gemm
from engine.kernels.triton.norms import add_rms_norm, gated_silu, rms_norm
from engine.kv_cache import KVCache
from engine.loading import load_weights, open_model
from engine.torch_engine import TorchEngine
from scheduler.types import KVCapacity, Request, SamplingParams
from tests.engine.kernels_triton.test_elementwise import rotate, rotate_with_twins
from tests.engine.test_attention import Shape, dense, random_sequence
from tests.engine.test_torch_engine import expected_prompt_logprobs, random_prompt, serve
from tests.support.models import save_tiny_model

CPU = torch.device("cpu")
BF16 = torch.bfloat16
UNIT = 2.0**-7  # of a number's last place, over the number


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_within(actual: Tensor, expected: Tensor, units: float, *, size: float = 0.0) -> None:
    """`size`: of the numbers that were rounded before they cancelled each other."""
    assert actual.dtype is BF16
    error = (actual.float() - expected).abs()
    assert (error <= units * UNIT * expected.abs().clamp(min=size)).all(), float(error.max())


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (4, 100)])
def test_norm_with_and_without_residual(rows: int, width: int) -> None:
    hidden, delta = normal(rows, width), normal(rows, width, seed=1)
    weight = normal(width, seed=2)
    twin = RMSNorm(weight.float(), 1e-5)
    assert_within(rms_norm(hidden, weight, 1e-5), twin(hidden.float()), 2)
    total, normed = add_rms_norm(hidden, delta, weight, 1e-5)
    assert_within(total, hidden.float() + delta.float(), 1)
    assert_within(normed, twin(total.float()), 2)


def test_gated_silu() -> None:
    x = normal(3, 2 * 1500) * 3
    assert_within(gated_silu(x), gated_silu_twin(x.float()), 1, size=1e-6)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (5, 1, 24), (2, 2, 80)])
def test_rotation_and_store(heads: int, kv_heads: int, dim: int, *, has_norms: bool) -> None:
    shape = Shape(1, heads, kv_heads, dim)
    qkv = normal(3, (heads + 2 * kv_heads) * dim)
    norms = narrow = None
    if has_norms:
        weights = [normal(dim, seed=seed) for seed in (3, 4)]
        norms = tuple(RMSNorm(weight.float(), 1e-5) for weight in weights)
        narrow = tuple(RMSNorm(weight, 1e-5) for weight in weights)
    positions, kv_slots = torch.tensor([0, 63, 7]), torch.tensor([9, 30, 0])
    cache = KVCache(shape, num_blocks=4, block_size=8, dtype=BF16, device=CPU)
    q, k, v = rotate_with_twins(qkv.float(), shape, norms, positions)
    units, size = (4, 4.0) if has_norms else (1, 0.0)
    q_out = rotate(qkv, shape, narrow, positions, kv_slots, cache.layers[0])
    assert_within(q_out, q, units, size=size)
    keys, values = cache.layers[0].flatten(1, 2)
    assert_within(keys[kv_slots], k, units, size=size)
    assert torch.equal(values[kv_slots].float(), v), "values are moved, not changed"
    others = torch.ones(len(keys), dtype=torch.bool)
    others[kv_slots] = False
    assert (keys[others] == 0).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(4, 2, 64, None), (6, 1, 80, 70)])
def test_attention(
    heads: int, kv_heads: int, dim: int, window: int | None, *, deterministic: bool
) -> None:
    """A decode over two splits, a short row and a prefill, from one cache."""
    shape = Shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    cache = KVCache(shape, num_blocks=24, block_size=16, dtype=BF16, device=CPU)
    spans = [(149, 150), (20, 22), (0, 40)]
    tables = np.full((3, 10), -1, dtype=np.int32)
    sequences, first = [], 0
    for row, (_, end) in enumerate(spans):
        sequence = random_sequence(shape, end, row)
        for part in (sequence.q, sequence.k, sequence.v):
            part.copy_(part.to(BF16))
        count = -(-end // 16)
        tables[row, :count] = np.arange(first, first + count)[::-1]
        for place, block in enumerate(tables[row, :count]):
            stop = min(end, 16 * place + 16)
            for part, new in enumerate((sequence.k, sequence.v)):
                cache.layers[0, part, block, : stop - 16 * place] = new[16 * place : stop]
        sequences.append(sequence)
        first += count
    starts, ends = np.array(spans).T
    lengths = ends - starts
    num_tokens = int(lengths.sum())
    batch = Batch(
        starts=starts,
        lengths=lengths,
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        block_tables=tables,
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        kv_slots=torch.zeros(num_tokens, dtype=torch.int64),
    )
    q = torch.cat([s.q[a:b] for s, (a, b) in zip(sequences, spans, strict=True)]).to(BF16)
    attention = TritonAttention(
        cache, num_heads=heads, windows=(window,), chunk=128, deterministic=deterministic
    )
    out = torch.empty_like(q)
    attention.run(attention.columns(batch, window), 0, q, out)
    expected = torch.cat(
        [dense(s, window)[a:b] for s, (a, b) in zip(sequences, spans, strict=True)]
    )
    assert_within(out, expected.float(), 1, size=1e-4)


@pytest.mark.parametrize("form", ["dense", "int8", "int4"])
def test_products(form: str) -> None:
    make = {"dense": gemm.dense, "int8": gemm.quantise_int8, "int4": gemm.quantise_int4}[form]
    weight, bias = make(normal(130, 2048, seed=1)), normal(130, seed=2)
    assert weight.num_chunks > 1
    x = normal(5, 2048)
    expected = x.double() @ gemm.dequantise(weight).double().t() + bias.double()
    for rows in (1, 5):
        ours = gemm.multiply(x[:rows], weight, bias, tile_rows=None)
        assert_within(ours, expected[:rows].float(), 1, size=1e-3)


def test_the_whole_path_scores_a_prompt_as_float32_does(tmp_path: Path) -> None:
    """Chunks of a prompt and decodes: nothing on the way reads raw bits."""
    save_tiny_model("qwen3", tmp_path, num_hidden_layers=1)
    model = load_weights(open_model(tmp_path), dtype=BF16, device=CPU)
    exact = load_weights(open_model(tmp_path), dtype=torch.float32, device=CPU)
    capacity = KVCapacity(48, 8, 2, 64)
    runner = CudaRunner(
        model.decoder,
        num_blocks=48,
        block_size=8,
        dtype=BF16,
        device=CPU,
        max_rows=2,
        max_model_len=64,
    )
    engine = TorchEngine(
        model,
        device=CPU,
        dtype=BF16,
        capacity=capacity,
        runner=runner,
        sampler_kernels=TritonSampling(),
    )
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = Request("a", random_prompt(30, seed=3), 2, sampling=sampling)
    answer = serve(engine, [request], depth=1, max_step_tokens=17).answers["a"]
    ours = torch.tensor([entry.logprob for entry in answer.prompt_logprobs]).double()
    expected = expected_prompt_logprobs(exact, request.prompt)
    assert expected.std() > 1
    assert (ours - expected).abs().mean() < 0.06
    assert (ours - expected).abs().max() < 0.3
