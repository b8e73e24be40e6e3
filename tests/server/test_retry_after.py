"""The estimate for a refused client, and the filter of the request log."""

from __future__ import annotations

import logging

import pytest

from server.middleware import RequestContext
from server.request_log import fields_of, log_request
from server.retry_after import RetryAfter


def test_the_estimate_follows_the_measured_rate() -> None:
    slow, fast = RetryAfter(), RetryAfter()
    for estimate in (slow, fast):
        estimate.observe(9, 100)
    for i in range(1, 21):
        fast.ended(100 + i * 0.1)
        slow.ended(100 + i * 1.0)
    assert fast.rate(102) == pytest.approx(10, rel=0.2)
    assert slow.rate(120) == pytest.approx(1, rel=0.2)
    assert slow.promise(10, 120) > 3 * fast.promise(10, 102)


def test_refused_clients_come_back_one_after_another() -> None:
    estimate = RetryAfter()
    estimate.observe(9, 100.0)
    for i in range(1, 41):
        estimate.ended(100 + i * 0.5)
    waits = [estimate.promise(1, 120.0) for _ in range(200)]
    assert waits == sorted(waits)
    assert waits[0] == 1.0
    assert 15 < waits[39] < 25
    assert waits[-1] == 60.0
    estimate.observe(0, 121.0)
    assert estimate.promise(1, 200.0) == 1.0


def test_old_ends_do_not_count() -> None:
    estimate = RetryAfter()
    estimate.observe(9, 0.0)
    for i in range(100):
        estimate.ended(i * 0.01)
    estimate.observe(0, 1.0)
    assert estimate.rate(1000.0) == 1.0


def test_time_in_which_nobody_waited_does_not_count() -> None:
    """Requests that came one by one, and a queue now and then: its ends tell the pace."""
    estimate = RetryAfter()
    for i in range(10):
        at = 100.0 + 2.5 * i
        estimate.ended(at)
        estimate.observe(3, at + 1.0)
        for j in range(1, 4):
            estimate.ended(at + 1.0 + 0.1 * j)
        estimate.observe(0, at + 1.3)
    assert estimate.rate(125.0) == pytest.approx(10.0)
    assert estimate.wait(20, 125.0) == pytest.approx(2.0)


def test_a_silence_of_those_who_run_makes_the_promise_longer() -> None:
    """Answers that take minutes: no end in the window is no rate of one a second."""
    estimate = RetryAfter()
    estimate.observe(9, 0.0)
    for i in range(1, 21):
        estimate.ended(0.1 * i)
    assert estimate.rate(2.0) == pytest.approx(10.0)
    assert estimate.rate(20.0) == pytest.approx(1.0)
    assert estimate.rate(52.0) == pytest.approx(1 / 50)
    assert estimate.promise(1, 52.0) == pytest.approx(50.0)
    first = RetryAfter()
    first.observe(3, 100.0)
    assert first.promise(1, 100.0) == 1.0
    assert first.promise(1, 130.0) == pytest.approx(30.0)
    first.observe(0, 140.0)  # nobody waits: the time says nothing any more
    assert first.rate(200.0) == 1.0


def scope(path: str) -> dict[str, object]:
    return {"path": path, "method": "GET", "client": ("127.0.0.1", 1), "headers": []}


def test_probes_are_not_logged_and_long_paths_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    """B164: a client can not fill the log."""
    caplog.set_level(logging.INFO)
    context = RequestContext("a", 0.0)
    log_request(context, scope("/health"), 200, 1.0)
    log_request(context, scope("/metrics"), 200, 1.0)
    assert not caplog.records
    log_request(context, scope("/v1/" + "x" * 10_000), 404, 1.0)
    assert len(caplog.records) == 1
    assert len(str(fields_of(context, scope("/v1/" + "x" * 10_000), 404, 1.0))) < 500
