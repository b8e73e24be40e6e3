"""A PNG of a report: latency percentiles and throughput against the load.

It owns the drawing and is the only file that knows matplotlib, which is imported when drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"))
LINES = (("p50", "-"), ("p90", "--"), ("p99", ":"))


def draw_levels(path: Path, levels: Sequence[dict[str, Any]], title: str) -> None:
    """One panel for throughput, one for each latency, one line colour for each load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(14, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    throughput, *panels = figure.subplots(2, 2).flat
    loads = list(dict.fromkeys(level["load"] for level in levels))
    for number, load in enumerate(loads):
        chosen = [level for level in levels if level["load"] == load]
        ticks = [level["level"] for level in chosen]
        places = list(range(len(chosen)))
        color = f"C{number}"
        rates = [level["output_tokens_per_second"] for level in chosen]
        throughput.plot(places, rates, "o-", color=color, label=load)
        throughput.set(title="output tokens per second", xticks=places, xticklabels=ticks)
        for panel, (name, heading) in zip(panels, PANELS, strict=True):
            for quantile, style in LINES:
                values = [(level[name] or {}).get(quantile) for level in chosen]
                shown = [value or float("nan") for value in values]  # 0 has no place on a log axis
                label = f"{load} {quantile}"
                panel.plot(places, shown, marker=".", linestyle=style, color=color, label=label)
            panel.set(title=f"{heading}, ms", xticks=places, xticklabels=ticks)
            if any((level[name] or {}).get("p99") for level in levels):
                panel.set_yscale("log")
                # 20 and 50, not 2 x 10^1.
                panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                panel.yaxis.set_major_formatter("{x:g}")
                panel.yaxis.set_minor_locator(NullLocator())
    for panel in (throughput, *panels):
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="small")
    fastest = max((level["output_tokens_per_second"] for level in levels), default=0.0)
    throughput.set_ylim(0, 1.1 * fastest or 1.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
