"""Whole models on the native kernels: against references, and the same bits whatever the batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.gguf_file import open_gguf
from engine.kernels.cpu import library
from engine.kernels.cpu.library import KernelError, available_tiers
from engine.loading import open_model
from engine.native_cpu import NativeModel, NativeOptions, refusal
from engine.native_runner import native_file
from engine.native_weights import GGUFMatrices, TensorMatrices, q4_1_from_q4_k
from engine.safetensors_files import SafetensorsWeights
from tests.engine.kernels_cpu.calls import quantised_activations, restored
from tests.support.models import (
    VOCAB_SIZE,
    reference_logits,
    save_tiny_model,
    tiny_model,
    write_gguf,
)

pytestmark = pytest.mark.skipif(
    not available_tiers(), reason="the native kernels are not built here"
)

WIDE = {"hidden_size": 128, "head_dim": 32}
BLOCKS_PER_SEQUENCE = 20


def options(**changes: object) -> NativeOptions:
    values: dict[str, object] = {
        "num_blocks": 96,
        "block_size": 16,
        "max_model_len": 320,
        "max_step_tokens": 300,
        "num_threads": 2,
        "kv_type": "float32",
    }
    return NativeOptions(**{**values, **changes})  # type: ignore[arg-type]


def native_model(path: Path, **changes: object) -> NativeModel:
    config = open_model(path).config
    weights = (
        TensorMatrices(SafetensorsWeights(path), quantise=False)
        if path.is_dir()
        else GGUFMatrices(open_gguf(path), config)
    )
    return NativeModel(config, weights, options(**changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


@dataclass
class Row:
    """Tokens start .. start + length - 1 of a sequence that owns block range `slot`."""

    tokens: Sequence[int]
    start: int
    length: int
    slot: int = 0


@dataclass
class Runner:
    """Feeds rows to a model and collects the logits of every token."""

    model: NativeModel
    table: np.ndarray = field(
        default_factory=lambda: np.random.default_rng(7).permutation(96).astype(np.int32)
    )

    def step(self, *rows: Row) -> list[np.ndarray]:
        starts = np.cumsum([0, *(row.length for row in rows)])
        logits = self.outputs(np.arange(starts[-1]), *rows)
        return [logits[a:b] for a, b in itertools.pairwise(starts)]

    def outputs(self, outputs: np.ndarray, *rows: Row) -> np.ndarray:
        """Logits of these tokens of the step."""
        starts = np.cumsum([0, *(row.length for row in rows)])
        hidden = self.model.forward(
            token_ids=np.concatenate([row.tokens[row.start :][: row.length] for row in rows]),
            positions=np.concatenate([row.start + np.arange(row.length) for row in rows]),
            row_starts=starts,
            block_tables=np.stack(
                [self.table[row.slot * BLOCKS_PER_SEQUENCE :][:BLOCKS_PER_SEQUENCE] for row in rows]
            ),
            outputs=outputs,
        )
        return self.model.logits(hidden).copy()

    def whole(self, tokens: Sequence[int], slot: int = 0) -> np.ndarray:
        return self.step(Row(tokens, 0, len(tokens), slot))[0]


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "llama-mha", "llama-mqa", "llama-biases", "llama-llama3", "llama-yarn"),
        *("mistral-window", "qwen2", "qwen2-window", "qwen3", "qwen3-biases-window"),
    ],
)
def test_families_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_tiny_model(family, tmp_path, **WIDE)
    tokens = prompt(280)
    ours = Runner(native_model(tmp_path)).whole(tokens)
    assert np.abs(ours - reference_logits(reference, tokens).numpy()).max() < 1e-3


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1", "F16", "BF16", "F32"])
def test_gguf_kinds_equal_their_dequantised_weights(kind: str, tmp_path: Path) -> None:
    reference = tiny_model("llama", **WIDE)
    path = tmp_path / "tiny.gguf"
    write_gguf(reference, path, kind=gguf.GGMLQuantizationType[kind])
    tokens = prompt(100)
    ours = Runner(native_model(path)).whole(tokens)
    exact = reference_logits(reference, tokens).numpy()
    allowed = 1e-4 if kind in ("F16", "BF16", "F32") else 0.05  # 8-bit activations
    assert np.sqrt(np.mean((ours - exact) ** 2)) < allowed * exact.std()


@pytest.mark.parametrize("family", ["llama", "smollm-tied"])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e3])
def test_a_head_of_8_bits_loses_little_of_uneven_hidden_states(
    family: str, size: float, tmp_path: Path
) -> None:
    reference = tiny_model(family, hidden_size=192, head_dim=32)
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(size)
    path = tmp_path / "tiny.gguf"
    write_gguf(reference, path, kind=gguf.GGMLQuantizationType.Q8_0)
    name = "model.embed_tokens.weight" if family == "smollm-tied" else "lm_head.weight"
    weights = GGUFMatrices(open_gguf(path), open_model(path).config).matrix(name).rows
    hidden = np.random.default_rng(3).normal(size=(11, 192)).astype(np.float32)
    hidden[:, ::31] *= 9  # a channel or two in each block
    exact = hidden.astype(np.float64) @ restored("Q8_0", weights).T
    lost = (quantised_activations(hidden) - hidden) @ restored("Q8_0", weights).T
    error = native_model(path).logits(hidden) - exact
    assert np.sqrt(np.mean(error**2)) < 0.75 * np.sqrt(np.mean(lost**2))


@pytest.mark.parametrize("stored", ["safetensors", "F16"])
def test_float_models_rounded_to_8_bits_stay_close(stored: str, tmp_path: Path) -> None:
    path, tokens = tmp_path, prompt(100)
    if stored == "safetensors":
        reference = save_tiny_model("qwen2", path, **WIDE)
    else:
        reference, path = tiny_model("llama", **WIDE), tmp_path / "tiny.gguf"
        write_gguf(reference, path, kind=gguf.GGMLQuantizationType[stored])
    file = native_file(open_model(path), quantise=True)
    model = NativeModel(file.config, file.weights, options())
    assert file.weights.kind("model.layers.0.self_attn.q_proj.weight") == "Q8_0"
    ours, exact = Runner(model).whole(tokens), reference_logits(reference, tokens).numpy()
    assert np.sqrt(np.mean((ours - exact) ** 2)) < 0.08 * exact.std()
    assert (ours != Runner(native_model(path)).whole(tokens)).any()


def test_q4_k_becomes_q4_1_within_the_rounding_of_its_scales() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (6, 3 * 144), dtype=np.uint8)
    blocks = rows.reshape(-1, 144)
    blocks[:, :4] = rng.uniform(0.01, 0.1, (18, 2)).astype(np.float16).view(np.uint8)
    exact = gguf.dequantize(rows, gguf.GGMLQuantizationType.Q4_K)
    ours = gguf.dequantize(q4_1_from_q4_k(rows), gguf.GGMLQuantizationType.Q4_1)
    assert ours.shape == exact.shape
    assert np.abs(ours - exact).max() <= 1e-3 * np.abs(exact).max()


@pytest.fixture(scope="module", params=["Q4_1", "F32"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(tiny_model("llama", **WIDE), file, kind=gguf.GGMLQuantizationType[request.param])
    return file


@pytest.mark.parametrize("kv_type", library.KV_KINDS)
def test_same_bits_alone_chunked_batched_and_at_any_number_of_threads(
    path: Path, kv_type: str
) -> None:
    tokens = prompt(300)
    alone = Runner(native_model(path, num_threads=1, kv_type=kv_type)).whole(tokens)
    runner = Runner(native_model(path, num_threads=2, kv_type=kv_type))
    assert runner.whole(tokens).tobytes() == alone.tobytes()
    others = [prompt(180, seed) for seed in (1, 2)]
    start, parts = 0, []
    for length in (1, 7, 1, 40, 100, 1, 1, 49, 100):
        mates = [Row(other, 0, 60 + i + length // 4, 1 + i) for i, other in enumerate(others)]
        mine = Row(tokens, start, length, 0)
        rows = [mates[0], mine, mates[1]] if length % 2 else [mine, *mates]
        parts.append(runner.step(*rows)[rows.index(mine)])
        start += length
    assert np.concatenate(parts).tobytes() == alone.tobytes()


@pytest.mark.parametrize("kv_type", library.KV_KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_outputs_have_the_bits_that_they_have_among_all(
    path: Path, kv_type: str, seed: int
) -> None:
    """And the KV of tokens without one is there for those that come after."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, [120, 60, 40, 3]).tolist()
    rows = [Row(prompt(200, slot), 0, length, slot) for slot, length in enumerate(lengths)]
    later = [Row(row.tokens, row.length, 5, row.slot) for row in rows]
    model, other = (native_model(path, kv_type=kv_type, num_threads=n) for n in (1, 2))
    whole, part = Runner(model), Runner(other)
    expected, after = np.concatenate(whole.step(*rows)), np.concatenate(whole.step(*later))
    wanted = rng.random(len(expected)) < rng.choice([0.02, 0.3, 0.9])
    wanted[rng.integers(len(wanted))] = True
    outputs = np.flatnonzero(wanted)
    assert part.outputs(outputs, *rows).tobytes() == expected[outputs].tobytes()
    assert part.outputs(np.arange(4, 20, 5), *later).tobytes() == after[4::5].tobytes()


