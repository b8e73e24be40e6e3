"""The alerts: made by their builder, tested by promtool, each with a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import objectives
from deploy.prometheus import build
from tests.deploy.promql import DEPLOY, alert_names, rule_list

PROMETHEUS = DEPLOY / "prometheus"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def alert_tests() -> list[dict[str, Any]]:
    found = []
    for path in sorted(PROMETHEUS.glob("*.test.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            found += case["alert_rule_test"]
    return found


@pytest.mark.parametrize("path", [build.RULES, build.CHART_COPY], ids=["prometheus", "chart"])
def test_committed_rules_are_what_the_builder_writes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == build.render()


@needs_promtool
def test_promtool_accepts_rules_and_configuration() -> None:
    rules = promtool("check", "rules", build.RULES.name)
    assert f"{len(rule_list())} rules found" in rules
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_unit_tests_of_the_rules_pass() -> None:
    assert "SUCCESS" in promtool("test", "rules", *(p.name for p in PROMETHEUS.glob("*.test.yaml")))


def test_each_alert_is_seen_firing_and_silent() -> None:
    cases = alert_tests()
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert firing == set(alert_names())
    # There is nothing to page about in silence either: each has a look-alike that must not fire.
    assert silent == set(alert_names())


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    text = (DEPLOY.parent / objectives.RUNBOOKS).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (Paceline\w+)\n+(.*?)(?=^#|\Z)", text, flags=re.M | re.S))
    assert sorted(sections) == sorted(alert_names())
    for name, body in sections.items():
        assert len(body.split()) > 30, f"the runbook of {name} says too little"
    for rule in rule_list():
        if "alert" in rule:
            anchor = f"{objectives.RUNBOOKS}#{rule['alert'].lower()}"
            assert rule["annotations"]["runbook"] == anchor


def test_alert_names_and_severities_are_well_formed() -> None:
    names = alert_names()
    assert len(set(names)) == len(names)
    for rule in rule_list():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"]["summary"].startswith("Paceline: ")
            assert "{{ $labels." in rule["annotations"]["description"]
