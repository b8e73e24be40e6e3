"""What PromQL expressions of rules and dashboards name: metrics, labels and their values.

A scanner of the few forms that we write, not a parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.latency import latency
from deploy.grafana.scheduler import scheduler
from deploy.prometheus import build as rules

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_METRIC = re.compile(r"(?<![\w:$])((?:\w+:)*(?:paceline_|vllm:)[\w:]+|up\b)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")


def metrics(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each metric that is named, with its label matchers: (label, operator, value)."""
    for match in _METRIC.finditer(expression):
        yield match[1], _MATCHER.findall(match[2] or "")


def grouping_labels(expression: str) -> set[str]:
    return {label for group in _GROUPING.findall(expression) for label in _NAME.findall(group)}


def rule_list() -> list[dict[str, Any]]:
    return [rule for group in rules.build()["groups"] for rule in group["rules"]]


def alert_names() -> list[str]:
    return [rule["alert"] for rule in rule_list() if "alert" in rule]


def dashboard_list() -> list[dict[str, Any]]:
    return [latency(), scheduler()]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """(dashboard / panel, the panel) of every panel that shows something."""
    for board in dashboard_list():
        for panel in board["panels"]:
            if panel["type"] != "row":
                yield f"{board['title']} / {panel['title']}", panel


def expressions() -> Iterator[tuple[str, str]]:
    """(where it stands, PromQL) of all rules, panels and autoscaling queries."""
    for rule in rule_list():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for where, panel in panels():
        for target in panel["targets"]:
            yield where, target["expr"]
    values = yaml.safe_load((DEPLOY / "helm/paceline/values.yaml").read_text(encoding="utf-8"))
    for trigger in values["autoscaling"]["keda"]["triggers"]:
        yield f"KEDA {trigger['name']}", trigger["query"]


def with_windows(expression: str, window: str = "1m") -> str:
    """Grafana's variables filled in, as for all servers."""
    expression = expression.replace("$__rate_interval", window)
    return expression.replace("$job", ".*").replace("$instance", ".*")
