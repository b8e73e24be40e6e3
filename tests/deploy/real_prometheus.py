"""A real Prometheus that scrapes one server, with our rules loaded, for as long as a test needs it.

Owns the process, its folder and its port, and puts questions to it. Knows nothing of what is asked.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.prometheus.build import RULES

CONFIG = RULES.with_name("prometheus.yml")
START_SECONDS = 30.0


def installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """Answers PromQL over HTTP."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=20.0)

    def close(self) -> None:
        self._client.close()

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises AssertionError where Prometheus refuses it."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def number(self, expression: str) -> float:
        """The value of a query with one series; NaN where there is none."""
        series = self.query(expression)
        assert len(series) <= 1, expression
        return float(series[0]["value"][1]) if series else float("nan")

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Those kept of the last hour, each with its labels and value."""
        now = time.time()
        params = {"query": expression, "start": str(now - 3600), "end": str(now + 60)}
        answer = self._client.get("/api/v1/query_exemplars", params=params).json()
        assert answer["status"] == "success", answer
        return [one for series in answer["data"] for one in series["exemplars"]]

    def rules(self) -> list[dict[str, Any]]:
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_for_scrape_after(self, instant: float, timeout_seconds: float = 30.0) -> None:
        """Until every target was read after `instant`, in seconds since the epoch."""
        deadline = time.monotonic() + timeout_seconds
        while not self.number("min(timestamp(paceline_requests_running))") > instant:
            assert time.monotonic() < deadline, "Prometheus does not scrape the server"
            time.sleep(0.1)


@contextmanager
def running_prometheus(target: str, *, scrape_seconds: int = 1) -> Iterator[Prometheus]:
    """Our configuration and rules, but for the target and a shorter interval."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    interval = f"{scrape_seconds}s"
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    with tempfile.TemporaryDirectory(prefix="paceline-prometheus-") as folder:
        shutil.copy(RULES, folder)
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        port = _free_port()
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                    "--enable-feature=exemplar-storage",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            try:
                _wait_until_ready(prometheus, process, Path(folder) / "log")
                yield prometheus
            finally:
                prometheus.close()
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait_until_ready(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not prometheus.is_ready():
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
