"""Many records summed up: percentiles, throughput, goodput, error counts.

It owns the definitions of the figures of a run. It must not know HTTP or how results are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load import Run
from bench.records import RequestRecord

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SLO_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must meet to count as good, in ms; absent ones always hold."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse "ttft:2000,tpot:100"; raises ValueError with a message for people."""
        limits = []
        for part in text.split(","):
            name, colon, value = part.strip().partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in SLO_NAMES or not colon or not 0 < limit < math.inf:
                raise ValueError(f"{part!r} is not NAME:MS with NAME of {', '.join(SLO_NAMES)}")
            limits.append((name, limit))
        return cls(tuple(limits))

    def met_by(self, record: RequestRecord) -> bool:
        """A request of one token has no TPOT, so it cannot miss that limit."""
        times = {
            "ttft": record.ttft_seconds,
            "tpot": record.tpot_seconds,
            "e2e": record.e2e_seconds,
        }
        return record.error is None and all(
            (seconds := times[name]) is None or seconds * 1e3 <= limit
            for name, limit in self.limits
        )


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Linear interpolation between the two nearest ranks (numpy's default) of sorted values."""
    position = (len(ordered) - 1) * quantile
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread_ms(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Percentiles, mean and maximum in ms; None if nothing was measured."""
    ordered = sorted(value for value in seconds if value is not None)
    if not ordered:
        return None
    spread = {name: percentile(ordered, quantile) * 1e3 for name, quantile in QUANTILES.items()}
    return spread | {"mean": math.fsum(ordered) / len(ordered) * 1e3, "max": ordered[-1] * 1e3}


def summarise(run: Run, slo: Slo | None) -> dict[str, Any]:
    """The figures of one run as plain JSON data; times in ms, rates per second of the run."""
    good = [record for record in run.records if record.error is None]
    bad = [record for record in run.records if record.error is not None]
    seconds = max(run.duration_seconds, 1e-9)
    output = sum(record.output_tokens for record in good)
    inputs = [record.input_tokens for record in good if record.input_tokens is not None]
    chunks = sum(record.num_chunks for record in good)
    return {
        "requests": {"ok": len(good), "failed": len(bad), "cut": run.num_cut},
        "errors": dict(Counter(str(record.error) for record in bad)),
        "error_examples": {str(record.error): record.message for record in reversed(bad)},
        "finish_reasons": dict(Counter(str(record.finish_reason) for record in good)),
        "duration_seconds": run.duration_seconds,
        "input_tokens": sum(inputs) if inputs else None,
        "cached_tokens": sum(record.cached_tokens or 0 for record in good),
        "output_tokens": output,
        "tokens_counted_by": sorted({record.counted_by for record in good}),
        "tokens_per_chunk": output / chunks if chunks else None,
        "mean_input_tokens": sum(inputs) / len(inputs) if inputs else None,
        "mean_output_tokens": output / len(good) if good else None,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (output + sum(inputs)) / seconds,
        "goodput_per_second": (
            sum(slo.met_by(record) for record in run.records) / seconds if slo else None
        ),
        "ttft_ms": spread_ms(record.ttft_seconds for record in good),
        "tpot_ms": spread_ms(record.tpot_seconds for record in good),
        "itl_ms": spread_ms(gap for record in good for gap in record.gaps),
        "e2e_ms": spread_ms(record.e2e_seconds for record in good),
        "normalised_ms": spread_ms(record.normalised_seconds for record in good),
        "client": {
            "cpu_share": run.client_cpu_seconds / seconds,
            "send_lag_ms": spread_ms(record.lag_seconds for record in run.records),
        },
    }
