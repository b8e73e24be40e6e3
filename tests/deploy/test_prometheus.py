"""A real Prometheus reads a loaded server and tells what its clients saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.deploy.check_prometheus import compare, loaded
from tests.deploy.real_prometheus import installed
from tests.support.scripted_server import running_server


@pytest.mark.skipif(not installed(), reason="prometheus is not installed")
def test_prometheus_counts_and_times_what_the_clients_saw() -> None:
    with (
        running_server("ready") as (_process, client),
        loaded(str(client.base_url).rstrip("/"), num_requests=40, concurrency=8) as (
            prometheus,
            seen,
        ),
    ):
        assert compare(prometheus, seen, is_quiet=False).startswith("40 requests, ")
        # Had the clients seen anything else, it would have been noticed.
        one, rest = seen[0], seen[1:]
        for others in (
            rest,
            [replace(one, completion_tokens=one.completion_tokens + 1), *rest],
            [replace(one, server_ttft_seconds=one.server_ttft_seconds + 2.0), *rest],
        ):
            with pytest.raises(AssertionError, match="Prometheus says"):
                compare(prometheus, others, is_quiet=False)
        slow = [replace(each, ttft_seconds=each.ttft_seconds + 2.0) for each in seen]
        with pytest.raises(AssertionError, match="p50 TTFT: Prometheus says"):
            compare(prometheus, slow)
