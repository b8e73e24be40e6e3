"""Trace files: both formats, gzip, and what is refused; the shared data where it is present."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bench.traces import TraceError, TraceRow, block_tokens, read_trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_csv_rows_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,session\n2.5,7,8,b\n0.5,3,4,a\n")
    rows = read_trace(path)
    assert [(row.arrival_seconds, row.input_tokens, row.output_tokens) for row in rows] == [
        (0.5, 3, 4),
        (2.5, 7, 8),
    ]
    assert rows[0].session == "a"


def test_empty_arrival_means_lengths_only(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"arrival_s,input_tokens,output_tokens\n,3,4\n"))
    assert read_trace(path)[0].arrival_seconds is None


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival_s,input_tokens,output_tokens\n2,3,4\n")
    assert read_trace(path) == [TraceRow(2.0, 3, 4)]


def test_jsonl_block_ids_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = (
        b'{"arrival_s":0,"input_tokens":1000,"output_tokens":1,"hash_ids":[0,5]}\n\n'
        b'{"arrival_s":1,"input_tokens":1500,"output_tokens":1,"session":9,"hash_runs":[[3,2],[8,1]]}'
    )
    path.write_bytes(gzip.compress(lines))
    rows = read_trace(path)
    assert rows[0].block_keys == ("/0", "/5")
    assert rows[1].block_keys == ("9/3", "9/4", "9/8")
    assert block_tokens(rows) == 512


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"arrival_s,input_tokens\n0,1\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\n0,x,1\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\n0,-1,1\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\nnan,1,1\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\n0,1\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\n0,1000000000,1\n"),
        ("a.csv", b"arrival_s,input_tokens,output_tokens\n1e300,1,1\n"),
        ("a.csv", b"\xff\xfe"),
        ("a.csv.gz", b"\x1f\x8b\x08" + bytes(range(99))),
        ("a.jsonl", b"[" * 100_000),
        ("a.jsonl", b'{"input_tokens":1e400,"output_tokens":1}\n'),
        ("a.jsonl", b'{"input_tokens":1,"output_tokens":1,"hash_ids":null}\n'),
        ("a.jsonl", b'{"input_tokens":9,"output_tokens":1,"hash_runs":[[1,-5]]}\n'),
        ("a.csv.gz", b"not gzip"),
        ("a.csv.gz", gzip.compress(b"arrival_s,input_tokens,output_tokens\n0,1,1\n")[:-9]),
        ("a.jsonl", b"{broken\n"),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b'{"input_tokens":1,"output_tokens":1,"hash_runs":[[1]]}\n'),
        ("a.jsonl", b'{"input_tokens":1,"output_tokens":1,"hash_runs":[[1,9000000000]]}\n'),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("azure2023_conv.csv.gz", 19366, 0),
        ("len_sharegpt_llama2tok.csv.gz", None, 0),
        ("vtc_arena_27clients.csv.gz", None, 0),
        ("validation_vllm019_rtx4090_llama31-8b.csv.gz", 300, 0),
        ("mooncake_synthetic.jsonl.gz", None, 512),
        ("mooncake_conversation_1of8.jsonl.gz", None, 512),
        ("agentic_claudecode.jsonl.gz", None, 64),
        ("sharegpt300_llama31tok.jsonl.gz", 300, 16),
    ],
)
def test_shared_traces_parse(name: str, count: int | None, size: int) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}")
    rows = read_trace(path)
    assert count is None or len(rows) == count
    assert block_tokens(rows) == size
    assert all(row.input_tokens >= 0 and row.output_tokens >= 0 for row in rows)
