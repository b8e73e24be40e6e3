"""Dashboards, alerts, autoscaling and the handbook name what the server really exports."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.objectives import OURS
from server.config import ServerConfig
from tests.deploy.promql import DEPLOY, expressions, grouping_labels, metrics, rule_list
from tests.support.http_server import house, in_loop

# What Prometheus itself adds to each series of a target.
TARGET_LABELS = {"job", "instance"}
Exported = dict[str, dict[str, set[str]]]
_SEEN: Exported = {}


@in_loop
async def _read_exposition() -> None:
    """Sample names with the values of their labels, after one answer and one refusal."""
    config = ServerConfig(api_keys=("team:sk-1",))
    async with house(config=config) as server:
        server.client.headers["authorization"] = "Bearer sk-1"
        await server.complete("x", max_tokens=2)
        await server.complete("x", max_tokens=-1)
        text = (await server.client.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = _SEEN.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)


@pytest.fixture(scope="module")
def exported() -> Exported:
    if not _SEEN:
        _read_exposition()
    recorded = {rule["record"]: {} for rule in rule_list() if "record" in rule}
    return {**_SEEN, **recorded, "up": {}}


def test_every_expression_names_metrics_that_the_server_exports(exported: Exported) -> None:
    checked = 0
    for where, expression in expressions():
        named = list(metrics(expression))
        assert named, f"{where}: no metric was found in {expression}"
        for name, _matchers in named:
            assert name in exported, f"{where}: the server does not export {name}"
            checked += 1
    assert checked > 100


def test_every_label_in_an_expression_exists(exported: Exported) -> None:
    for where, expression in expressions():
        known = set(TARGET_LABELS)
        for name, matchers in metrics(expression):
            known |= set(exported[name])
            for label, operator, value in matchers:
                if label in TARGET_LABELS:
                    continue
                values = exported[name].get(label)
                assert values is not None, f"{where}: {name} has no label {label}"
                # Reasons of refusals appear when they happen; those of ours are checked below.
                if name != "paceline_requests_refused_total" and operator in ("=", "=~"):
                    wanted = set(value.split("|")) if operator == "=~" else {value}
                    assert wanted <= values, f"{where}: {name} has no {label}={value}"
        assert grouping_labels(expression) <= known, where


def test_refusals_that_count_as_ours_are_codes_of_the_server() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (DEPLOY.parent / "server").glob("*.py")
    )
    for code in OURS:
        assert f'"{code}"' in source, f"the server knows no error code {code}"


def _documented() -> set[str]:
    text = (DEPLOY.parent / "docs/operations.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `((?:paceline_|vllm:)[\w:]+)`", text, flags=re.MULTILINE))


def test_handbook_lists_exactly_the_metrics_that_exist(exported: Exported) -> None:
    suffix = re.compile(r"_(bucket|count|sum|total|created|info)$")
    ours = {name for name in exported if name.startswith(("paceline_", "vllm:"))}
    bases = {suffix.sub("", name) for name in ours}
    documented = {suffix.sub("", name) for name in _documented()}
    assert documented == bases
