"""The tensors of a Hugging Face directory's safetensors files, single or sharded.

Owns the file format: every header is checked against the file's real size before a byte of it is
believed, so a truncated or overlapping file is an error at start and never a tensor of leftovers.
Tensors share the mapped file's memory. It must not know the decoder, and never reads pickles.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.huggingface_config import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 25

_FLOATS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Sizes of the types that may be in a file, though none of our parameters has them.
_OTHER_SIZES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
    **{"U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


class SafetensorsFile:
    """One mapped file with its checked header."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                # A private copy-on-write map: torch wants writable memory, the file stays as it is.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
        except ValueError:
            raise ModelFileError(f"{path}: the file is empty") from None
        self.tensors = _parse_header(path, self._data)

    def read(self, name: str) -> Tensor:
        stored = self.tensors[name]
        dtype = _FLOATS.get(stored.dtype)
        if dtype is None:
            raise ModelFileError(
                f"{self.path}: tensor {name!r:.100} has dtype {stored.dtype}; "
                f"weights are read as {', '.join(_FLOATS)}"
            )
        count = math.prod(stored.shape)
        if count == 0:
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(self._data, dtype=dtype, count=count, offset=stored.offset)
        return flat.view(stored.shape)


def _parse_header(path: Path, data: mmap.mmap) -> dict[str, StoredTensor]:
    def error(reason: str) -> ModelFileError:
        return ModelFileError(f"{path}: {reason}")

    if len(data) < 8:
        raise error(f"only {len(data)} bytes, too short for a safetensors header (truncated?)")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise error(f"header of {length} bytes in a file of {len(data)} (truncated or corrupt)")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
    except _DuplicateKeyError as duplicate:
        raise error(f"header: {str(duplicate)!r:.100} appears twice") from None
    except (ValueError, RecursionError) as fault:
        raise error(f"header is not valid JSON: {fault!s:.100}") from None
    if not isinstance(header, dict):
        raise error("header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = _entry(name, entry, start)
        except ValueError as fault:
            raise error(f"tensor {name!r:.100}: {fault}") from None
    _check_layout(path, tensors, start, len(data))
    return tensors


def _entry(name: str, entry: Any, start: int) -> StoredTensor:
    """Parse one entry of the header. Raises ValueError with the reason alone."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in _FLOATS and dtype not in _OTHER_SIZES):
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    if not _whole_numbers(shape) or len(shape) > 8:
        raise ValueError(f"bad shape {shape!r:.60}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"bad data_offsets {offsets!r:.60}")
    size = _FLOATS[dtype].itemsize if dtype in _FLOATS else _OTHER_SIZES[dtype]
    begin, end = offsets
    if math.prod(shape) * size != end - begin:
        raise ValueError(f"{dtype} {shape!r:.60} does not fill its {end - begin} bytes")
    return StoredTensor(name, dtype, tuple(shape), start + begin, end - begin)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """The tensors must fill the rest of the file, without holes, overlaps or leftovers."""
    at, before = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        end = tensor.offset + tensor.num_bytes
        where = f"{path}: tensor {tensor.name!r:.100}"
        if end > size:
            raise ModelFileError(
                f"{where} ends at byte {end}, but the file has {size} (truncated?)"
            )
        if tensor.offset != at:
            kind = "overlaps" if tensor.offset < at else "leaves a hole after"
            raise ModelFileError(f"{where} {kind} {before}")
        at, before = end, f"{tensor.name!r:.100}"
    if at != size:
        raise ModelFileError(f"{path}: {size - at} bytes after the last tensor belong to none")


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKeyError(key)
        result[key] = value
    return result


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )


class SafetensorsWeights:
    """A WeightSource over all files of a directory."""

    def __init__(self, directory: Path):
        self.description = str(directory)
        self._files: dict[str, SafetensorsFile] = {}
        for path, expected in _shards(directory).items():
            shard = SafetensorsFile(path)
            for name in shard.tensors:
                if name in self._files:
                    raise ModelFileError(
                        f"{path}: tensor {name!r:.100} is also in {self._files[name].path.name}"
                    )
                self._files[name] = shard
            for name in expected:
                if name not in shard.tensors:
                    raise ModelFileError(
                        f"{path}: tensor {name!r:.100} is not there, as {INDEX_FILE} says"
                    )

    def names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].shape

    def num_bytes(self, name: str) -> int:
        return self._files[name].tensors[name].num_bytes

    def read(self, name: str) -> Tensor:
        return self._files[name].read(name)


def _shards(directory: Path) -> dict[Path, list[str]]:
    """The files of a checkpoint, each with the tensors that the index expects in it."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: []}
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        raise ModelFileError(f"{directory}: {_why_no_weights(directory)}")
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: weight_map is missing or empty")
    shards: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        if not (isinstance(file_name, str) and file_name and Path(file_name).name == file_name):
            raise ModelFileError(
                f"{index_path}: {name!r:.100} is in {file_name!r:.100}, not the name of a file here"
            )
        shards.setdefault(directory / file_name, []).append(name)
    for path, names in shards.items():
        if not path.is_file():
            raise ModelFileError(f"{path}: missing shard (it holds {names[0]!r:.100})")
    return shards


def _why_no_weights(directory: Path) -> str:
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        return (
            "only pickled weights (.bin, .pt), which can run code and are never loaded; "
            f"convert them to {SINGLE_FILE}"
        )
    if (directory / "adapter_config.json").is_file():
        return "an adapter, not a model: merge it into its base model first"
    return f"no {SINGLE_FILE} and no {INDEX_FILE}"
