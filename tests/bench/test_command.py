"""`paceline bench` from the command line to the report, against the scripted server in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.options import parse_options
from tests.bench.fake_server import Answer, FakeServer, Script, fake_server, honest

SPREAD = {"p50", "p90", "p95", "p99", "mean", "max"}


@contextmanager
def in_thread(script: Script, metrics: str = "") -> Iterator[FakeServer]:
    ready, stop, fakes = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with fake_server(script, metrics) as fake:
            fakes.append(fake)
            loops.append(asyncio.get_running_loop())
            ready.set()
            await stop.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield fakes[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)


def report_of(out: Path, *argv: str, script: Script = honest, status: int = 0) -> dict[str, Any]:
    with in_thread(script) as fake:
        assert main(["--url", fake.url, "--out", str(out), *argv]) == status
    data: dict[str, Any] = json.loads(out.read_text())
    return data


def test_report_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "new" / "r.json", tmp_path / "r.png"
    data = report_of(
        out, "--concurrency", "1,2", "--requests", "4", "--input", "20,40", "--output", "5",
        "--slo", "ttft:5000,tpot:5000", "--seed", "7", "--plot", str(plot),
    )  # fmt: skip
    assert data["schema"] == "paceline-bench/1"
    assert data["target"]["model"] == "fake"
    assert data["settings"]["seed"] == 7
    assert [(level["load"], level["level"]) for level in data["levels"]] == [
        ("20/5", "1 client"),
        ("20/5", "2 clients"),
        ("40/5", "1 client"),
        ("40/5", "2 clients"),
    ]
    for level in data["levels"]:
        assert level["requests"] == {"ok": 4, "failed": 0, "cut": 0}
        assert level["output_tokens"] == 20
        assert level["mean_input_tokens"] == level["settings"]["input"]
        assert level["tokens_per_chunk"] == 1.0
        assert level["goodput_per_second"] == pytest.approx(level["requests_per_second"])
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "normalised_ms"):
            assert set(level[name]) == SPREAD
            assert 0 <= level[name]["p50"] <= level[name]["p99"] <= level[name]["max"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "Throughput" in shown
    assert "goodput" in shown


def test_errors_are_shown_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def script(body: dict[str, Any]) -> Answer:
        calls.append(body)
        refusal = Answer(
            [(0, b'{"error":{"message":"queue full"}}')], "429 Busy", ["Retry-After: 0"]
        )
        return refusal if body["max_tokens"] == 6 and len(calls) % 2 else honest(body)

    data = report_of(
        tmp_path / "r.json", "--concurrency", "2", "--requests", "6", "--output", "6",
        "--warmup", "0", script=script,
    )  # fmt: skip
    level = data["levels"][0]
    assert level["requests"]["ok"] + level["requests"]["failed"] == 6
    assert level["errors"] == {"http_429": level["requests"]["failed"]}
    assert level["error_examples"] == {"http_429": "queue full"}
    assert "queue full" in capsys.readouterr().out


def test_no_success_is_a_failure(tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> Answer:
        return Answer(hang_up=True) if body["max_tokens"] == 9 else honest(body)

    data = report_of(
        tmp_path / "r.json", "--concurrency", "1", "--requests", "2", "--output", "9", "--quiet",
        script=script, status=1,
    )  # fmt: skip
    assert data["levels"][0]["errors"] == {"disconnect": 2}


def test_rate_and_trace_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n9.0,30,4\n9.2,900,8\n9.3,5,2\n")
    out = tmp_path / "r.json"
    level = report_of(
        out, "--trace", str(trace), "--time-scale", "0.5", "--max-input", "50", "--quiet"
    )["levels"][0]
    assert level["output_tokens"] == 14
    assert level["input_tokens"] == 30 + 50 + 5
    assert level["duration_seconds"] >= 0.15
    level = report_of(
        out, "--rate", "50", "--requests", "5", "--lengths", str(trace), "--max-output", "3",
        "--max-input", "50", "--quiet",
    )["levels"][0]  # fmt: skip
    assert level["requests"]["ok"] == 5
    assert 2 <= level["mean_output_tokens"] <= 3


def test_shared_prefix_and_token_ids_reach_the_server() -> None:
    with in_thread(honest) as fake:
        argv = ["--url", fake.url, "--concurrency", "2", "--requests", "2", "--quiet"]
        shared = ["--shared-prefix", "40", "--tail", "8", "--token-ids", "5-90", "--warmup", "0"]
        assert main([*argv, *shared, "--output", "2", "--api-key", "sk-1"]) == 0
        one, two = (body["prompt"] for body in fake.bodies[-2:])
        heads = fake.heads
    assert len(one) == len(two) == 48
    assert one[:40] == two[:40]
    assert one[40:] != two[40:]
    assert all("Authorization: Bearer sk-1" in head for head in heads)


def test_interrupt_keeps_what_finished(tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> Answer:
        if body["max_tokens"] != 4:
            return honest(body)
        slow = any(other["max_tokens"] == 4 for other in seen)
        seen.append(body)
        if slow:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return honest(body, first=30.0 if slow else 0.0)

    seen: list[dict[str, Any]] = []
    data = report_of(
        tmp_path / "r.json", "--concurrency", "1,2", "--requests", "3", "--output", "4",
        "--warmup", "0", "--quiet", script=script, status=130,
    )  # fmt: skip
    assert [level["requests"] for level in data["levels"]] == [{"ok": 1, "failed": 0, "cut": 2}]


def test_absent_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--model", "m", "--quiet"]) == 1
    assert "cannot connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1", "--rate", "2"],
        ["--rate", "nan"],
        ["--slo", "ttft"],
        ["--trace", "/no/such/file.csv"],
        ["--token-ids", "9-2"],
        ["--token-ids", "1-9", "--api", "chat"],
        ["--input", "x"],
        ["--warmup", "-1"],
        ["--concurr", "1"],
        ["--concurrency", "1,"],
        ["--url", "ftp://127.0.0.1"],
        ["--url", "http://\udcff"],
        ["--api-key", "a\r\nhost: b"],
        ["--url", "http://127.0.0.1:70000"],
        ["--out", "/"],
        ["--out", "/dev/null/report.json"],
        ["--plot", "report.bmp"],
        ["--burstiness", "2"],
        ["--time-scale", "2", "--rate", "1"],
        ["--tail", "8"],
        ["--max-output", "8"],
        ["--shared-prefix", "8", "--input", "8"],
        ["--lengths", "/no/such/file.csv", "--output", "8"],
    ],
)
def test_bad_flags_are_refused_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that would do nothing beside the others too."""
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_lengths_without_arrivals_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n,3,4\n")
    with pytest.raises(SystemExit):
        parse_options(["--trace", str(path)])
    assert parse_options(["--lengths", str(path)]).levels[0].shape.label() == "lengths/file"
