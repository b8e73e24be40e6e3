"""The GGUF reader: what it reads, and that every malformed file is one clear, quick error."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import time
import tracemalloc
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.default_model import find_default_model
from engine.errors import ModelFileError
from engine.gguf_file import BLOCK_SIZES, GGMLType, open_gguf

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
HUGE = 1 << 63


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def entry(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def build(
    *,
    version: int = 3,
    pairs: tuple[bytes, ...] = (),
    entries: tuple[bytes, ...] = (),
    num_pairs: int | None = None,
    num_entries: int | None = None,
    data: bytes = b"",
    alignment: int = 32,
) -> bytes:
    """A GGUF file by hand, so that any part of it can be wrong."""
    head = b"GGUF" + struct.pack("<I", version)
    head += struct.pack("<Q", len(entries) if num_entries is None else num_entries)
    head += struct.pack("<Q", len(pairs) if num_pairs is None else num_pairs)
    head += b"".join(pairs) + b"".join(entries)
    return head + b"\0" * (-len(head) % alignment) + data


NAME = pair("general.name", STRING, text("tiny"))
TWO = (entry("a", [8], 0, 0), entry("b", [8], 0, 32))


def strings(*values: str) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(text(value) for value in values)


def test_reads_every_kind_of_value_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    pairs = (
        NAME,
        pair("count", U32, struct.pack("<I", 7)),
        pair("big", U64, struct.pack("<Q", 1 << 40)),
        pair("ratio", F32, struct.pack("<f", 0.5)),
        pair("yes", BOOL, b"\1"),
        pair("words", ARRAY, strings("é", "", "z")),
        pair("ids", ARRAY, struct.pack("<IQ3i", I32, 3, 1, -2, 3)),
        pair("flags", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\1\0"),
    )
    data = np.arange(16, dtype="<f4").tobytes()
    path.write_bytes(build(pairs=pairs, entries=(entry("a", [4, 2]), TWO[1]), data=data))
    file = open_gguf(path)
    metadata = {
        key: value.tolist() if isinstance(value, array) else value
        for key, value in file.metadata.items()
    }
    assert metadata == {
        "general.name": "tiny",
        "count": 7,
        "big": 1 << 40,
        "ratio": 0.5,
        "yes": True,
        "words": ["é", "", "z"],
        "ids": [1, -2, 3],
        "flags": [True, False],
    }
    tensor = file.tensors["a"]
    assert (tensor.shape, tensor.type, tensor.nbytes) == ((2, 4), GGMLType.F32, 32)
    assert file.data("a").view("<f4").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert file.data("b").view("<f4").tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


def test_counted_strings_are_checked_but_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(
        build(pairs=(pair("k", ARRAY, strings("a", "b")), pair("l", ARRAY, strings("c"))))
    )
    assert open_gguf(path, counted={"k"}).metadata == {"k": range(2), "l": ["c"]}
    for case in ("string of an array past the end", "string of an array not UTF-8"):
        content, reason = MALFORMED[case]
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=re.escape(reason)):
            open_gguf(path, counted={"k"})


@pytest.mark.parametrize("alignment", [8, 64])
def test_alignment_of_the_file_is_used(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    pairs = (pair("general.alignment", U32, struct.pack("<I", alignment)),)
    path.write_bytes(
        build(pairs=pairs, entries=(TWO[0],), data=b"\1" * 32, alignment=alignment, version=2)
    )
    assert open_gguf(path).data("a").tolist() == [1] * 32


def test_block_sizes_equal_the_gguf_package() -> None:
    for kind, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == sizes
        assert gguf.GGMLQuantizationType[kind.name].value == kind.value
    assert set(BLOCK_SIZES) == set(GGMLType)


def array_of_arrays(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQB", 0, 1, 5)


def raw_dims(num_dims: int, dims: bytes) -> bytes:
    return text("a") + struct.pack("<I", num_dims) + dims + struct.pack("<IQ", 0, 0)


def alignment_of(value: int) -> bytes:
    return build(pairs=(pair("general.alignment", U32, struct.pack("<I", value)),), entries=TWO)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF"),
    "other magic": (b"GGML" + b"\0" * 60, "not a GGUF"),
    "version 1": (build(version=1), "version 1"),
    "version 99": (build(version=99), "version 99"),
    "big endian": (build(version=3 << 24), "big-endian"),
    "n_kv 2^63": (build(num_pairs=HUGE), "key count"),
    "n_kv 2^64-1": (build(num_pairs=2 * HUGE - 1), "key count"),
    "n_kv beyond the file": (build(num_pairs=1000), "key count of 1000"),
    "n_tensors 2^63": (build(num_entries=HUGE), "tensor count"),
    "n_tensors beyond the file": (build(num_entries=1000), "tensor count of 1000"),
    "key length 2^63": (build(pairs=(struct.pack("<Q", HUGE) + b"x" * 99,)), "key 0"),
    "string length 2^63": (
        build(pairs=(pair("k", STRING, struct.pack("<Q", HUGE) + b"x" * 99),)),
        "'k'",
    ),
    "string past the end": (build(pairs=(pair("k", STRING, struct.pack("<Q", 999)),)), "'k'"),
    "string not UTF-8": (
        build(pairs=(pair("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe"),)),
        "'k': not valid UTF-8",
    ),
    "key not UTF-8": (build(pairs=(struct.pack("<Q", 9) + b"\xff" * 99,)), "key 0"),
    "array of 2^63 numbers": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQ", F32, HUGE)),)),
        "'k'",
    ),
    "array count whose bytes wrap": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQ", F32, (1 << 62) + 1)),)),
        "'k'",
    ),
    "array of 2^63 strings": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQ", STRING, HUGE)),)),
        "'k'",
    ),
    "string of an array past the end": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQQ", STRING, 3, HUGE)), NAME), data=b"x" * 99),
        "'k'[0]",
    ),
    "string of an array not UTF-8": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2) + b"\xff\xff"),)),
        "'k'[0]",
    ),
    "nested arrays": (build(pairs=(pair("k", ARRAY, array_of_arrays(2)),)), "arrays inside"),
    "deeply nested arrays": (
        build(pairs=(pair("k", ARRAY, array_of_arrays(100_000)),)),
        "arrays inside",
    ),
    "unknown value type": (build(pairs=(pair("k", 13, b"\0" * 99),)), "value type 13"),
    "unknown item type": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQ", 77, 1) + b"\0" * 99),)),
        "item type 77",
    ),
    "boolean 2": (build(pairs=(pair("k", BOOL, b"\2"),)), "not a boolean"),
    "array of boolean 2": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQB", BOOL, 1, 2)),)),
        "not a boolean",
    ),
    "key twice": (build(pairs=(NAME, NAME)), "'general.name' appears twice"),
    "n_dims 0": (build(entries=(raw_dims(0, b""),)), "'a': 0 dimensions"),
    "n_dims 5": (build(entries=(entry("a", [1] * 5),)), "'a': 5 dimensions"),
    "n_dims 10^6": (build(entries=(raw_dims(10**6, b"\1" * 64),)), "1000000 dimensions"),
    "n_dims 2^32-1": (build(entries=(raw_dims(2**32 - 1, b"\1" * 64),)), "4294967295 dimensions"),
    "dims product 2^64+8": (
        build(entries=(entry("a", [8, (1 << 61) + 1]),), data=b"\0" * 64),
        "tensor 'a' ends",
    ),
    "dims product 2^64": (
        build(entries=(entry("a", [1 << 32, 1 << 32]),), data=b"\0" * 64),
        "tensor 'a' ends",
    ),
    "dims product 2^256": (
        build(entries=(entry("a", [2 * HUGE - 1] * 4),), data=b"\0" * 64),
        "tensor 'a' ends",
    ),
    "a dimension 0": (build(entries=(entry("a", [8, 0]),)), "'a': a dimension is 0"),
    "unknown tensor type": (build(entries=(entry("a", [8], 4),)), "'a': unknown tensor type 4"),
    "half a block": (build(entries=(entry("a", [40], 2),), data=b"\0" * 64), "Q4_0's 32"),
    "offset beyond the file": (
        build(entries=(entry("a", [8], 0, 1 << 20),), data=b"\0" * 64),
        "tensor 'a' ends",
    ),
    "offset 2^64-32": (
        build(entries=(entry("a", [8], 0, 2 * HUGE - 32),), data=b"\0" * 64),
        "tensor 'a' ends",
    ),
    "offset unaligned": (
        build(entries=(entry("a", [8], 0, 4),), data=b"\0" * 64),
        "'a': offset 4 is not a multiple of 32",
    ),
    "tensors overlap": (
        build(entries=(entry("a", [9]), entry("b", [8], 0, 32)), data=b"\0" * 64),
        "'a' and 'b' overlap",
    ),
    "tensors at one place": (
        build(entries=(entry("a", [8]), entry("b", [8])), data=b"\0" * 64),
        "overlap",
    ),
    "tensor twice": (
        build(entries=(entry("a", [8]), entry("a", [8], 0, 32)), data=b"\0" * 64),
        "'a' appears twice",
    ),
    "alignment 0": (alignment_of(0), "general.alignment is 0"),
    "alignment 3": (alignment_of(3), "general.alignment is 3"),
    "alignment 2^31": (alignment_of(1 << 31), "general.alignment is 2147483648"),
    "alignment is text": (
        build(pairs=(pair("general.alignment", STRING, text("32")),)),
        "general.alignment",
    ),
    "hostile name": (build(entries=(entry("a\n\x1b[31m" * 999, [8]),)), "ends at byte"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_one_line_within_a_second_and_little_memory(
    case: str, tmp_path: Path
) -> None:
    """B161"""
    content, reason = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ModelFileError) as caught:
            open_gguf(path)
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert reason in message
    assert message.startswith(str(path))
    assert message.isprintable()
    assert len(message) < 400
    assert seconds < 1
    assert peak < 10_000_000


def rich_file() -> tuple[bytes, int]:
    """A small valid file of all kinds of value, and where its last tensor ends."""
    pairs = (NAME, pair("words", ARRAY, strings(*"abcdefgh")), pair("n", U64, b"\1" * 8))
    entries = (entry("a", [32, 2], 2), entry("b", [5], 0, 64))
    content = build(pairs=pairs, entries=entries, data=b"\3" * 84)
    return content, len(content)


def test_every_truncation_is_found_at_open(tmp_path: Path) -> None:
    """B161"""
    content, end = rich_file()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    assert set(open_gguf(path).tensors) == {"a", "b"}
    assert end > 300
    for cut in range(end):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelFileError):
            open_gguf(path)


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(damage=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_bytes_never_raise_anything_else(
    damage: list[tuple[int, int]], tmp_path: Path
) -> None:
    """B161: a damaged file opens with all its tensors inside it, or is refused."""
    content, _ = rich_file()
    damaged = bytearray(content)
    for at, value in damage:
        damaged[at % len(damaged)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = open_gguf(path)
    except ModelFileError:
        return
    for name, tensor in file.tensors.items():
        assert file.data(name).nbytes == tensor.nbytes


@pytest.mark.parametrize("what", ["missing", "directory"])
def test_unreadable_path_is_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "none.gguf" if what == "missing" else tmp_path
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_gguf(path)


@pytest.mark.model
def test_default_model_has_its_tensors_and_tokens() -> None:
    file = open_gguf(find_default_model())
    assert len(file.tensors) == 272
    assert file.tensors["blk.29.attn_k.weight"].shape == (192, 576)
    assert file.tensors["token_embd.weight"].type is GGMLType.Q8_0
    assert file.metadata["general.languages"] == ["en"]
    assert file.metadata["llama.rope.freq_base"] == 100000.0
    assert file.metadata["tokenizer.ggml.pre"] == "smollm"
    tokens, merges = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    assert (len(tokens), tokens[1], len(merges)) == (49152, "<|im_start|>", 48900)


@pytest.mark.model
def test_default_model_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    """B161: in the header (its first 1.8 MB) and in the tensors."""
    content = find_default_model().read_bytes()
    places = [*range(3, 1_800_000, 30_000), *range(1_800_000, len(content), 9_000_000)]
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    with path.open("r+b") as file:
        for size in [len(content) - 1, *reversed(places)]:
            file.truncate(size)
            with pytest.raises(ModelFileError):
                open_gguf(path)


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys, engine.gguf_file, engine.gguf_config, engine.huggingface_config, "
        "engine.default_model; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