def test_threads_that_come_late_change_nothing(path: Path) -> None:
    """More threads than cores: some begin a step when it is over, or when the next one runs."""
    tokens = prompt(60)
    alone = Runner(native_model(path, num_threads=1)).whole(tokens)
    runner = Runner(native_model(path, num_threads=9))
    for _ in range(20):
        parts = [runner.step(Row(tokens, 0, 21))[0]]
        parts += [runner.step(Row(tokens, start, 1))[0] for start in range(21, 60)]
        assert np.concatenate(parts).tobytes() == alone.tobytes()


@pytest.mark.parametrize("kv_type", library.KV_KINDS)
def test_all_tiers_give_the_same_bits(path: Path, kv_type: str) -> None:
    results = {
        Runner(native_model(path, tier=tier, kv_type=kv_type)).whole(prompt(70)).tobytes()
        for tier in available_tiers()
    }
    assert len(results) == 1


@pytest.mark.parametrize("kv_type", library.KV_KINDS)
def test_copied_blocks_hold_the_same_kv(path: Path, kv_type: str) -> None:
    runner = Runner(native_model(path, kv_type=kv_type))
    tokens = prompt(80)
    whole = runner.whole(tokens)
    pairs = zip(runner.table[:5].tolist(), runner.table[20:25].tolist(), strict=True)
    runner.model.copy_blocks(list(pairs))
    assert runner.step(Row(tokens, 79, 1, 1))[0].tobytes() == whole[79:].tobytes()


