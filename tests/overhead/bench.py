"""`make bench-overhead`: what one API process adds to each token, and what watching it costs.

500 streams at the fixed pace of an engine that computes nothing. The latency of a token is its
arrival at the client less the end of its step, which its own text tells. Observability off and on
take turns; its cost is the CPU time of the API process for each event, compared pair by pair. The
last line says what was seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import httpx
import psutil
import uvloop

from tests.overhead.server import NUM_WORDS, TICKS, UNWATCHED
from tests.support.scripted_core import ROOT

# Metrics, timelines, a JSON line a request and a scrape every five seconds, or none of them.
ON = ("--timelines", "1024", "--log-level", "info", "--log-format", "json")
OFF = (UNWATCHED, "--timelines", "0", "--log-level", "error")
NAP_SECONDS = 0.001
MIN_SECONDS = 0.5  # in which all streams run; less says nothing
_WORD = re.compile(rb'"text":"([0-9a-f,]+)"')


@dataclass(frozen=True, slots=True)
class Run:
    """Of the time in which all streams ran."""

    tokens_per_second: float
    cpu_microseconds: float  # of the API process, an event; tokens that wait together share one
    p50_ms: float
    p99_ms: float


class Stream(asyncio.Protocol):
    """Asks once and keeps what comes with its time; reading it is for later."""

    def __init__(self, request: bytes) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.began = asyncio.get_running_loop().create_future()
        self.done = asyncio.get_running_loop().create_future()
        self.lost = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic(), data))
        if not self.began.done():
            self.began.set_result(None)
        if data.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)
        for future in (self.began, self.done):
            if not future.done():
                future.set_exception(exc or ConnectionError("the stream broke off"))

    def events(self) -> Iterator[tuple[float, list[float]]]:
        """(arrival, latency of each of its tokens) of each event."""
        for at, data in self.parts:
            for words in _WORD.findall(data):
                instants = [int(word, 16) for word in words.split(b",")[:-1]]
                yield at, [((at * TICKS - instant) % NUM_WORDS) / TICKS for instant in instants]


@contextmanager
def server(step_seconds: float, flags: tuple[str, ...]) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-m", "tests.overhead.server", str(step_seconds)]
    limits = ("--max-running", "512", "--max-waiting", "512", "--max-step-tokens", "4096")
    with subprocess.Popen(
        [*command, *flags, *limits],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            deadline = time.monotonic() + 60
            while httpx.get(f"http://127.0.0.1:{port}/ready").status_code != 200:
                assert time.monotonic() < deadline, "the server did not become ready"
                time.sleep(0.05)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def nap_between_reads(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Reads all sockets once a millisecond; the call that ends it.

    A client that is woken by every packet bills the server, on the same machine, for the waking.
    Tokens seem to arrive up to a nap later than they do, never earlier.
    """
    going = True

    def nap() -> None:
        time.sleep(NAP_SECONDS)
        if going:
            loop.call_soon(nap)

    def stop() -> None:
        nonlocal going
        going = False

    loop.call_soon(nap)
    return stop


async def measure(port: int, process: psutil.Process, count: int, num_tokens: int) -> Run:
    body = json.dumps(
        {"prompt": [1, 2, 3, 4], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    stop_napping = nap_between_reads(loop)
    streams = []
    for _ in range(count):
        made = Stream(head.encode() + body)
        _, protocol = await loop.create_connection(lambda made=made: made, "127.0.0.1", port)
        streams.append(protocol)
    await asyncio.gather(*(stream.began for stream in streams))
    began, cpu = time.monotonic(), cpu_seconds(process)
    await asyncio.wait({s.done for s in streams}, return_when=asyncio.FIRST_COMPLETED)
    ended, used = time.monotonic(), cpu_seconds(process) - cpu
    if ended - began < MIN_SECONDS:
        print(
            "the first stream ended as the last began, which says little: ask for more --tokens, "
            "or give the run a turn of its own where others use the machine (chrt -r 5)",
            file=sys.stderr,
        )
    await asyncio.gather(*(stream.done for stream in streams))
    for stream in streams:
        assert stream.transport is not None
        stream.transport.close()
    await asyncio.gather(*(stream.lost for stream in streams))
    stop_napping()
    seen = [
        latencies
        for stream in streams
        for arrival, latencies in stream.events()
        if began <= arrival < ended
    ]
    found = [latency for latencies in seen for latency in latencies]
    cuts = statistics.quantiles(found, n=100)
    return Run(len(found) / (ended - began), used / len(seen) * 1e6, cuts[49] * 1e3, cuts[98] * 1e3)


async def scrape(port: int) -> None:
    async with httpx.AsyncClient() as client:
        while True:
            await client.get(f"http://127.0.0.1:{port}/metrics")
            await asyncio.sleep(5.0)


def run(flags: tuple[str, ...], arguments: argparse.Namespace) -> Run:
    async def all_of_it(port: int, process: psutil.Process) -> Run:
        scraping = asyncio.create_task(scrape(port)) if flags == ON else None
        try:
            async with asyncio.timeout(120):
                return await measure(port, process, arguments.streams, arguments.tokens)
        finally:
            if scraping is not None:
                scraping.cancel()
                await asyncio.gather(scraping, return_exceptions=True)

    step_seconds = arguments.streams / arguments.rate
    with (
        server(step_seconds, flags) as (port, process),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(all_of_it(port, process))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-overhead")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=10_500, help="tokens a second asked for")
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    runs: dict[tuple[str, ...], list[Run]] = {OFF: [], ON: []}
    for _ in range(arguments.rounds):
        for flags, found in runs.items():
            found.append(run(flags, arguments))
            print(f"{'on ' if flags == ON else 'off'} {found[-1]}", file=sys.stderr)
    off, on = (median_run(found) for found in runs.values())
    pairs = zip(runs[ON], runs[OFF], strict=True)
    cost = statistics.median(one.cpu_microseconds / other.cpu_microseconds for one, other in pairs)
    print(
        f"bench-overhead: {arguments.streams} streams, one API process: "
        f"{on.tokens_per_second:.0f} tokens/s with observability ({off.tokens_per_second:.0f} "
        f"without), added latency p50 {on.p50_ms:.1f} p99 {on.p99_ms:.1f} ms ({off.p50_ms:.1f} "
        f"{off.p99_ms:.1f}), {on.cpu_microseconds:.1f} us of CPU an event "
        f"({off.cpu_microseconds:.1f}): observability costs {cost - 1:+.1%}"
    )
    return 0


def median_run(runs: list[Run]) -> Run:
    def middle(name: str) -> float:
        return statistics.median(getattr(one, name) for one in runs)

    names = ("tokens_per_second", "cpu_microseconds", "p50_ms", "p99_ms")
    return Run(*(middle(name) for name in names))


if __name__ == "__main__":
    sys.exit(main())
