"""Safetensors files that are damaged, hostile or sharded: refused in one line, or read rightly."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelFileError
from engine.loading import LoadedModel, load_weights, open_model
from engine.safetensors_files import SafetensorsFile
from tests.support.models import dense_logits, reference_logits, save_tiny_model, tiny_model


def load(path: Path) -> LoadedModel:
    return load_weights(open_model(path), dtype=torch.float32, device=torch.device("cpu"))


def refused(path: Path) -> str:
    """The error of loading `path`, which must be one line for a person."""
    with pytest.raises(ModelFileError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 600
    return message


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(file: Path, header: Any, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize("cut", [1, 100, 10**5, 303_000])
def test_truncated_file_is_refused(cut: int, tmp_path: Path) -> None:
    """B143: in the last tensor, in others, in the header"""
    save_tiny_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    assert cut < len(content)
    file.write_bytes(content[:-cut])
    assert "truncated" in refused(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 500])
def test_file_cut_inside_its_header_is_refused(size: int, tmp_path: Path) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    message = refused(tmp_path)
    assert "truncated" in message or "empty" in message


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 26, 400_000])
def test_impossible_header_length_is_refused(length: int, tmp_path: Path) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert f"header of {length} bytes" in refused(tmp_path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert "1 bytes after the last tensor" in refused(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ([0, 256], "overlaps"),
        ([10**9, 10**9 + 256], "ends at byte"),
        ([-256, 0], "bad data_offsets"),
        ([256, 0], "bad data_offsets"),
        ([0, 255], "does not fill"),
        ([0, 1 << 70], "bad data_offsets"),
        ([0.0, 256.0], "bad data_offsets"),
        ([0], "bad data_offsets"),
        ("0-256", "bad data_offsets"),
    ],
)
def test_wrong_offsets_name_the_tensor(offsets: Any, reason: str, tmp_path: Path) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    header, data = header_of(tmp_path / "model.safetensors")
    header["model.norm.weight"]["data_offsets"] = offsets
    write(tmp_path / "model.safetensors", header, data)
    message = refused(tmp_path)
    assert reason in message
    assert "tensor '" in message


def test_hole_between_tensors_is_refused(tmp_path: Path) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    header, data = header_of(tmp_path / "model.safetensors")
    header.pop("__metadata__")
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    del header[names[3]]
    write(tmp_path / "model.safetensors", header, data)
    assert f"leaves a hole after '{names[2]}'" in refused(tmp_path)


HEADERS: dict[str, Any] = {
    "not JSON": b"{'a'",
    "not text": b"\xff\xfe\x00\x01",
    "a list": [1, 2],
    "deep": b"[" * 100_000,
    "an entry that is no object": {"a": 3},
    "an entry without dtype": {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "unknown dtype": {"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}},
    "negative shape": {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
    "shape that wraps": {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}},
    "huge number": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 9999 + b"]}}",
    "key twice": b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_malformed_header_is_one_line(case: str, tmp_path: Path) -> None:
    """B143"""
    save_tiny_model("llama", tmp_path)
    write(tmp_path / "model.safetensors", HEADERS[case], b"\0" * 4)
    refused(tmp_path)


def test_tensors_share_the_files_memory_and_never_change_it(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4), "none": torch.ones(0, 3)}, file)
    opened = SafetensorsFile(file)
    opened.read("a").zero_()
    assert opened.read("a").tolist() == [0, 0, 0, 0]
    assert load_file(file)["a"].tolist() == [1, 1, 1, 1]
    assert opened.read("none").shape == (0, 3)


# --- shards --------------------------------------------------------------------------------------


def save_sharded(directory: Path) -> Any:
    model = tiny_model("llama")
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return model


def edit_index(directory: Path, edit: Any) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


def test_sharded_checkpoint_equals_its_model(tmp_path: Path) -> None:
    reference = save_sharded(tmp_path)
    prompt = [5, 17, 99, 3, 120, 64, 7]
    difference = dense_logits(load(tmp_path), prompt) - reference_logits(reference, prompt)
    assert difference.abs().max() < 1e-4


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """B143"""
    save_sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    message = refused(tmp_path)
    assert f"{shard}: missing shard" in message


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    """B143"""
    save_sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in refused(tmp_path)


def test_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    """B143"""
    save_sharded(tmp_path)
    first, last = sorted(path.name for path in tmp_path.glob("*.safetensors"))[:2]

    def edit(index: Any) -> None:
        name = next(name for name, file in index["weight_map"].items() if file == first)
        index["weight_map"][name] = last

    edit_index(tmp_path, edit)
    assert "is not there" in refused(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """B143"""
    save_sharded(tmp_path)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    assert f"'{name}' is also in {first.name}" in refused(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "", 7, None, "a/b"])
def test_index_may_only_name_files_beside_it(file: Any, tmp_path: Path) -> None:
    save_sharded(tmp_path)
    edit_index(tmp_path, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    assert "not the name of a file here" in refused(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_index_without_a_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    save_sharded(tmp_path)
    edit_index(tmp_path, lambda index: index.update(weight_map=weight_map))
    assert "weight_map" in refused(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_never_loaded(file: str, tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    assert "only pickled weights" in refused(tmp_path)


def test_directory_without_weights_says_so(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "an adapter, not a model" in refused(tmp_path)