@pytest.mark.parametrize(("kv_type", "allowed"), [("int16", 0.03), ("int8", 0.06)])
def test_kv_of_integers_stays_close_to_float32(path: Path, kv_type: str, allowed: float) -> None:
    tokens = prompt(200)
    exact = Runner(native_model(path)).whole(tokens)
    ours = Runner(native_model(path, kv_type=kv_type)).whole(tokens)
    assert 0 < np.sqrt(np.mean((ours - exact) ** 2)) < allowed * exact.std()


@pytest.mark.parametrize("kv_type", library.KV_KINDS)
def test_bad_activations_end_in_nan_for_their_row_only(tmp_path: Path, kv_type: str) -> None:
    reference = tiny_model("llama", **WIDE)
    reference.model.embed_tokens.weight.data[5] = 1e25
    write_gguf(reference, tmp_path / "bad.gguf")
    runner = Runner(native_model(tmp_path / "bad.gguf", kv_type=kv_type))
    good, bad = prompt(40, 1), [*prompt(20, 2), 5, *prompt(19, 3)]
    good = [token if token != 5 else 6 for token in good]
    alone = runner.whole(good)
    mixed = runner.step(Row(bad, 0, 40, 1), Row(good, 0, 40, 0))
    assert mixed[1].tobytes() == alone.tobytes()
    assert np.isnan(mixed[0][20]).all()
    assert np.isnan(mixed[0][39]).all(), "who looks at a row's last token alone must see it"
    # the blocks of the broken sequence do not spoil their next owner
    assert runner.whole(good, slot=1).tobytes() == alone.tobytes()


def test_positions_behind_the_window_need_no_block(tmp_path: Path) -> None:
    save_tiny_model("mistral-window", tmp_path, **WIDE)
    runner = Runner(native_model(tmp_path))
    tokens = prompt(100)
    whole = runner.whole(tokens)
    runner.table[:5] = -1
    assert runner.step(Row(tokens, 99, 1))[0].tobytes() == whole[99:].tobytes()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_profile_has_the_time_of_every_phase_and_starts_again(path: Path, num_threads: int) -> None:
    model = native_model(path, num_threads=num_threads)
    begin = time.perf_counter()
    for _ in range(3):
        Runner(model).whole(prompt(60))
    elapsed = time.perf_counter() - begin
    found = model.profile()
    # the last thread of a phase may be late to say so; then the next phase has its time
    assert sum(seconds > 0 for seconds in found.values()) >= 8
    assert found["head"] > 0
    assert sum(found.values()) <= elapsed
    assert not any(model.profile().values())


def test_empty_batch_computes_nothing(path: Path) -> None:
    model = native_model(path)
    none = np.empty(0, dtype=np.int32)
    hidden = model.forward(
        token_ids=none, positions=none, row_starts=np.zeros(1), block_tables=np.empty((0, 0))
    )
    assert hidden.shape == (0, 128)
    assert model.logits(hidden).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("token_ids", [VOCAB_SIZE, 1]), ("token_ids", [-1, 1]), ("positions", [319, 320])),
        *(("positions", [3, 5]), ("row_starts", [0, 1]), ("row_starts", [0, 0, 2])),
        *(("block_tables", [[96]]), ("block_tables", [[-1]]), ("positions", [15, 16])),
        *(("outputs", []), ("outputs", [2]), ("outputs", [-1]), ("outputs", [0, 0])),
        *(("outputs", [1, 0]), ("outputs", [0, 1, 1])),
    ],
)
def test_indices_out_of_range_are_refused(path: Path, name: str, value: list[object]) -> None:
    batch = {
        "token_ids": np.array([3, 4]),
        "positions": np.array([0, 1]),
        "row_starts": np.array([0, 2]),
        "block_tables": np.array([[0]]),
    }
    model = native_model(path)
    model.forward(**batch)
    with pytest.raises(KernelError, match="out of range"):
        model.forward(**{**batch, name: np.array(value)})


def test_unsupported_sizes_are_refused_with_a_reason(tmp_path: Path) -> None:
    save_tiny_model("llama-odd-sizes", tmp_path)
    reason = refusal(open_model(tmp_path).config)
    assert reason is not None
    assert "no multiple of 32" in reason
    with pytest.raises(KernelError, match="no multiple of 32"):
        native_model(tmp_path)
