"""FlashAttention-3 for long rows, by a stand-in: when it is called, and with what."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.attention import flash3_serves, fused_attention
from engine.cuda_engine import make_cuda_engine
from engine.cuda_graphs import bucket_sizes
from engine.kv_cache import KVCache
from engine.loading import LoadedModel, load_weights, open_model
from scheduler.types import KVCapacity, Request
from tests.engine.kernels_triton.test_cuda_engine import ReplayedWork, make_cuda_path, make_runner
from tests.engine.test_attention import Shape
from tests.engine.test_library_attention import fake_flash3
from tests.engine.test_torch_engine import GREEDY, load_tiny, random_prompt, serve

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A machine with flash_attn_interface; the options of each call of it."""
    seen: list[dict[str, object]] = []

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: object) -> Tensor:
        seen.append({**options, "q": q, "k_cache": k_cache})
        out = fake_flash3(q.float(), k_cache.float(), v_cache.float(), **options)
        return out.to(q.dtype)

    package = ModuleType("flash_attn_interface")
    package.__spec__ = ModuleSpec("flash_attn_interface", None)
    package.flash_attn_with_kvcache = attend
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    return seen


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("half")
    load_tiny("llama", path, num_hidden_layers=1)
    return load_weights(open_model(path), dtype=torch.float16, device=CPU)


def work() -> list[Request]:
    return [
        Request(str(i), random_prompt(length, seed=i), 3, sampling=GREEDY)
        for i, length in enumerate((9, 30, 1))
    ]


def test_long_rows_are_the_library_s_and_graphs_hold_none_of_it(
    half: LoadedModel, calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills and mixed steps call it once a layer, for the rows behind the decodes; decodes,
    eager, captured and replayed, do not. The tokens are those of the kernels of our own.
    """
    recorder = ReplayedWork()
    runner = make_runner(half, dtype=torch.float16, recorder=recorder)
    served = serve(
        make_cuda_path(half, runner), work(), depth=1, max_step_tokens=24, arrivals=lambda i: 2 * i
    )
    assert recorder.num_replays > 0
    assert runner.graphs is not None
    assert runner.graphs.num_captured == len(bucket_sizes(4))
    assert calls
    config = half.config
    for call in calls:
        lengths = call["cu_seqlens_q"].diff()
        rows, tokens = len(lengths), int(lengths.sum())
        assert int(lengths.max()) > 1, "no step of decodes alone"
        assert call["q"].shape == (tokens, config.num_heads, config.head_dim)
        assert call["k_cache"].shape == (49, 8, config.num_kv_heads, config.head_dim)
        assert call["cache_seqlens"].shape == (rows,)
        assert call["page_table"].shape[0] == rows
        width = call["page_table"].shape[1]
        assert 8 * width >= int(call["cache_seqlens"].max()) > 8 * (width - 1)
        assert int(call["page_table"].min()) >= 0, "unused entries point at the spare block"
    count = len(calls)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    own = serve(make_cuda_path(half, make_runner(half, dtype=torch.float16)), work())
    assert len(calls) == count
    assert served.token_ids == own.token_ids


def test_deterministic_mode_keeps_to_one_kernel(
    half: LoadedModel, calls: list[dict[str, object]]
) -> None:
    """A row has the same bits as a prefill and as a decode, which two libraries can't promise."""
    engine = make_cuda_engine(
        half,
        device=CPU,
        dtype=torch.float16,
        capacity=KVCapacity(48, 8, 4, 64),
        deterministic=True,
    )
    serve(engine, work()[:2])
    assert not calls


@pytest.mark.parametrize(
    ("dtype", "head_dim", "serves"),
    [
        (torch.bfloat16, 80, True),
        (torch.float16, 256, True),
        (torch.float32, 64, False),
        (torch.float8_e4m3fn, 64, False),
        (torch.bfloat16, 60, False),
        (torch.bfloat16, 512, False),
    ],
)
def test_caches_it_does_not_take_are_left_to_our_kernels(
    dtype: torch.dtype, head_dim: int, *, serves: bool, calls: list[dict[str, object]]
) -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=head_dim)
    cache = KVCache(shape, num_blocks=2, block_size=16, dtype=dtype, device=CPU)
    assert flash3_serves(cache) is serves
    attention = fused_attention(cache, num_heads=2, windows=(None,))
    assert (attention._library is not None) is serves
    assert not calls


def test_without_the_package_there_is_no_library() -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=64)
    cache = KVCache(shape, num_blocks=2, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert not flash3_serves(cache)
