"""A real Prometheus reads a loaded server and tells what its clients saw."""

from __future__ import annotations

import pytest

from tests.deploy.check_prometheus import measure
from tests.deploy.real_prometheus import installed
from tests.support.scripted_server import running_server


@pytest.mark.skipif(not installed(), reason="prometheus is not installed")
def test_prometheus_counts_and_times_what_the_clients_saw() -> None:
    with running_server("ready") as (_process, client):
        line = measure(str(client.base_url).rstrip("/"), num_requests=40, concurrency=8)
    assert line.startswith("40 requests, ")
