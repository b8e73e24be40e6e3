"""The largest gaps around a long prompt, and the step histogram's growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.long_prompt import PHASES, largest_gaps
from bench.long_prompt import main as long_prompt
from bench.prometheus import difference, parse_histograms
from tests.bench.fake_server import Answer, honest, num_tokens
from tests.bench.test_command import in_thread

METRICS = """\
# TYPE paceline_step_duration_seconds histogram
paceline_step_duration_seconds_bucket{le="0.1"} 4.0
paceline_step_duration_seconds_bucket{le="+Inf"} 6.0
paceline_step_tokens_bucket{kind="prefill",le="64.0"} 2.0
paceline_ttft_seconds_bucket{le="+Inf"} 9.0
paceline_step_duration_seconds_count 6.0
"""


def test_gap_belongs_to_every_phase_it_overlaps() -> None:
    times = [0.0, 1.0, 3.0, 3.5, 9.0, 9.25]
    assert largest_gaps(times, sent_at=2.0, first_at=8.0) == {
        "before": 2.0,
        "during": 5.5,
        "after": 5.5,
    }
    assert largest_gaps(times, sent_at=1.0, first_at=3.5) == {
        "before": 1.0,
        "during": 2.0,
        "after": 5.5,
    }


@pytest.mark.parametrize("times", [[], [1.0]])
def test_stream_without_gaps_has_none(times: list[float]) -> None:
    assert set(largest_gaps(times, 0.5, 2.0).values()) == {0.0}


def test_histograms_named_step_are_read_with_their_labels() -> None:
    steps = parse_histograms(METRICS, containing="step")
    assert steps == {
        "paceline_step_duration_seconds": {"0.1": 4.0, "+Inf": 6.0},
        'paceline_step_tokens{kind="prefill"}': {"64.0": 2.0},
    }
    later = {"paceline_step_duration_seconds": {"0.1": 5.0, "+Inf": 9.0}, "other": {"1": 0.0}}
    assert difference(steps, later) == {"paceline_step_duration_seconds": {"0.1": 1.0, "+Inf": 3.0}}


def test_report_tells_the_gap_of_every_stream(tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> Answer:
        if num_tokens(body) > 300 and body.get("stream"):
            return honest(body, first=0.25)
        answer = honest(body, gap=0.02)
        parts = [
            (0.2 if index == 20 else delay, part)
            for index, (delay, part) in enumerate(answer.parts)
        ]
        return Answer(parts) if len(parts) > 20 else answer

    out = tmp_path / "r.json"
    with in_thread(script, METRICS) as fake:
        argv = ["--url", fake.url, "--streams", "3", "--stream-input", "10", "--out", str(out)]
        more = ["--stream-output", "40", "--long-input", "400", "--long-output", "2"]
        assert long_prompt([*argv, *more, "--lead", "0.1"]) == 0
    data = json.loads(out.read_text())
    assert data["schema"] == "paceline-bench-long-prompt/1"
    assert data["long_input"] == 400
    assert data["long_ttft_ms"] >= 250
    assert len(data["gaps_by_stream_ms"]) == 3
    assert all(max(row[phase] for phase in PHASES) >= 190 for row in data["gaps_by_stream_ms"])
    assert data["stream_errors"] == []


def test_streams_that_end_too_soon_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(lambda body: honest(body)) as fake:
        argv = ["--url", fake.url, "--streams", "2", "--stream-output", "1", "--long-input", "50"]
        assert long_prompt(argv) == 1
    assert "--stream-output" in capsys.readouterr().err
