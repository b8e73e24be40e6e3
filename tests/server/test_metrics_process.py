"""One exposition for a server of two processes, whatever becomes of the second one."""

from __future__ import annotations

import os
import re
import signal
import time

import httpx
import psutil
import pytest

from tests.support.scripted_server import running_server

SERIES = re.compile(r"^([a-zA-Z_:]+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
GAUGES = (
    "paceline_requests_running",
    "paceline_requests_waiting",
    "paceline_kv_usage_ratio",
)


def scrape(client: httpx.Client) -> dict[str, float]:
    rows = SERIES.findall(client.get("/metrics").text)
    found = {name: float(value) for name, value in rows}
    assert len(found) == len(rows), "a series has one value"
    return found


def until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_counters_outlive_the_engine_process_and_its_gauges_do_not() -> None:
    """B122: the engine is killed in the midst of its work and comes back; a hundred scrapes."""
    counts = "_total", "_count", "_sum", "_bucket"
    with running_server("steady", "--log-level", "error") as (process, client):
        body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()
        children = psutil.Process(process.pid).children()
        (core,) = (one for one in children if "tests.support.scripted_core" in one.cmdline())
        last: dict[str, float] = {}
        for turn in range(100):
            if turn == 20:
                long = {**body, "max_tokens": 1000, "stream": True}
                with client.stream("POST", "/v1/completions", json=long) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    os.kill(core.pid, signal.SIGKILL)
                    assert any('"error"' in line for line in lines)
                found = scrape(client)
                assert [found[name] for name in GAUGES] == [0, 0, 0]
            if turn == 60:
                until_ready(client)
                client.post("/v1/completions", json=body).raise_for_status()
            found = scrape(client)
            assert last.keys() <= found.keys()
            for name, value in last.items():
                if name.partition("{")[0].endswith(counts):
                    assert found[name] >= value, name
            last = found
    assert last["paceline_generated_tokens_total"] > 10
    assert last['paceline_requests_finished_total{reason="length"}'] == 2
    assert last['paceline_requests_finished_total{reason="error"}'] == 1
