"""The compose file: valid by its schema, open to this machine only, made of parts that fit."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from server.config import parse_settings
from tests.deploy.promql import DEPLOY

COMPOSE = DEPLOY / "compose" / "docker-compose.yaml"
PROVISIONING = DEPLOY / "grafana" / "provisioning"


def read(path: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed"
)
def test_compose_file_is_valid_by_its_schema() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ports_are_of_this_machine_only_and_images_are_pinned() -> None:
    for name, service in read(COMPOSE)["services"].items():
        assert service["ports"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        tag = service["image"].partition(":")[2]
        assert tag
        assert tag != "latest"


def test_server_outlives_its_drain_and_its_variables_are_settings() -> None:
    server = read(COMPOSE)["services"]["paceline"]
    variables = {key: value for key, value in server["environment"].items() if value is not None}
    settings = parse_settings([], variables)
    assert float(server["stop_grace_period"].removesuffix("s")) >= settings.server.drain_seconds + 5
    assert settings.server.open_metrics


def test_every_file_that_is_mounted_exists() -> None:
    mounted = 0
    for service in read(COMPOSE)["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("../"):
                assert (COMPOSE.parent / volume.partition(":")[0]).exists(), volume
                mounted += 1
    assert mounted == 4


def test_names_between_the_services_agree() -> None:
    services = read(COMPOSE)["services"]
    (scrape,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    (source,) = read(PROVISIONING / "datasources/prometheus.yaml")["datasources"]
    assert re.fullmatch(r"http://prometheus:9090", source["url"])
    (provider,) = read(PROVISIONING / "dashboards/paceline.yaml")["providers"]
    mounts = [volume.split(":") for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in [mount[1] for mount in mounts]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana/dashboards" / home.rpartition("/")[2]).exists()
    interval = read(DEPLOY / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
