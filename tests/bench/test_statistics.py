"""Percentiles, rates, goodput and error counts over records made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import Run
from bench.records import RequestRecord
from bench.statistics import Slo, percentile, spread_ms, summarise


def good(ttft: float, e2e: float, tokens: int = 5, **more: object) -> RequestRecord:
    fields = {"sent_at": 0.0, "lag_seconds": 0.0, "num_chunks": tokens, "input_tokens": 10} | more
    return RequestRecord(e2e_seconds=e2e, ttft_seconds=ttft, output_tokens=tokens, **fields)


def bad(kind: str) -> RequestRecord:
    return RequestRecord(0.0, 0.0, 0.1, error=kind, message=f"because {kind}")


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
)
def test_percentile_is_numpys(values: list[float], quantile: float) -> None:
    ours = percentile(sorted(values), quantile)
    assert ours == pytest.approx(float(np.quantile(values, quantile)), rel=1e-9, abs=1e-9)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    slo = Slo.parse("ttft:1000,tpot:500,e2e:4000")
    records = (
        good(0.5, 2.5),  # tpot 500 ms: at the limit is good
        good(1.5, 2.5),  # late first token
        good(0.1, 2.2),  # tpot 525 ms
        good(0.9, 4.5, tokens=20),  # e2e
        good(0.5, 0.5, tokens=1),  # one token has no tpot to miss
        bad("http_429"),
    )
    figures = summarise(Run(records, 4.0, 0.0, 0), slo)
    assert figures["goodput_per_second"] == 2 / 4.0
    assert summarise(Run(records, 4.0, 0.0, 0), None)["goodput_per_second"] is None


def test_rates_count_good_requests_over_the_whole_run() -> None:
    records = (good(0.5, 2.0, tokens=6), good(0.5, 2.0, tokens=4), bad("timeout"), bad("timeout"))
    figures = summarise(Run(records, 5.0, 0.5, 3), None)
    assert figures["requests"] == {"ok": 2, "failed": 2, "cut": 3}
    assert figures["errors"] == {"timeout": 2}
    assert figures["error_examples"] == {"timeout": "because timeout"}
    assert figures["output_tokens_per_second"] == 2.0
    assert figures["total_tokens_per_second"] == 6.0
    assert figures["requests_per_second"] == 0.4
    assert figures["client"]["cpu_share"] == 0.1


def test_itl_pools_the_gaps_of_all_requests() -> None:
    records = (good(0.1, 1.0, gaps=(0.1, 0.1, 0.1)), good(0.1, 1.0, gaps=(0.5,)))
    itl = summarise(Run(records, 1.0, 0.0, 0), None)["itl_ms"]
    assert itl["mean"] == pytest.approx(200.0)
    assert itl["p50"] == pytest.approx(100.0)
    assert itl["max"] == pytest.approx(500.0)


def test_a_run_without_success_has_no_latencies() -> None:
    figures = summarise(Run((bad("connect"),), 1.0, 0.0, 0), Slo.parse("ttft:1"))
    assert figures["ttft_ms"] is None
    assert figures["goodput_per_second"] == 0.0
    assert figures["tokens_per_chunk"] is None
    assert spread_ms([None]) is None


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:-1", "itl:5", "ttft:nan", "ttft:inf"])
def test_bad_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME:MS"):
        Slo.parse(text)
