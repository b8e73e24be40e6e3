"""The comparison: order, medians, contenders, and that every process it starts is gone after."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.peers import __main__ as command
from bench.peers import rivals
from bench.peers.loads import SMOKE, Cell
from bench.peers.process import StartFailed, serving
from bench.peers.results import Measured, contenders, draw, print_table, summarised
from bench.peers.rivals import BY_NAME, QUICK, RIVALS, Rival, missing

CELL = Cell(4, 128, 64, 12)
SHARED = Cell(8, 32, 32, 16, shared_prefix=1024)
REQUIRED = {
    "server", "clients", "input", "output",
    "output_tokens_per_second", "ttft_p50", "ttft_p95", "tpot_p50",
}  # fmt: skip


def run_of(
    server: str, family: str, pace: float, *, repetition: int = 0, cell: Cell = CELL
) -> Measured:
    return Measured(
        server, family, "file", repetition, cell, pace, 100.0 / pace, 0.1, 0.2, 0.03, 0,
        128.0, 64.0, 1.0, 300.0,
    )  # fmt: skip


def fake(name: str, *argv: str) -> Rival:
    start = list(argv) or ["-m", "tests.bench.fake_server"]
    return Rival(
        name, name, "file", lambda gguf: gguf,
        lambda _, port: [sys.executable, *start, str(port)], start_seconds=20.0,
    )  # fmt: skip


def test_summary_is_the_median_of_each_figure() -> None:
    runs = [run_of("a", "a", pace, repetition=turn) for turn, pace in enumerate((10.0, 50.0, 20.0))]
    (entry,) = summarised(runs)
    assert entry.keys() >= REQUIRED
    assert entry["output_tokens_per_second"] == 20.0
    assert entry["total_seconds"] == 5.0
    assert entry["repetitions"] == 3
    assert (entry["clients"], entry["input"], entry["output"]) == (4, 128, 64)


def test_shared_prefix_input_counts_prefix_and_tail() -> None:
    (entry,) = summarised([run_of("a", "a", 10.0, cell=SHARED)])
    assert (entry["input"], entry["shared_prefix"]) == (1056, 1024)


def test_only_variants_near_their_familys_best_are_repeated() -> None:
    slow, fast, alone = (
        replace(fake(name), family=family)
        for name, family in (("x slow", "x"), ("x fast", "x"), ("y", "y"))
    )
    runs = [run_of("x slow", "x", 80.0), run_of("x fast", "x", 100.0), run_of("y", "y", 1.0)]
    runs += [run_of("x slow", "x", 95.0, cell=SHARED), run_of("x fast", "x", 100.0, cell=SHARED)]
    cells = [CELL, SHARED]
    assert contenders(runs, slow, cells) == [SHARED]
    assert contenders(runs, fast, cells) == cells
    assert contenders(runs, alone, cells) == [CELL]


def test_table_compares_with_the_best_rival_and_plot_is_drawn(tmp_path: Path) -> None:
    runs = [run_of("paceline", "paceline", 100.0), run_of("a", "a", 50.0), run_of("b", "b", 40.0)]
    runs += [run_of("paceline", "paceline", 10.0, cell=SHARED), run_of("a", "a", 4.0, cell=SHARED)]
    console = Console(width=120, record=True, file=(tmp_path / "t.txt").open("w"))
    print_table(console, summarised(runs), "paceline")
    console.file.close()
    shown = (tmp_path / "t.txt").read_text()
    assert "2.00 x" in shown
    assert "2.50 x" in shown
    draw(tmp_path / "p.png", summarised(runs))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv",
    [
        ["--servers", "nobody"],
        ["--only", "no such load"],
        ["--gguf", "/no/such/model.gguf"],
        ["--minutes", "nan"],
        ["--repetitions", "0"],
        ["--servers", "one"],
    ],
)
def test_what_cannot_be_compared_is_one_line(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one: where no server is installed there is nothing to run."""
    monkeypatch.setattr(command, "BY_NAME", {"one": fake("one")})
    monkeypatch.setattr(command, "missing", lambda *_: "not installed")
    (tmp_path / "m.gguf").touch()
    common = ["--smoke", "--no-install", "--servers", "one", "--gguf", str(tmp_path / "m.gguf")]
    with pytest.raises(SystemExit) as caught:
        command.main([*common, "--out", str(tmp_path / "peers.json"), *argv])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_comparison_alternates_and_ends_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "BY_NAME", {name: fake(name) for name in ("one", "two")})
    monkeypatch.setattr(command, "missing", lambda *_: None)
    out = tmp_path / "peers.json"
    (tmp_path / "m.gguf").touch()
    argv = ["--smoke", "--servers", "one,two", "--gguf", str(tmp_path / "m.gguf")]
    assert command.main([*argv, "--repetitions", "2", "--out", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert len(summary) == 2 * len(SMOKE)
    assert all(entry["failed"] == 0 for entry in summary)
    assert all(entry["mean_output"] == entry["output"] for entry in summary)
    runs = json.loads((tmp_path / "peers-runs.json").read_text())["runs"]
    order = list(dict.fromkeys((run["repetition"], run["server"]) for run in runs))
    assert order[:2] == [(0, "one"), (0, "two")]
    assert [turn for turn in order if turn[0]] in (
        [(1, "two"), (1, "one")],
        [(1, "two")],
        [(1, "one")],
    )
    assert (tmp_path / "peers.png").exists()


def test_server_is_gone_after_its_turn(tmp_path: Path) -> None:
    with serving(fake("one"), tmp_path, tmp_path / "one.log") as server:
        os.killpg(server.group, 0)
        assert server.start_seconds > 0
    with pytest.raises(ProcessLookupError):
        os.killpg(server.group, 0)


def test_server_that_dies_says_why(tmp_path: Path) -> None:
    broken = fake("broken", "-c", "raise SystemExit('no such model')")
    with (
        pytest.raises(StartFailed, match="no such model"),
        serving(broken, tmp_path, tmp_path / "b.log"),
    ):
        pass


def test_absent_rivals_are_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "PEERS", rivals.ROOT / ".venv-peers-absent")
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert "not installed" in str(missing(BY_NAME["llama.cpp"], gguf))
    assert missing(BY_NAME["paceline"], gguf) is None


def test_names_are_unique_and_quick_ones_exist() -> None:
    assert len(BY_NAME) == len(RIVALS)
    assert set(QUICK) <= BY_NAME.keys()
