"""A share of tests/server/check_timelines.py: real processes, a client of its own, real time."""

from __future__ import annotations

import pytest

from tests.server.check_timelines import bodies, check
from tests.support.scripted_server import running_server


@pytest.mark.timeout(120)
def test_phases_add_up_to_the_clients_time_under_load() -> None:
    load = bodies(140, shortest=20, longest=40)
    with running_server("steady", "--log-level", "warning") as (_process, client):
        verdict = check(str(client.base_url), load, 70)
    assert verdict.num_requests == 140
    assert verdict.num_preempted > 0
    assert verdict.num_cached > 40
    # The rest is for a busy machine, where something else holds the server up before it can read.
    assert len(verdict.off) <= 14, verdict.off
