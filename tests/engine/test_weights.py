"""Checkpoints that are incomplete, damaged or unusual: refused in one line, or served rightly."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ModelFileError
from engine.loading import LoadedModel, load_weights, open_model
from tests.support.models import dense_logits, reference_logits, save_tiny_model, tiny_model
from tests.support.models import write_gguf as write_gguf_model

PROMPT = [5, 17, 99, 3, 120, 64, 7]
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def load(path: Path, **options: Any) -> LoadedModel:
    cpu = torch.device("cpu")
    return load_weights(open_model(path), dtype=torch.float32, device=cpu, **options)


def refused(path: Path) -> str:
    """The error of loading `path`, which must be one line for a person."""
    with pytest.raises(ModelFileError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 600
    return message


def change(directory: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of the directory's one file."""
    file = directory / "model.safetensors"
    changed = {**load_file(file), **tensors}
    save_file({k: v.contiguous() for k, v in changed.items() if v is not None}, file)


def same_logits(model: LoadedModel, reference: Any) -> bool:
    difference = dense_logits(model, PROMPT) - reference_logits(reference, PROMPT)
    return bool(difference.abs().max() < 1e-4)


# --- names and shapes ----------------------------------------------------------------------------


def test_tied_checkpoint_without_a_head_uses_the_embedding(tmp_path: Path) -> None:
    """B139"""
    reference = save_tiny_model("smollm-tied", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.warnings == ()
    assert same_logits(model, reference)


def test_tied_checkpoint_with_an_equal_head_loads_silently(tmp_path: Path) -> None:
    """B140"""
    reference = save_tiny_model("smollm-tied", tmp_path)
    change(tmp_path, {"lm_head.weight": reference.lm_head.weight.detach().clone()})
    model = load(tmp_path)
    assert model.warnings == ()
    assert same_logits(model, reference)


def test_tie_wins_over_another_head_and_is_said(tmp_path: Path) -> None:
    """B140"""
    reference = save_tiny_model("smollm-tied", tmp_path)
    change(tmp_path, {"lm_head.weight": torch.zeros(160, 96)})
    model = load(tmp_path)
    assert len(model.warnings) == 1
    assert "lm_head.weight differs from the embedding" in model.warnings[0]
    assert same_logits(model, reference)


def test_untied_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    """B139"""
    save_tiny_model("llama", tmp_path)
    change(tmp_path, {"lm_head.weight": None})
    assert "missing weights: lm_head.weight" in refused(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_any_parameter_that_is_missing_is_refused(name: str, tmp_path: Path) -> None:
    """B139"""
    save_tiny_model("qwen2", tmp_path)
    change(tmp_path, {name: None})
    assert f"missing weights: {name}" in refused(tmp_path)


def test_many_missing_parameters_are_counted(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    change(tmp_path, {**dict.fromkeys(names), "other": torch.zeros(2)})
    assert "and 16 more" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.norm.weight", torch.ones(63), "shape [63], but the config calls for [64]"),
        ("lm_head.weight", torch.ones(64, 160), "shape [64, 160]"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(96 * 64), "shape [6144]"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int32), "dtype I32"),
        ("lm_head.weight", torch.ones(160, 64, dtype=torch.int8), "dtype I8"),
        ("model.norm.weight", torch.ones(64, dtype=torch.float8_e4m3fn), "dtype F8_E4M3"),
    ],
)
def test_wrong_shape_or_dtype_names_the_tensor(
    name: str, tensor: Tensor, reason: str, tmp_path: Path
) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    change(tmp_path, {name: tensor})
    message = refused(tmp_path)
    assert name in message
    assert reason in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = tiny_model("llama").to(dtype)
    stored.save_pretrained(tmp_path)
    reference = tiny_model("llama")
    reference.load_state_dict(stored.state_dict())
    assert same_logits(load(tmp_path), reference)


