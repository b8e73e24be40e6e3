"""The decoder against transformers: same files, same logits, for every family and format."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine.decoder import Decoder
from engine.default_model import find_default_model
from engine.loading import LoadedModel, load_weights, open_model
from tests.support.default_model import transformers_model
from tests.support.models import (
    FAMILIES,
    VOCAB_SIZE,
    dense_attend,
    dense_logits,
    reference_logits,
    save_tiny_model,
    tiny_model,
    write_gguf,
)

CPU = torch.device("cpu")
KINDS = gguf.GGMLQuantizationType


def load(path: Path, dtype: torch.dtype = torch.float32, **options: int) -> LoadedModel:
    return load_weights(open_model(path), dtype=dtype, device=CPU, **options)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_equal_transformers(family: str, tmp_path: Path) -> None:
    """B139 B142 (scaled rotary types too)."""
    reference = save_tiny_model(family, tmp_path)
    model = load(tmp_path)
    assert model.warnings == ()
    for prompt in prompts(1, 5, 33, 256):
        ours, theirs = dense_logits(model, prompt), reference_logits(reference, prompt)
        assert theirs.std() > 0.5  # the weights are large enough for differences to show
        assert (ours - theirs).abs().max() < 1e-4


def test_dynamic_rope_grows_with_the_longest_sequence_served(tmp_path: Path) -> None:
    """B142"""
    reference = save_tiny_model("llama-dynamic", tmp_path)
    model = load(tmp_path, max_model_len=400)
    [prompt] = prompts(400)
    assert (dense_logits(model, prompt) - reference_logits(reference, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_tiny_model("qwen3", tmp_path)
    model = load(tmp_path, dtype)
    assert all(t.dtype in (dtype, torch.float32) for t in model.decoder.buffers())
    [prompt] = prompts(40)
    ours, theirs = dense_logits(model, prompt), reference_logits(reference, prompt)
    assert ours.dtype is torch.float32
    assert (ours - theirs).abs().mean() < 0.05 * theirs.std()


GGUF_FAMILIES = [
    "llama",
    "smollm-tied",
    "llama-mqa",
    "llama-head-dim",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-tied",
]


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_of_every_family_equals_transformers(family: str, tmp_path: Path) -> None:
    reference = tiny_model(family)
    write_gguf(reference, tmp_path / "tiny.gguf")
    model = load(tmp_path / "tiny.gguf")
    assert model.config.tie_word_embeddings == reference.config.tie_word_embeddings
    assert model.config.eos_token_ids == (2,)
    for prompt in prompts(1, 33):
        ours, theirs = dense_logits(model, prompt), reference_logits(reference, prompt)
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "kind", [KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1]
)
def test_quantised_gguf_equals_its_dequantised_weights(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    reference = tiny_model("llama")
    write_gguf(reference, tmp_path / "tiny.gguf", kind=kind)
    model = load(tmp_path / "tiny.gguf")
    [prompt] = prompts(33)
    assert (dense_logits(model, prompt) - reference_logits(reference, prompt)).abs().max() < 1e-4


def test_gguf_sliding_window_is_honoured(tmp_path: Path) -> None:
    reference = tiny_model("mistral-window")
    write_gguf(reference, tmp_path / "tiny.gguf", describe=lambda w: w.add_sliding_window(7))
    model = load(tmp_path / "tiny.gguf")
    [prompt] = prompts(33)
    assert (dense_logits(model, prompt) - reference_logits(reference, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama-linear", "llama-yarn"])
def test_gguf_rope_scaling_equals_transformers(family: str, tmp_path: Path) -> None:
    """B142"""
    reference = tiny_model(family)
    rope = reference.config.rope_parameters

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    write_gguf(reference, tmp_path / "tiny.gguf", describe=describe)
    [prompt] = prompts(200)
    ours = dense_logits(load(tmp_path / "tiny.gguf"), prompt)
    assert (ours - reference_logits(reference, prompt)).abs().max() < 1e-4


def test_gguf_frequency_factors_are_used(tmp_path: Path) -> None:
    """B145: the converter writes llama3 scaling as rope_freqs.weight."""
    reference = tiny_model("llama-llama3")
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = plain / reference.model.rotary_emb.inv_freq
    assert factors.max() > 2
    write_gguf(
        reference, tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": factors.numpy()}
    )
    [prompt] = prompts(200)
    ours = dense_logits(load(tmp_path / "tiny.gguf"), prompt)
    assert (ours - reference_logits(reference, prompt)).abs().max() < 1e-4


def assert_same_bits_in_any_batch(
    decoder: Decoder, num_threads: int, sizes: tuple[int, ...]
) -> None:
    """Logits of a run of tokens, computed in pieces of each size and all together."""
    num_tokens = 2 * max(sizes)
    ids, positions = torch.randint(VOCAB_SIZE, (2, num_tokens))

    def queries(_layer: int, q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
        return q

    def run(rows: slice) -> Tensor:
        return decoder.logits(decoder(ids[rows], positions[rows], queries))

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = run(slice(None))
        for size in sizes:
            first = int(torch.randint(num_tokens - size, ()))
            rows = slice(first, first + size)
            assert torch.equal(run(rows), whole[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_token_is_the_same_bits_in_any_batch(num_threads: int, tmp_path: Path) -> None:
    """Invariant 10, without attention: rows alone, in batches, at any place."""
    save_tiny_model("llama-odd-sizes", tmp_path, hidden_size=1100, head_dim=20)
    assert_same_bits_in_any_batch(load(tmp_path).decoder, num_threads, (1, 2, 7, 350, 359))


def test_no_rows_give_no_logits(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    assert load(tmp_path).decoder.logits(torch.empty(0, 64)).shape == (0, VOCAB_SIZE)


@pytest.fixture(scope="module")
def default_model() -> LoadedModel:
    return load(find_default_model())


@pytest.mark.model
def test_default_models_tokens_are_the_same_bits_in_any_batch(default_model: LoadedModel) -> None:
    """Invariant 10, without attention, at the sizes that we serve."""
    assert_same_bits_in_any_batch(default_model.decoder, 2, (1, 2, 17))


@pytest.mark.model
def test_default_model_equals_transformers(default_model: LoadedModel) -> None:
    """The same dequantised weights in transformers' Llama, on a real prompt."""
    model, reference = default_model, transformers_model()
    # "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    for _ in range(5):
        prompt.append(int(dense_logits(model, prompt)[-1].argmax()))
    # "The capital of France is"
    assert prompt[16:] == [504, 3575, 282, 4649, 314]
    logits, expected = dense_logits(model, prompt), reference_logits(reference, prompt)
    assert (logits - expected).abs().max() < 1e-3
    assert logits.argmax(dim=-1).equal(expected.argmax(dim=-1))


def test_dense_reference_is_causal_and_windowed(tmp_path: Path) -> None:
    """The reference of these tests itself: a token outside the window changes nothing."""
    save_tiny_model("mistral-window", tmp_path)
    config = load(tmp_path).config
    attend = dense_attend(config)
    q, k, v = torch.randn(20, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    before = attend(0, q, k, v)
    k[12], v[12] = 9.0, 9.0
    changed = (attend(0, q, k, v) != before).flatten(1).any(dim=1)
    assert changed.tolist() == [12 <= at < 12 + 7 for at in range(20)]
