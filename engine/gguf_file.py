"""A strict, bounded reader of GGUF versions 2 and 3 (little endian).

It owns the container: metadata, tensor directory, raw bytes of a tensor. A file is hostile until
every count, length, product and offset has been checked against the file's real size, so opening
one costs time and memory in proportion to bytes that exist. It must not know torch, nor what the
metadata means, and imports numpy only for the bytes of tensors: a tokenizer needs none.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
import sys
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelFileError

if TYPE_CHECKING:
    import numpy as np

MAX_DIMS = 4
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_STRINGS = 1 << 22
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20


class GGMLType(IntEnum):
    """How the elements of a tensor are stored; the numbers are those of the file format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


# type -> (elements in a block, bytes of a block)
BLOCK_SIZES: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
# metadata value type -> code of struct and array; strings and arrays are read apart
_SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_SMALLEST_KEY = 8 + 4 + 1  # key length, value type, one byte of value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, n_dims, one dimension, type, offset


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor directory. `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]  # outermost first: (rows, columns); the file stores the reverse
    type: GGMLType
    offset: int
    nbytes: int


class GGUFFile:
    """An open, checked file. Bytes of tensors are read-only views of the mapped file.

    `metadata` holds str, int, float, bool, list[str] for arrays of strings, list[bool] for arrays
    of booleans and array.array for arrays of numbers.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        tensors: dict[str, GGUFTensor],
        data: mmap.mmap,
    ):
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes of a tensor: uint8, shape (*outer dimensions, bytes of a row)."""
        import numpy as np

        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return raw.reshape(*tensor.shape[:-1], -1)


def open_gguf(path: Path | str, *, counted: Collection[str] = ()) -> GGUFFile:
    """Map the file and check its whole header.

    Arrays of strings under the keys of `counted` are checked as well, but not kept: `metadata` has
    the range of their indices. A vocabulary would leave megabytes of holes where it was.
    Raises ModelFileError (one line, with the field or tensor) for whatever is wrong with it.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{path}: not a GGUF file (the first bytes are not 'GGUF')")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _parse(path, data, counted)


def _parse(path: Path, data: mmap.mmap, counted: Collection[str]) -> GGUFFile:
    cursor = _Cursor(path, data)
    cursor.at = 4
    version = cursor.scalar(4, "version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "big-endian files are not supported" if swapped in (2, 3) else "only 2 and 3 are read"
        raise cursor.error(f"GGUF version {version} ({why})")
    num_tensors = cursor.count("tensor count", _SMALLEST_TENSOR, MAX_TENSORS)
    num_keys = cursor.count("metadata key count", _SMALLEST_KEY, MAX_METADATA_KEYS)
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key {_shown(key)} appears twice")
        cursor.counts = key in counted
        metadata[key] = cursor.value(f"metadata {_shown(key)}")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not _is_alignment(alignment):
        raise cursor.error(
            f"general.alignment is {alignment!r}: not a power of two from 8 to {MAX_ALIGNMENT}"
        )
    entries = [_tensor_entry(cursor, index) for index in range(num_tensors)]
    tensors = _place(cursor, entries, alignment)
    return GGUFFile(path, metadata, tensors, data)


def _is_alignment(value: int) -> bool:
    return 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


def _tensor_entry(cursor: _Cursor, index: int) -> GGUFTensor:
    """Read one directory entry; its offset still counts from the start of the data section."""
    name = cursor.string(f"name of tensor {index}", MAX_KEY_BYTES)
    field = f"tensor {_shown(name)}"
    num_dims = cursor.scalar(4, f"{field}: n_dims")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"{field}: {num_dims} dimensions (1 to {MAX_DIMS} are allowed)")
    dims = [cursor.scalar(10, f"{field}: dimension") for _ in range(num_dims)]
    type_number = cursor.scalar(4, f"{field}: type")
    try:
        kind = GGMLType(type_number)
    except ValueError:
        raise cursor.error(f"{field}: unknown tensor type {type_number}") from None
    offset = cursor.scalar(10, f"{field}: offset")
    block, block_bytes = BLOCK_SIZES[kind]
    if 0 in dims:
        raise cursor.error(f"{field}: a dimension is 0 ({dims})")
    if dims[0] % block:
        raise cursor.error(f"{field}: rows of {dims[0]} are no multiple of {kind.name}'s {block}")
    nbytes = math.prod(dims) // block * block_bytes  # Python's integers do not wrap
    return GGUFTensor(name, tuple(reversed(dims)), kind, offset, nbytes)


def _place(cursor: _Cursor, entries: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    """Check where every tensor lies and make its offset count from the start of the file."""
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        field = f"tensor {_shown(entry.name)}"
        if entry.name in tensors:
            raise cursor.error(f"{field} appears twice")
        if entry.offset % alignment:
            raise cursor.error(f"{field}: offset {entry.offset} is not a multiple of {alignment}")
        end = start + entry.offset + entry.nbytes
        if end > cursor.size:
            raise cursor.error(
                f"{field} ends at byte {end}, but the file has {cursor.size} (truncated?)"
            )
        offset = start + entry.offset
        tensors[entry.name] = GGUFTensor(entry.name, entry.shape, entry.type, offset, entry.nbytes)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(in_order):
        if after.offset < before.offset + before.nbytes:
            raise cursor.error(f"tensors {_shown(before.name)} and {_shown(after.name)} overlap")
    return tensors


class _Cursor:
    """Reads values one after another, each only after a check that the file has its bytes."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.counts = False  # strings of an array, in place of keeping them

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {reason}")

    def need(self, nbytes: int, field: str) -> None:
        if nbytes > self.size - self.at:
            raise self.error(
                f"{field} needs {nbytes} bytes at byte {self.at}, "
                f"but the file has {self.size} (truncated?)"
            )

    def scalar(self, value_type: int, field: str) -> Any:
        code = "<" + _SCALARS[value_type]
        nbytes = struct.calcsize(code)
        self.need(nbytes, field)
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += nbytes
        if value_type != _BOOL:
            return value
        if value > 1:
            raise self.error(f"{field}: {value} is not a boolean")
        return bool(value)

    def count(self, field: str, smallest_item: int, limit: int) -> int:
        count: int = self.scalar(10, field)
        if count > limit:
            raise self.error(f"{field} is {count} (at most {limit} are read)")
        self.need(count * smallest_item, f"{field} of {count}")
        return count

    def string(self, field: str, limit: int = MAX_STRING_BYTES) -> str:
        nbytes = self.scalar(10, f"{field}: length")
        if nbytes > limit:
            raise self.error(f"{field}: a string of {nbytes} bytes (at most {limit} are read)")
        self.need(nbytes, field)
        raw = self.data[self.at : self.at + nbytes]
        self.at += nbytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{field}: not valid UTF-8") from None

    def value(self, field: str) -> Any:
        value_type = self.scalar(4, f"{field}: type")
        if value_type == _STRING:
            return self.string(field)
        if value_type == _ARRAY:
            return self.array(field)
        if value_type not in _SCALARS:
            raise self.error(f"{field}: unknown value type {value_type}")
        return self.scalar(value_type, field)

    def array(self, field: str) -> Any:
        item_type = self.scalar(4, f"{field}: item type")
        if item_type == _ARRAY:
            raise self.error(f"{field}: arrays inside arrays are not supported")
        if item_type == _STRING:
            return self.strings(self.count(f"{field}: length", 8, MAX_ARRAY_STRINGS), field)
        if item_type not in _SCALARS:
            raise self.error(f"{field}: unknown item type {item_type}")
        code = _SCALARS[item_type]
        size = struct.calcsize("<" + code)
        count = self.count(f"{field}: length", size, self.size)
        raw = self.data[self.at : self.at + count * size]
        self.at += len(raw)
        if item_type == _BOOL:
            if raw.strip(b"\0\1"):
                raise self.error(f"{field}: a value is not a boolean")
            return [bool(value) for value in raw]
        values = array(code, raw)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def strings(self, count: int, field: str) -> list[str] | range:
        """Like `string` count times, inlined: a vocabulary has some 10^5 of them."""
        data, at, size = self.data, self.at, self.size
        length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        keep: Callable[[str], object] = _forget if self.counts else texts.append
        index = 0
        try:
            for index in range(count):  # noqa: B007 (an error tells it)
                (nbytes,) = length(data, at)
                at += 8
                if nbytes > size - at:
                    raise struct.error
                keep(data[at : at + nbytes].decode("utf-8"))
                at += nbytes
        except struct.error:
            raise self.error(f"{field}[{index}] ends after the file (truncated?)") from None
        except UnicodeDecodeError:
            raise self.error(f"{field}[{index}]: not valid UTF-8") from None
        self.at = at
        return range(count) if self.counts else texts


def _forget(_: str) -> None:
    pass


def _shown(name: str) -> str:
    """A name from the file, safe for one line of a terminal."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
