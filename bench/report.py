"""How results are shown: one JSON document, one table in the terminal.

It owns the report's schema and the table's columns. It must not know how figures are measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCHEMA = "paceline-bench/1"
NOTES = (
    "TTFT: sent to the first chunk that carries output. TPOT: (e2e - TTFT) / (n - 1) of a request. "
    "ITL: gaps between output chunks, pooled; a chunk may hold several tokens (tokens_per_chunk) "
    "and the gap is not divided. Normalised: e2e / n. Times in ms as the client saw them.",
    "Rates are over the whole run, from the first request sent to the last answer, ramp included. "
    "Failed requests count in errors only; none is tried again. After 429, 503 or a failed connect "
    "a closed-loop client waits Retry-After (1 s if unsaid, 10 s at most); an open loop never.",
)


def level_report(
    *, name: str, load: str, settings: dict[str, Any], figures: dict[str, Any]
) -> dict[str, Any]:
    return {"level": name, "load": load, "settings": settings, **figures}


def document(
    *, target: dict[str, Any], settings: dict[str, Any], levels: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "target": target,
        "settings": settings,
        "notes": list(NOTES),
        "levels": list(levels),
    }


def write_json(path: Path, data: Any) -> None:
    """Write through a neighbour file, so that a reader never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def print_levels(console: Console, levels: Sequence[dict[str, Any]], slo: str | None) -> None:
    console.print(_rates(levels, slo))
    console.print(_latencies(levels))
    for level in levels:
        for line in _remarks(level):
            console.print(f"  {level['load']}, {level['level']}: {line}", markup=False)
    if slo:
        console.print(f"  goodput: requests per second within {slo} (ms)", markup=False)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    return table


def _rates(levels: Sequence[dict[str, Any]], slo: str | None) -> Table:
    columns = ["load", "level", "ok", "failed", "output tok/s", "total tok/s", "req/s"]
    table = _table("Throughput", columns + (["goodput/s"] if slo else []))
    for level in levels:
        cells = [
            str(level["requests"]["ok"]),
            str(level["requests"]["failed"]),
            f"{level['output_tokens_per_second']:.1f}",
            f"{level['total_tokens_per_second']:.1f}",
            f"{level['requests_per_second']:.2f}",
        ]
        if slo:
            cells.append(f"{level['goodput_per_second']:.2f}")
        table.add_row(level["load"], level["level"], *cells)
    return table


def _latencies(levels: Sequence[dict[str, Any]]) -> Table:
    names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    table = _table("Latency, ms", ("load", "level", "", "TTFT", "TPOT", "ITL", "e2e"))
    for level in levels:
        first = (level["load"], level["level"])
        for quantile in ("p50", "p90", "p99"):
            cells = [_short((level[name] or {}).get(quantile)) for name in names]
            table.add_row(*first, quantile, *cells, end_section=quantile == "p99")
            first = ("", "")
    return table


def _remarks(level: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting a row."""
    lines = [
        f"{count} x {kind}: {level['error_examples'][kind][:150]}"
        for kind, count in sorted(level["errors"].items())
    ]
    if level["requests"]["cut"]:
        lines.append(f"{level['requests']['cut']} requests cut by the end of the run")
    per_chunk = level["tokens_per_chunk"]
    if per_chunk and per_chunk > 1.05 and level["tokens_counted_by"] == ["usage"]:
        lines.append(f"{per_chunk:.2f} tokens a chunk, so ITL is longer than the time of a token")
    if "chunks" in level["tokens_counted_by"]:
        lines.append("output tokens counted by chunks: the server reports no usage")
    wanted, got = level["settings"].get("output"), level["mean_output_tokens"]
    if wanted and got and got < wanted * 0.98:
        lines.append(f"answers ended early: {got:.1f} of {wanted} tokens on average")
    lag = level["client"]["send_lag_ms"]
    if lag and lag["p99"] > 20:
        lines.append(f"the client itself was late: send lag p99 {lag['p99']:.0f} ms")
    if level["cached_tokens"]:
        lines.append(f"{level['cached_tokens']} prompt tokens came from the prefix cache")
    return lines


def _short(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return "-"
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
