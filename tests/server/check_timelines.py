"""1,000 requests under load: do the phases of each add up to what its client waited?

`python -m tests.server.check_timelines`. A process serves, with a scripted engine and a KV pool
that is too small, so that many are preempted and many share a prefix; --url takes any server. The
client knows how late its own loop was, which is the error of its clock readings.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import httpx

from tests.support.load_client import Seen, run_load
from tests.support.scripted_server import running_server

_PROBE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Verdict:
    """`off` are the requests whose phases miss the client's time by over 2 ms and 1 %."""

    num_requests: int
    num_preempted: int
    num_cached: int
    off: tuple[str, ...]
    p50_ms: float
    p99_ms: float
    p50_share: float  # of what the client waited

    def __str__(self) -> str:
        return (
            f"timelines: {self.num_requests} requests, {self.num_preempted} of them preempted, "
            f"{self.num_cached} with cached tokens: phases and client differ by "
            f"{self.p50_ms:.2f} ms (p50), {self.p99_ms:.2f} ms (p99); {len(self.off)} by more "
            "than 2 ms and 1 %"
        )


class Lag:
    """How late the loop woke, by when; what a clock reading at an instant may be wrong by."""

    def __init__(self) -> None:
        self._woke: list[float] = []
        self._late: list[float] = []

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + _PROBE_SECONDS
            await asyncio.sleep(_PROBE_SECONDS)
            now = time.monotonic()
            self._woke.append(now)
            self._late.append(max(now - due, 0.0))

    def around(self, instant: float) -> float:
        """Of the first probe that woke at or after `instant`."""
        index = bisect.bisect_left(self._woke, instant)
        return self._late[index] if index < len(self._late) else 0.0


def bodies(count: int, *, shortest: int, longest: int) -> list[tuple[str, str, dict[str, Any]]]:
    rng = random.Random(5)
    made = []
    for index in range(count):
        prompt = "words that many prompts begin with, " * rng.randrange(1, 4)
        if index % 3 == 0:
            prompt = f"{index} stands alone. " * rng.randrange(1, 8)
        fields = {"max_tokens": rng.randrange(shortest, longest), "stream": index % 4 != 0}
        body = {"prompt": prompt, "ignore_eos": True, **fields}
        made.append((f"check-{index}", "/v1/completions", body))
    return made


async def drive(
    url: str, load: Sequence[tuple[str, str, dict[str, Any]]], concurrency: int
) -> tuple[list[Seen], Lag]:
    address = urlparse(url)
    lag = Lag()
    watching = asyncio.create_task(lag.watch())
    try:
        seen = await run_load(address.hostname or "", address.port or 80, load, concurrency)
        await asyncio.sleep(0.01)
    finally:
        watching.cancel()
    return seen, lag


def check(url: str, load: Sequence[tuple[str, str, dict[str, Any]]], concurrency: int) -> Verdict:
    """The server must keep the timelines of all of `load`, of at most 1,000 requests."""
    seen, lag = asyncio.run(drive(url, load, concurrency))
    answer = httpx.get(f"{url}/admin/requests", params={"limit": 1000}, timeout=30).json()
    wanted = {request_id for request_id, _, _ in load}
    rows = {row["id"]: row for row in answer["finished"] if row["id"] in wanted}
    off, errors, shares = [], [], []
    for one in seen:
        assert one.status == 200, one.body[:200]
        row = rows[one.id]
        waited = one.e2e_seconds * 1e3
        error = abs(waited - sum(row["phases_ms"].values()))
        errors.append(error)
        shares.append(error / waited)
        unsure = (lag.around(one.sent) + lag.around(one.ended)) * 1e3
        if error - unsure > max(2.0, waited / 100):
            off.append(f"{one.id}: {error:.2f} of {waited:.1f} ms, {row['phases_ms']}")
    errors.sort()
    return Verdict(
        len(rows),
        sum(row["preemptions"] > 0 for row in rows.values()),
        sum(row["cached_tokens"] > 0 for row in rows.values()),
        tuple(off),
        errors[len(errors) // 2],
        errors[len(errors) * 99 // 100],
        statistics.median(shares),
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="default: a server with a scripted engine")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=72)
    parser.add_argument("--tokens", type=int, default=50)
    arguments = parser.parse_args()
    load = bodies(arguments.requests, shortest=arguments.tokens // 2, longest=arguments.tokens)
    if arguments.url:
        verdict = check(arguments.url, load, arguments.concurrency)
    else:
        flags = ("--log-level", "warning", "--max-running", "64")
        with running_server("steady", *flags) as (_process, client):
            verdict = check(str(client.base_url), load, arguments.concurrency)
    for line in verdict.off[:10]:
        print(line, file=sys.stderr)
    print(verdict)
    return 1 if verdict.off else 0


if __name__ == "__main__":
    sys.exit(main())
