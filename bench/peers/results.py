"""The comparison's figures: medians over repetitions, the JSON list, the table and the plot.

It owns bench/out/peers.json, a list of {server, clients, input, output, output_tokens_per_second,
ttft_p50, ttft_p95, tpot_p50} and more; latencies in seconds, since no unit is in their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.peers.loads import Cell
from bench.peers.rivals import Rival

CONTENDER = 0.9


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell of one server in one repetition; None where nothing succeeded."""

    server: str
    family: str
    variant: str
    repetition: int
    cell: Cell
    output_tokens_per_second: float
    total_seconds: float
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    failed: int
    mean_input: float | None
    mean_output: float | None
    start_seconds: float
    resident_mib: float | None


def measured(
    rival: Rival,
    repetition: int,
    cell: Cell,
    figures: dict[str, Any],
    *,
    start_seconds: float,
    resident_mib: float | None,
) -> Measured:
    def seconds(name: str, quantile: str) -> float | None:
        spread = figures[name]
        return spread[quantile] / 1e3 if spread else None

    return Measured(
        server=rival.name,
        family=rival.family,
        variant=rival.variant,
        repetition=repetition,
        cell=cell,
        output_tokens_per_second=figures["output_tokens_per_second"],
        total_seconds=figures["duration_seconds"],
        ttft_p50=seconds("ttft_ms", "p50"),
        ttft_p95=seconds("ttft_ms", "p95"),
        tpot_p50=seconds("tpot_ms", "p50"),
        failed=figures["requests"]["failed"] + figures["requests"]["cut"],
        mean_input=figures["mean_input_tokens"],
        mean_output=figures["mean_output_tokens"],
        start_seconds=start_seconds,
        resident_mib=resident_mib,
    )


def summarised(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """The list of peers.json: the median of each figure over the repetitions of a cell."""
    groups: dict[tuple[str, Cell], list[Measured]] = defaultdict(list)
    for run in runs:
        groups[run.server, run.cell].append(run)
    return [_summary(group) for group in groups.values()]


def _summary(group: Sequence[Measured]) -> dict[str, Any]:
    first, cell = group[0], group[0].cell

    def middle(name: str) -> float | None:
        values = [value for run in group if (value := getattr(run, name)) is not None]
        return median(values) if values else None

    names = ("output_tokens_per_second", "total_seconds", "ttft_p50", "ttft_p95", "tpot_p50")
    more = ("mean_input", "mean_output", "start_seconds", "resident_mib")
    return {
        "server": first.server,
        "clients": cell.clients,
        "input": cell.input + cell.shared_prefix,
        "output": cell.output,
        "shared_prefix": cell.shared_prefix,
        **{name: middle(name) for name in names},
        "family": first.family,
        "variant": first.variant,
        "requests": cell.requests,
        "repetitions": len(group),
        "failed": sum(run.failed for run in group),
        **{name: middle(name) for name in more},
    }


def contenders(runs: Sequence[Measured], rival: Rival, cells: Sequence[Cell]) -> list[Cell]:
    """The cells in which this variant led its family in the first run, or was near its best."""
    best: dict[Cell, float] = defaultdict(float)
    own: dict[Cell, float] = {}
    for run in runs:
        if run.family == rival.family and run.repetition == 0:
            best[run.cell] = max(best[run.cell], run.output_tokens_per_second)
            if run.server == rival.name:
                own[run.cell] = run.output_tokens_per_second
    return [cell for cell in cells if cell in own and own[cell] >= CONTENDER * best[cell]]


def raw(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    return [asdict(run) for run in runs]


def print_table(console: Console, summary: Sequence[dict[str, Any]], reference: str) -> None:
    """A row a server, a column a load: output tok/s (shared prefix: total s), then ratios."""
    loads = list(dict.fromkeys(_load(entry) for entry in summary))
    table = Table(
        title="output tok/s (shared prefix: total s), TTFT p95 s, TPOT p50 ms", title_justify="left"
    )
    table.add_column("server")
    for load in loads:
        table.add_column(_heading(load), justify="right")
    for server in dict.fromkeys(entry["server"] for entry in summary):
        cells = {_load(entry): entry for entry in summary if entry["server"] == server}
        table.add_row(server, *(_figures(cells.get(load)) for load in loads))
    table.add_section()
    table.add_row(
        f"{reference} / best rival", *(_ratio(summary, load, reference) for load in loads)
    )
    console.print(table)


Load = tuple[int, int, int, int]


def _load(entry: dict[str, Any]) -> Load:
    return entry["clients"], entry["input"], entry["output"], entry["shared_prefix"]


def _heading(load: Load) -> str:
    clients, num_input, output, prefix = load
    name = f"{prefix}+{num_input - prefix}" if prefix else str(num_input)
    return f"{name}/{output}\nx{clients}"


def _pace(entry: dict[str, Any]) -> float:
    """Higher is better, for every load."""
    if entry["shared_prefix"]:
        return 1.0 / entry["total_seconds"] if entry["ttft_p95"] is not None else 0.0
    return float(entry["output_tokens_per_second"])


def _figures(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["ttft_p95"] is None:
        return "-"
    shared = entry["shared_prefix"]
    pace = entry["total_seconds"] if shared else entry["output_tokens_per_second"]
    tpot = "-" if entry["tpot_p50"] is None else f"{entry['tpot_p50'] * 1e3:.0f}"
    failed = f" ({entry['failed']} failed)" if entry["failed"] else ""
    return f"{pace:.1f}{' s' if shared else ''}{failed}\n{entry['ttft_p95']:.2f} {tpot}"


def _ratio(summary: Sequence[dict[str, Any]], load: Load, reference: str) -> str:
    entries = [entry for entry in summary if _load(entry) == load]
    ours = [_pace(entry) for entry in entries if entry["server"] == reference]
    theirs = [_pace(entry) for entry in entries if entry["family"] != reference]
    if not ours or not theirs or not max(theirs):
        return "-"
    return f"{ours[0] / max(theirs):.2f} x"


def draw(path: Path, summary: Sequence[dict[str, Any]]) -> None:
    """Throughput, TTFT p95 and TPOT p50 of each server at each load, as grouped bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(_load(entry) for entry in summary))
    servers = list(dict.fromkeys(entry["server"] for entry in summary))
    panels = (
        ("output tokens per second", "output_tokens_per_second"),
        ("TTFT p95, s (log)", "ttft_p95"),
        ("TPOT p50, s (log)", "tpot_p50"),
    )
    figure = Figure(figsize=(max(8.0, 1.6 * len(loads)), 11), layout="constrained")
    FigureCanvasAgg(figure)
    group = 0.85  # of the place of a load
    width = group / max(1, len(servers))
    middle = (group - width) / 2
    for axes, (title, name) in zip(figure.subplots(3, 1), panels, strict=True):
        for number, server in enumerate(servers):
            cells = {_load(entry): entry for entry in summary if entry["server"] == server}
            heights = [(cells[load][name] or 0.0) if load in cells else 0.0 for load in loads]
            places = [place + number * width for place in range(len(loads))]
            axes.bar(places, heights, width, label=server, color=f"C{number}")
        axes.set(title=title, xticks=[place + middle for place in range(len(loads))])
        axes.set_xticklabels([_heading(load) for load in loads])
        axes.grid(visible=True, axis="y", alpha=0.3)
        if "log" in title and any(entry[name] for entry in summary):
            axes.set_yscale("log")
    figure.axes[0].legend(fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
