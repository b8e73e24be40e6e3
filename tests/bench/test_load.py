"""Closed and open loops against a scripted server: what is sent when, and how failures count."""

from __future__ import annotations

import asyncio
import itertools
import socket
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bench.http_stream import HttpClient
from bench.load import Driver, Job, Limits, Run, gamma_arrivals
from bench.records import RequestRecord
from bench.target import Target
from tests.bench.fake_server import DONE, Answer, FakeServer, Script, chunk, client_of, fake_server
from tests.bench.fake_server import honest as honest_answer

LIMITS = Limits(request_seconds=5.0, run_seconds=20.0)


def drive(
    script: Script,
    load: Callable[[Driver, list[Job]], Any],
    *,
    count: int = 6,
    limits: Limits = LIMITS,
    due: list[float] | None = None,
) -> tuple[Run, FakeServer]:
    async def run() -> tuple[Run, FakeServer]:
        async with fake_server(script) as fake, client_of(fake) as client:
            target = Target(client, "completions", "fake")
            times = due or [0.0] * count
            jobs = [Job(target.path, target.body("a b", 3), seconds) for seconds in times]
            seen: list[RequestRecord] = []
            driver = Driver(client, limits, seen.append)
            result = await load(driver, jobs)
            assert tuple(seen) == result.records
            return result, fake

    return asyncio.run(run())


def errors(run: Run) -> dict[str | None, int]:
    return dict(Counter(record.error for record in run.records))


def test_known_delays_bound_the_times() -> None:
    run, _ = drive(
        lambda body: honest_answer(body, first=0.08, gap=0.04), lambda d, jobs: d.closed(jobs, 2)
    )
    assert errors(run) == {None: 6}
    for record in run.records:
        assert record.ttft_seconds is not None
        assert record.ttft_seconds >= 0.08
        assert record.output_tokens == record.num_chunks == 3
        assert sum(record.gaps) >= 0.079
        assert record.e2e_seconds >= record.ttft_seconds + sum(record.gaps) - 1e-9
        assert record.tpot_seconds == pytest.approx((record.e2e_seconds - record.ttft_seconds) / 2)
    assert run.duration_seconds >= 3 * 0.16


def test_closed_loop_keeps_exactly_its_clients_in_flight() -> None:
    run, fake = drive(
        lambda body: honest_answer(body, gap=0.02), lambda d, jobs: d.closed(jobs, 3), count=9
    )
    assert fake.max_open == 3
    assert len(run.records) == 9
    assert run.num_cut == 0


def test_open_loop_sends_on_time_whatever_the_server_does() -> None:
    due = [0.0, 0.05, 0.1, 0.15]
    run, fake = drive(
        lambda body: honest_answer(body, first=0.5), lambda d, jobs: d.open(jobs), due=due
    )
    assert fake.max_open == 4
    sent = sorted(record.sent_at for record in run.records)
    for seconds, wanted in zip(sent, due, strict=True):
        assert seconds >= wanted - 0.002


def test_connections_are_kept_alive() -> None:
    async def run() -> int:
        async with fake_server(honest_answer) as fake, client_of(fake) as client:
            for _ in range(3):
                await Target(client, "completions", "fake").send("a", 2, 5.0)
            return len(client._idle)

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer([(0, b'{"error":{"message":"no"}}')], status="400 Bad Request"), "http_400"),
        (Answer([(0, b"oops")], status="500 Oops"), "http_500"),
        (Answer([(0, chunk("a"))], hang_up=True), "disconnect"),
        (Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Le"), "disconnect"),
        (Answer(raw=b""), "disconnect"),
        (Answer(raw=b"SSH-2.0-nonsense\r\n"), "malformed"),
        (Answer(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "malformed"),
        (Answer([(0, b"data: {oops\n\n")]), "malformed"),
        (Answer([(0, chunk("a"))]), "incomplete"),
        (Answer([(0, DONE)]), "empty"),
    ],
)
def test_failures_are_counted_by_kind_and_never_lost(answer: Answer, kind: str) -> None:
    run, _ = drive(lambda _: answer, lambda d, jobs: d.closed(jobs, 2), count=3)
    assert errors(run) == {kind: 3}


def test_hang_ups_do_not_spoil_the_next_request() -> None:
    turn = itertools.count()

    def script(body: dict[str, Any]) -> Answer:
        return honest_answer(body) if next(turn) % 2 else Answer([(0, chunk("a"))], hang_up=True)

    run, _ = drive(script, lambda d, jobs: d.closed(jobs, 1))
    assert errors(run) == {None: 3, "disconnect": 3}


def test_answer_without_framing_ends_with_the_connection() -> None:
    body = b"HTTP/1.0 200 OK\r\n\r\n" + chunk("a", "stop") + DONE
    run, _ = drive(lambda _: Answer(raw=body), lambda d, jobs: d.closed(jobs, 1), count=2)
    assert errors(run) == {None: 2}


def test_refused_client_waits_as_long_as_it_is_told() -> None:
    turn = itertools.count()

    def script(body: dict[str, Any]) -> Answer:
        refusal = Answer(status="429 Too Many", headers=["Retry-After: 0.2"], parts=[(0, b"{}")])
        return honest_answer(body) if next(turn) else refusal

    run, fake = drive(script, lambda d, jobs: d.closed(jobs, 1), count=2)
    assert errors(run) == {"http_429": 1, None: 1}
    assert run.records[1].sent_at - run.records[0].sent_at >= 0.2
    assert len(fake.bodies) == 2


def test_slow_answer_times_out_and_is_hung_up_on() -> None:
    limits = Limits(request_seconds=0.1, run_seconds=20.0)
    run, _ = drive(
        lambda body: honest_answer(body, gap=2.0),
        lambda d, jobs: d.closed(jobs, 2),
        count=2,
        limits=limits,
    )
    assert errors(run) == {"timeout": 2}


def test_end_of_the_run_cuts_what_is_left_and_keeps_what_is_done() -> None:
    turn = itertools.count()

    def script(body: dict[str, Any]) -> Answer:
        return honest_answer(body, first=0.0 if next(turn) == 0 else 30.0)

    limits = Limits(request_seconds=60.0, run_seconds=0.4)
    run, _ = drive(script, lambda d, jobs: d.closed(jobs, 1), count=4, limits=limits)
    assert errors(run) == {None: 1}
    assert run.num_cut == 3


def test_stop_ends_the_run_early() -> None:
    async def stopped(driver: Driver, jobs: list[Job]) -> Run:
        asyncio.get_running_loop().call_later(0.1, driver.stop.set)
        return await driver.open(jobs)

    run, _ = drive(lambda body: honest_answer(body, first=30.0), stopped, count=3)
    assert (len(run.records), run.num_cut) == (0, 3)


def test_nobody_listening_is_a_connect_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def run() -> Run:
            client = HttpClient(url, {})
            target = Target(client, "completions", "fake")
            driver = Driver(client, LIMITS, lambda _: None)
            return await driver.open([Job(target.path, target.body("a", 1))])

        assert errors(asyncio.run(run())) == {"connect": 1}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread(burstiness: float) -> None:
    times = gamma_arrivals(5.0, 20_000, burstiness=burstiness, seed=3)
    gaps = [later - sooner for sooner, later in itertools.pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)
    assert times == gamma_arrivals(5.0, 20_000, burstiness=burstiness, seed=3)
