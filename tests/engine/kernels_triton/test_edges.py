"""Where kernels go wrong at the ends: offsets beyond 2^31, odd logits, captures without memory."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.triton import TritonAttention
from engine.batch import Batch
from engine.cuda_graphs import CudaRecorder
from engine.kernels.triton.rotary import rotate_and_store
from engine.loading import LoadedModel
from engine.model_config import RopeConfig
from engine.rope import rope_tables
from scheduler.types import SamplingParams
from tests.engine.kernels_triton.test_cuda_engine import (
    ReplayedWork,
    make_cuda_path,
    make_runner,
    requests,
)
from tests.engine.kernels_triton.test_sampling import both_draws
from tests.engine.test_torch_engine import GREEDY, load_tiny, make_engine, serve

CPU = torch.device("cpu")
KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
BLOCK_ELEMENTS = BLOCK_SIZE * KV_HEADS * HEAD_DIM


def pool_beyond_int32() -> Tensor:
    """[blocks, block_size, kv_heads, head_dim] float16 with more than 2^31 numbers.

    Memory that is never touched is never there.
    """
    num_blocks = (1 << 31) // BLOCK_ELEMENTS + 8
    size = 2 * num_blocks * BLOCK_ELEMENTS
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        pytest.skip(f"no {size} bytes of address space")
    flat = torch.frombuffer(memory, dtype=torch.float16)
    return flat.view(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)


def test_the_last_blocks_of_a_pool_of_more_than_2_to_the_31_numbers() -> None:
    """Stored there and read from there, as in a block at its beginning."""
    pool = pool_beyond_int32()
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((3, (8 + 2 * KV_HEADS) * HEAD_DIM), generator=generator).half()
    results = []
    for block in (1, len(pool) - 2):
        q = torch.empty((3, 8, HEAD_DIM), dtype=torch.float16)
        rotate_and_store(
            qkv,
            norms=None,
            tables=rope_tables(RopeConfig(), HEAD_DIM, 8),
            positions=torch.tensor([0, 1, 2]),
            kv_slots=torch.arange(3) + block * BLOCK_SIZE,
            q_out=q,
            keys=pool,
            values=pool,
        )
        cache = SimpleNamespace(
            layers=pool.expand(1, 2, *pool.shape),
            scales=None,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
        )
        attention = TritonAttention(cache, num_heads=8, windows=(None,))
        batch = Batch(
            starts=np.array([2]),
            lengths=np.array([1]),
            offsets=np.array([0, 1]),
            block_tables=np.array([[block]], dtype=np.int32),
            token_ids=torch.zeros(1, dtype=torch.int64),
            positions=torch.tensor([2]),
            kv_slots=torch.zeros(1, dtype=torch.int64),
        )
        out = torch.empty((1, 8, HEAD_DIM), dtype=torch.float16)
        attention.run(attention.columns(batch, None), 0, q[2:].contiguous(), out)
        results.append((pool[block, :3].clone(), out))
    (stored, attended), (far_stored, far_attended) = results
    assert stored.abs().sum() > 0
    assert attended.abs().sum() > 0
    assert torch.equal(stored, far_stored)
    assert torch.equal(attended, far_attended)


def equal_logits(vocab: int) -> Tensor:
    return torch.full((1, vocab), 1.25)


ODD_LOGITS: dict[str, tuple[Tensor, dict[str, float]]] = {
    "all equal": (equal_logits(300), {}),
    "all equal, top_k": (equal_logits(300), {"top_k": 7}),
    "all equal, top_p": (equal_logits(300), {"top_p": 0.5}),
    "all equal, min_p 1": (equal_logits(300), {"min_p": 1.0}),
    "top_k beyond the vocabulary": (torch.linspace(-3, 3, 50)[None], {"top_k": 10_000}),
    "one token in the vocabulary": (torch.tensor([[0.5]]), {"top_k": 3, "top_p": 0.9}),
    "huge": (torch.tensor([[3e38, -3e38, 3e38, 0.0]]), {"top_p": 0.7}),
    "zeros of both signs": (torch.tensor([[0.0, -0.0, -0.0, 0.0]]), {"top_k": 2}),
    "one left": (torch.tensor([[-torch.inf, 2.0, -torch.inf]]), {"top_k": 2, "top_p": 0.9}),
    "denormal": (torch.tensor([[1e-40, 2e-40, -1e-40]]), {"top_k": 2}),
}


# numpy's remarks in the interpreter; a GPU computes the same without them.
@pytest.mark.filterwarnings("ignore:.* encountered in (subtract|multiply):RuntimeWarning")
@pytest.mark.parametrize("what", ODD_LOGITS)
def test_odd_logits_draw_the_token_of_the_twin(what: str) -> None:
    logits, filters = ODD_LOGITS[what]
    params = [SamplingParams(seed=seed, **filters) for seed in range(4)]
    actual, expected = both_draws(logits.repeat(4, 1), params)
    assert actual == expected


@pytest.mark.filterwarnings("ignore:.* encountered in (subtract|multiply):RuntimeWarning")
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_a_row_without_a_finite_peak_keeps_a_token_of_the_vocabulary(value: float) -> None:
    """It fails by its peak; until then its token must be one that can be looked up."""
    logits = torch.full((2, 200), value)
    logits[1] = torch.linspace(-1, 1, 200)
    actual, expected = both_draws(logits, [SamplingParams(top_p=0.9, seed=1)] * 2)
    assert 0 <= actual[0] < 200
    assert actual[1] == expected[1]


class ShortOfMemory(ReplayedWork):
    """Captures the first bucket; then there is no memory, before or in a capture."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self.num_records:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.num_records += 1
        return super().record(work)

    num_records = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def test_a_capture_without_memory_leaves_the_captured_buckets_and_serves_on(
    model: LoadedModel,
) -> None:
    """While requests run: nobody notices, and it is not tried again at each step."""
    work = requests([GREEDY] * 4)
    recorder = ShortOfMemory()
    runner = make_runner(model, recorder=recorder)
    served = serve(make_cuda_path(model, runner), work, depth=1)
    assert served.token_ids == serve(make_engine(model), work).token_ids
    assert runner.graphs is not None
    assert runner.graphs.num_captured == 1
    assert recorder.num_replays > 0, "the largest bucket holds every step"


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection could free a graph or an event in it, which a capture does not survive."""
    seen: list[tuple[str, bool]] = []

    class Graph:
        def capture_begin(self, **_options: object) -> None:
            seen.append(("begin", gc.isenabled()))

        def capture_end(self) -> None:
            seen.append(("end", gc.isenabled()))

        replay = None

    stream = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: _Nothing())
    recorder = CudaRecorder(stream)
    recorder.record(lambda: torch.zeros(1))
    assert gc.isenabled()

    def fail() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(fail)
    assert gc.isenabled()
    assert seen == [("begin", False), ("end", False)] * 2


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
