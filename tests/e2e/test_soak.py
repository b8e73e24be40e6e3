"""The real server under clients that hang up; `python -m tests.e2e.soak` is the long form."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.engines import default_model_path
from tests.e2e.soak import Load, check, running_server, soak

pytestmark = pytest.mark.model


@pytest.mark.timeout(900)  # torch alone, where nothing was compiled, takes minutes
def test_nothing_is_lost_when_a_third_of_200_clients_hang_up() -> None:
    """B017, B100, B107, B115: with a pool for a dozen of them."""
    default_model_path()
    load = Load(requests=200, clients=200, rounds=1, max_tokens=8)
    with running_server("--kv-memory", "16MiB", "--log-level", "warning") as (url, server):
        report = asyncio.run(soak(url, server, load))
    check(report, load)
