"""Opening and loading as callers see it: which format a path is, lengths, devices, dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ModelFileError
from engine.loading import load_weights, open_model
from tests.support.models import dense_logits, save_tiny_model, tiny_model, write_gguf

CPU = torch.device("cpu")


def test_config_alone_equals_that_of_the_model(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path)
    write_gguf(tiny_model("qwen2"), tmp_path / "a.gguf")
    for path in (tmp_path, tmp_path / "a.gguf"):
        files = open_model(path)
        assert load_weights(files, dtype=torch.float32, device=CPU).config == files.config


@pytest.mark.parametrize("max_model_len", [None, 10, 300])
def test_positions_reach_as_far_as_asked(max_model_len: int | None, tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    files = open_model(tmp_path)
    model = load_weights(files, dtype=torch.float32, device=CPU, max_model_len=max_model_len)
    length = model.decoder.max_positions
    assert length == (max_model_len or 256)
    assert dense_logits(model, [3] * length).shape == (length, 160)
    with pytest.raises(IndexError):
        dense_logits(model, [3] * (length + 1))


def test_path_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file or directory"):
        open_model(tmp_path / "none")


def test_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello, this is text")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        open_model(tmp_path / "model.txt")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama-biases", "smollm-tied", "qwen3"])
def test_cuda_gives_the_logits_of_the_cpu(family: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    prompt = list(range(3, 40))
    on_cpu = load_weights(open_model(tmp_path), dtype=torch.float32, device=CPU)
    on_cuda = load_weights(open_model(tmp_path), dtype=torch.float32, device=torch.device("cuda"))
    assert all(buffer.is_cuda for buffer in on_cuda.decoder.buffers())
    difference = dense_logits(on_cuda, prompt).cpu() - dense_logits(on_cpu, prompt)
    assert difference.abs().max() < 1e-3
