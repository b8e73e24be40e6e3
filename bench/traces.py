"""Request traces and length files: CSV or JSONL, plain or gzipped.

It owns the file format: `arrival_s,input_tokens,output_tokens[,session]` a row; JSONL adds
`hash_ids` (prefix-chained block ids) or `hash_runs` (`[[first_id, count], ...]`, local to their
session). An empty arrival_s means that only lengths are known. It must not know prompts or HTTP.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MAX_TOKENS = 10**8  # of one request
MAX_ARRIVAL_SECONDS = 1e9
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


class TraceError(ValueError):
    """The file is not a trace; the message says where and why."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. block_runs: (first id, count) of its blocks, ids unique in their block_space."""

    arrival_seconds: float | None
    input_tokens: int
    output_tokens: int
    session: str = ""
    block_space: str = ""
    block_runs: tuple[tuple[int, int], ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.block_runs)

    @property
    def block_keys(self) -> tuple[str, ...]:
        """Blocks with equal keys stand for equal tokens."""
        return tuple(
            f"{self.block_space}/{block}"
            for first, count in self.block_runs
            for block in range(first, first + count)
        )


def read_trace(path: Path) -> list[TraceRow]:
    """Rows in order of arrival. Raises TraceError; OSError if there is no such file."""
    opener = gzip.open if path.suffix == ".gz" else open
    jsonl = path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))
    rows = []
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            for number, fields in _fields(file, jsonl):
                rows.append(_row(fields, f"{path.name}:{number}"))
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError, csv.Error) as error:
        raise TraceError(f"{path.name}: {error}") from None
    if not rows:
        raise TraceError(f"{path.name} holds no request")
    return sorted(rows, key=lambda row: row.arrival_seconds or 0.0)


def block_tokens(rows: Sequence[TraceRow]) -> int:
    """The block size that fits the ids: the smallest for which ceil(input / size) = their number.

    Where none fits every row (a last partial block may be left out), the one that fits most.
    """
    with_blocks = [row for row in rows if row.block_runs]
    if not with_blocks:
        return 0

    def misfits(size: int) -> int:
        return sum(
            row.num_blocks not in (row.input_tokens // size, math.ceil(row.input_tokens / size))
            for row in with_blocks
        )

    return min(BLOCK_SIZES, key=misfits)


def _fields(file: IO[str], jsonl: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    if not jsonl:
        yield from enumerate(csv.DictReader(file), start=2)
        return
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise TraceError(f"line {number} is not a JSON object")
        yield number, fields


def _row(fields: dict[str, Any], where: str) -> TraceRow:
    try:
        arrival = fields.get("arrival_s")
        session = fields.get("session")
        row = TraceRow(
            arrival_seconds=None if arrival in (None, "") else float(arrival),
            input_tokens=_count(fields, "input_tokens"),
            output_tokens=_count(fields, "output_tokens"),
            session="" if session is None else str(session),
            block_space=str(session) if "hash_runs" in fields else "",
            block_runs=_block_runs(fields),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{where}: {reason}") from None
    if not (0 <= row.input_tokens <= MAX_TOKENS and 0 <= row.output_tokens <= MAX_TOKENS):
        raise TraceError(f"{where}: a token count is not from 0 to {MAX_TOKENS}")
    if row.arrival_seconds is not None and not 0 <= row.arrival_seconds <= MAX_ARRIVAL_SECONDS:
        raise TraceError(f"{where}: arrival_s {arrival} is not a time")
    return row


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is no count: {str(value)[:40]!r}") from None


def _block_runs(fields: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    if "hash_runs" not in fields:
        ids = fields.get("hash_ids", [])
        if not isinstance(ids, list):
            raise ValueError("hash_ids is no list of block ids")
        return tuple((int(block), 1) for block in ids)
    if not isinstance(fields["hash_runs"], list):
        raise ValueError("hash_runs is no list of [first_id, count]")
    runs = tuple((int(first), int(count)) for first, count in fields["hash_runs"])
    if min((count for _, count in runs), default=1) < 1:
        raise ValueError("a count of hash_runs is below 1")
    if sum(count for _, count in runs) > int(fields["input_tokens"]) + 1:
        raise ValueError("hash_runs name more blocks than input_tokens has tokens")
    return runs
