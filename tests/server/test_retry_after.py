"""The estimate for a refused client, and the filter of the request log."""

from __future__ import annotations

import logging

import pytest

from server.logs import keep_request_line
from server.retry_after import RetryAfter


def test_the_estimate_follows_the_measured_rate() -> None:
    slow, fast = RetryAfter(), RetryAfter()
    for i in range(20):
        fast.ended(100 + i * 0.1)
        slow.ended(100 + i * 1.0)
    assert fast.rate(102) == pytest.approx(10, rel=0.2)
    assert slow.rate(120) == pytest.approx(1, rel=0.2)
    assert slow.promise(10, 120) > 3 * fast.promise(10, 102)


def test_refused_clients_come_back_one_after_another() -> None:
    estimate = RetryAfter()
    for i in range(40):
        estimate.ended(100 + i * 0.5)
    waits = [estimate.promise(1, 120.0) for _ in range(200)]
    assert waits == sorted(waits)
    assert waits[0] == 1.0
    assert 15 < waits[39] < 25
    assert waits[-1] == 60.0
    assert estimate.promise(1, 200.0) == 1.0


def test_old_ends_do_not_count() -> None:
    estimate = RetryAfter()
    for i in range(100):
        estimate.ended(i * 0.01)
    assert estimate.rate(1000.0) == 1.0


def line(path: str) -> logging.LogRecord:
    arguments = ("127.0.0.1:1", "GET", path, "1.1", 200)
    return logging.LogRecord(
        "uvicorn.access", logging.INFO, "", 0, "%s %s %s %s %d", arguments, None
    )


def test_probes_are_not_logged_and_long_paths_are_cut() -> None:
    """B164: a client can not fill the log."""
    assert not keep_request_line(line("/health"))
    assert not keep_request_line(line("/metrics?x=1"))
    record = line("/v1/models?" + "x" * 10_000)
    assert keep_request_line(record)
    assert len(record.getMessage()) < 300