def test_known_helpers_are_skipped_silently(tmp_path: Path) -> None:
    """B145"""
    reference = save_tiny_model("llama", tmp_path)
    change(tmp_path, {INV_FREQ: torch.ones(8), "model.rotary_emb.inv_freq": torch.ones(8)})
    model = load(tmp_path)
    assert model.warnings == ()
    assert same_logits(model, reference)


def test_unknown_tensors_outside_the_model_are_listed(tmp_path: Path) -> None:
    """B145"""
    reference = save_tiny_model("llama", tmp_path)
    later = "model.layers.2.mlp.up_proj.weight"
    change(tmp_path, {"adapter.a": torch.ones(2), later: torch.ones(2)})
    model = load(tmp_path)
    assert len(model.warnings) == 1
    assert "adapter.a" in model.warnings[0]
    assert later in model.warnings[0]
    assert same_logits(model, reference)


@pytest.mark.parametrize(
    "name",
    ["lm_head.bias", "model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.lora_A"],
)
def test_unknown_tensors_that_would_change_answers_are_refused(name: str, tmp_path: Path) -> None:
    """B145"""
    save_tiny_model("llama", tmp_path)
    change(tmp_path, {name: torch.ones(160)})
    message = refused(tmp_path)
    assert name in message
    assert "no place" in message


# --- GGUF ----------------------------------------------------------------------------------------


def write_gguf(path: Path, extra: dict[str, Any] | None = None, without: str = "") -> None:
    write_gguf_model(tiny_model("llama"), path, extra_tensors=extra, without=without)


def test_gguf_without_a_weight_is_refused(tmp_path: Path) -> None:
    """B139"""
    write_gguf(tmp_path / "a.gguf", without="model.layers.1.mlp.up_proj.weight")
    assert "missing weights: model.layers.1.mlp.up_proj.weight" in refused(tmp_path / "a.gguf")


def test_gguf_with_a_stray_tensor_warns(tmp_path: Path) -> None:
    """B145"""
    write_gguf(tmp_path / "a.gguf", {"stray.weight": [1.0, 2.0]})
    [warning] = load(tmp_path / "a.gguf").warnings
    assert "stray.weight" in warning


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.1.odd.weight", "output.bias"])
def test_gguf_with_a_tensor_that_would_change_answers_is_refused(name: str, tmp_path: Path) -> None:
    """B145"""
    write_gguf(tmp_path / "a.gguf", {name: [1.0] * 160})
    assert "no place" in refused(tmp_path / "a.gguf")


@pytest.mark.parametrize("factors", [[1.0] * 7, [0.0] * 8, [float("nan")] * 8, [[1.0] * 8]])
def test_gguf_with_wrong_frequency_factors_is_refused(factors: Any, tmp_path: Path) -> None:
    """B145"""
    write_gguf(tmp_path / "a.gguf", {"rope_freqs.weight": factors})
    assert "rope_freqs.weight" in refused(tmp_path / "a.gguf")


def test_gguf_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf_model(model, tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    name = b"blk.0.attn_norm.weight"
    at = content.index(name) + len(name) + 4 + 8
    assert content[at : at + 4] == struct.pack("<I", gguf.GGMLQuantizationType.F32)
    i32 = struct.pack("<I", gguf.GGMLQuantizationType.I32)
    (tmp_path / "a.gguf").write_bytes(content[:at] + i32 + content[at + 4 :])
    message = refused(tmp_path / "a.gguf")
    assert "'blk.0.attn_norm.weight' has type I32" in message


# --- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["directory", "gguf"])
def test_progress_rises_to_all_bytes(form: str, tmp_path: Path) -> None:
    path = tmp_path
    if form == "gguf":
        path = tmp_path / "a.gguf"
        write_gguf(path)
    else:
        save_tiny_model("llama", tmp_path)
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert len({total for _, total in seen}) == 1
    num_parameters = sum(tensor.numel() for tensor in tiny_model("llama").parameters())
    assert seen[-1] == (4 * num_parameters, 4 * num_parameters)
