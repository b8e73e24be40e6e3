"""The plot is drawn whatever was measured, without a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.plot import draw_levels

NOTHING = None
ZERO = {"p50": 0.0, "p90": 0.0, "p99": 0.0}
SOME = {"p50": 0.0, "p90": 1.0, "p99": 3.0}


def level(spread: dict[str, float] | None) -> dict[str, Any]:
    latencies = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"), spread)
    return {"load": "128/64", "level": "1 client", "output_tokens_per_second": 1.0, **latencies}


@pytest.mark.parametrize(
    "spreads", [[NOTHING], [ZERO], [SOME], [NOTHING, SOME], [ZERO, NOTHING], [SOME, ZERO]]
)
def test_plot_needs_no_positive_latency(
    tmp_path: Path, spreads: list[dict[str, float] | None]
) -> None:
    path = tmp_path / "new" / "p.png"
    draw_levels(path, [level(spread) for spread in spreads], "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
