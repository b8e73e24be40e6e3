"""Writes paceline.rules.yaml: recording rules and alerts, from the objectives of the service.

Owns every alert, its threshold and its words; how to answer one is in docs/operations.md. Run it as
`python -m deploy.prometheus.build` from the root; a test compares the file with its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.objectives import OURS, RUNBOOKS, SHARE_ANSWERED, SHARE_WITHIN

RULES = Path(__file__).with_name("paceline.rules.yaml")
# The Helm chart can only read files of its own folder.
CHART_COPY = RULES.parent.parent / "helm" / "paceline" / "files" / "paceline.rules.yaml"
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
HEADER = "# Made by deploy/prometheus/build.py and deploy/objectives.py; change those.\n"


def build() -> dict[str, Any]:
    return {
        "groups": [
            {"name": "paceline-objectives", "rules": _recordings()},
            {"name": "paceline-budgets", "rules": _budget_alerts()},
            {"name": "paceline-server", "rules": _server_alerts()},
        ]
    }


def render() -> str:
    return HEADER + yaml.dump(build(), Dumper=_Dumper, sort_keys=False, width=1000)


# --- the share of the budget that is spent --------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """A promise: how large a share of what happened may be bad.

    `bad` and `all` are PromQL of rates by job; `{w}` in them is the window.
    """

    name: str
    record: str
    words: str
    share: float
    bad: str
    all: str

    def ratio(self, window: str) -> str:
        """NaN where nothing happened, and NaN fires no alert."""
        bad, every = (text.replace("{w}", window) for text in (self.bad, self.all))
        return f"({bad})\n/ ({every})"

    def burns(self, long: str, short: str, factor: float) -> str:
        limit = f"{factor * self.share:.6g}"
        return f"{self.record}_rate{long} > {limit}\nand {self.record}_rate{short} > {limit}"

    def at_least(self, count: int, window: str) -> str:
        """So many bad ones, lest one of ten requests at night wakes somebody."""
        bad = self.bad.replace("rate(", "increase(").replace("{w}", window)
        return f"({bad}) >= {count}"


def _slow(slo: str) -> dict[str, str]:
    """The server counts who kept its limits when an answer ends."""
    counted = "paceline_slo_requests_total"
    return {
        "bad": f'sum by (job) (rate({counted}{{slo="{slo}", met="false"}}[{{w}}]))',
        "all": f'sum by (job) (rate({counted}{{slo="{slo}"}}[{{w}}]))',
    }


def _failed() -> dict[str, str]:
    """Sequences ended by an error and refusals that are ours, of everything that asked."""
    ended = "sum by (job) (rate(paceline_requests_finished_total[{w}]))"
    errors = 'sum by (job) (rate(paceline_requests_finished_total{reason="error"}[{w}]))'
    ours = "|".join(OURS)
    refused = f'sum by (job) (rate(paceline_requests_refused_total{{reason=~"{ours}"}}[{{w}}]))'
    # A refusal of a kind that never happened has no series: then it is 0.
    refused = f"({refused} or 0 * {ended})"
    return {"bad": f"{errors} + {refused}", "all": f"{ended} + {refused}"}


BUDGETS = (
    Budget(
        "TTFT",
        "job:paceline_ttft_slow:ratio",
        "requests whose first token came too late",
        1 - SHARE_WITHIN,
        **_slow("ttft"),
    ),
    Budget(
        "TPOT",
        "job:paceline_tpot_slow:ratio",
        "answers whose tokens came too slowly",
        1 - SHARE_WITHIN,
        **_slow("tpot"),
    ),
    Budget(
        "Error",
        "job:paceline_failed:ratio",
        "requests that failed or were refused for a reason of ours",
        1 - SHARE_ANSWERED,
        **_failed(),
    ),
)


def _recordings() -> list[dict[str, Any]]:
    return [
        {"record": f"{budget.record}_rate{window}", "expr": budget.ratio(window)}
        for budget in BUDGETS
        for window in WINDOWS
    ]


def _budget_alerts() -> list[dict[str, Any]]:
    """Two windows each, so that an alert comes fast, and ends soon after its cause."""
    found = []
    for budget in BUDGETS:
        fast = f"({budget.burns('1h', '5m', 14.4)})\nor\n({budget.burns('6h', '30m', 6)})"
        found.append(
            _alert(
                f"Paceline{budget.name}BudgetBurnsFast",
                f"({fast})\nand {budget.at_least(10, '6h')}",
                "2m",
                "page",
                f"{budget.words} spend a month's budget of {budget.share:.1%} within days",
                "{{ $value | humanizePercentage }} over the last hours at {{ $labels.job }}.",
            )
        )
        found.append(
            _alert(
                f"Paceline{budget.name}BudgetBurnsSlowly",
                f"{budget.burns('3d', '6h', 1)}\nand {budget.at_least(10, '3d')}",
                "1h",
                "ticket",
                f"{budget.words} spend more than the budget of {budget.share:.1%}",
                "{{ $value | humanizePercentage }} over three days at {{ $labels.job }}.",
            )
        )
    return found


# --- the state of a server ------------------------------------------------------------------------

_WORK = "paceline_requests_running + paceline_requests_waiting > 0"
_QUEUES = "|".join(reason for reason in OURS if reason.endswith("queue_full"))
_STEPS = "sum without (kind) (increase(paceline_step_seconds_count[2m]))"


def _server_alerts() -> list[dict[str, Any]]:
    return [
        _alert(
            "PacelineDown",
            'up{job=~".*paceline.*"} == 0',
            "1m",
            "page",
            "a server does not answer Prometheus",
            "{{ $labels.instance }} of {{ $labels.job }} has not been scraped for a minute.",
        ),
        _alert(
            "PacelineEngineStuck",
            f"paceline_engine_silence_seconds > 30\nor ({_WORK}) and {_STEPS} == 0",
            "1m",
            "page",
            "requests are there, but the engine takes no step",
            "The engine of {{ $labels.instance }} does nothing for the requests that it has.",
        ),
        _alert(
            "PacelineEngineNotReady",
            "paceline_engine_ready == 0",
            "10m",
            "page",
            "a server has no engine that takes requests",
            "{{ $labels.instance }} has been loading, failing or draining for ten minutes.",
        ),
        _alert(
            "PacelineEngineRestarts",
            "changes(paceline_engine_ready[30m]) >= 4",
            "0m",
            "page",
            "the engine dies again and again",
            "The engine of {{ $labels.instance }} came and went {{ $value }} times in 30 minutes.",
        ),
        _alert(
            "PacelineEngineUnavailable",
            "sum by (job, instance) "
            '(rate(paceline_requests_refused_total{reason="engine_unavailable"}[5m])) > 0',
            "1m",
            "page",
            "requests are refused since there is no engine",
            "{{ $value | humanize }} requests a second at {{ $labels.instance }} got a 503.",
        ),
        _alert(
            "PacelineQueueFull",
            "sum by (job, instance) "
            f'(rate(paceline_requests_refused_total{{reason=~"{_QUEUES}"}}[5m]))'
            " > 0",
            "5m",
            "page",
            "requests are refused since the queue is full",
            "{{ $value | humanize }} requests a second at {{ $labels.instance }} got a 429.",
        ),
        _alert(
            "PacelineQueueGrows",
            "min_over_time(paceline_requests_waiting[10m]) > 8\n"
            "and deriv(paceline_requests_waiting[10m]) > 0.01",
            "5m",
            "ticket",
            "more requests come than can be served",
            "At least {{ $value }} sequences have waited at {{ $labels.instance }} for ten minutes,"
            " and it gets more.",
        ),
        _alert(
            "PacelineKVPressure",
            "min_over_time(paceline_kv_usage_ratio[10m]) > 0.9\n"
            "and min_over_time(paceline_requests_waiting[10m]) > 0",
            "5m",
            "ticket",
            "KV memory, not compute, decides how many requests run",
            "{{ $value | humanizePercentage }} of the KV blocks of {{ $labels.instance }} are held,"
            " and requests wait.",
        ),
        _alert(
            "PacelinePreemptionStorm",
            "rate(paceline_recomputed_tokens_total[5m])\n"
            "/ sum without (kind) (rate(paceline_step_tokens_total[5m])) > 0.1",
            "5m",
            "ticket",
            "a tenth of the work is done twice after preemptions",
            "{{ $value | humanizePercentage }} of the tokens that {{ $labels.instance }} computes"
            " were computed before.",
        ),
        _alert(
            "PacelineLoopLag",
            "histogram_quantile(\n  0.99,\n  sum by (job, instance, le) "
            "(rate(paceline_event_loop_lag_seconds_bucket[5m]))\n) > 0.1",
            "5m",
            "ticket",
            "the API process is late, so every stream stutters",
            "The event loop of {{ $labels.instance }} wakes {{ $value | humanizeDuration }} late"
            " (p99).",
        ),
    ]


def _alert(
    name: str, expr: str, wait: str, severity: str, summary: str, description: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {
            "summary": f"Paceline: {summary}",
            "description": description,
            "runbook": f"{RUNBOOKS}#{name.lower()}",
        },
    }


# --- writing --------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines as blocks, which is how people read them."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def main() -> None:
    for path in (RULES, CHART_COPY):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
