"""Send the jobs: a closed loop of so many clients, or an open loop at given times.

It owns when requests are sent and when a run ends. It must not know prompts, files or reports.

A failed request is a record like any other and is not tried again. After a refusal (429, 503, no
connection) a closed-loop client waits as long as Retry-After says, at most MAX_BACKOFF_SECONDS; the
open loop never waits, since its users do not know of each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.http_stream import Exchange, HttpClient, RequestFailed
from bench.records import RequestRecord, failed_record, read_exchange

MAX_BACKOFF_SECONDS = 10.0
BACK_OFF = ("http_429", "http_503", "connect")


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to be written. due_seconds: from the start of the run; closed loop: 0."""

    path: str
    body: bytes
    due_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """request_seconds: for one answer. run_seconds: for all; what is unfinished then is cut."""

    request_seconds: float
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """All that finished. num_cut requests were sent or due but ended by the run's own limit."""

    records: tuple[RequestRecord, ...]
    duration_seconds: float
    client_cpu_seconds: float
    num_cut: int


def gamma_arrivals(rate: float, count: int, *, burstiness: float, seed: int) -> list[float]:
    """Arrival times at `rate` a second with gamma gaps; `burstiness` is the gamma's shape.

    1 is Poisson; below 1 the arrivals come in bursts (CV of the gaps = 1 / sqrt(shape)), above 1
    they are more even.
    """
    rng = random.Random(f"{seed}:arrivals:{rate}")
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(now)
    return times


class Driver:
    """Runs loads against one server. `stop` ends the present run early, results are kept."""

    def __init__(
        self, client: HttpClient, limits: Limits, on_record: Callable[[RequestRecord], None]
    ) -> None:
        self.stop = asyncio.Event()
        self._client = client
        self._limits = limits
        self._on_record = on_record
        self._records: list[RequestRecord] = []
        self._started = 0.0

    async def closed(self, jobs: Sequence[Job], concurrency: int) -> Run:
        """Keep `concurrency` requests in flight until the jobs are used up."""
        waiting = iter(jobs)
        return await self._run(
            [self._client_loop(waiting) for _ in range(min(concurrency, len(jobs)))], len(jobs)
        )

    async def open(self, jobs: Sequence[Job]) -> Run:
        """Send each job at its time, whatever the server does."""
        return await self._run([self._send_when_due(job) for job in jobs], len(jobs))

    async def _run(self, coroutines: Sequence[Coroutine[Any, Any, None]], count: int) -> Run:
        self._records = []
        cpu = time.process_time()
        self._started = time.perf_counter()
        work: asyncio.Future[Any] = asyncio.gather(*coroutines)
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait(
            {work, stopped},
            timeout=self._limits.run_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        stopped.cancel()
        if not work.done():
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        return Run(
            records=tuple(self._records),
            duration_seconds=time.perf_counter() - self._started,
            client_cpu_seconds=time.process_time() - cpu,
            num_cut=count - len(self._records),
        )

    async def _client_loop(self, waiting: Iterator[Job]) -> None:
        for job in waiting:
            record = await self._send(job, due=time.perf_counter())
            if record.error in BACK_OFF:
                wanted = record.retry_after_seconds
                await asyncio.sleep(min(1.0 if wanted is None else wanted, MAX_BACKOFF_SECONDS))

    async def _send_when_due(self, job: Job) -> None:
        due = self._started + job.due_seconds
        await asyncio.sleep(due - time.perf_counter())
        await self._send(job, due=due)

    async def _send(self, job: Job, *, due: float) -> RequestRecord:
        exchange: Exchange | None = None
        try:
            exchange = await self._client.request(
                "POST", job.path, job.body, self._limits.request_seconds
            )
            record = read_exchange(exchange, started=self._started, due=due)
        except RequestFailed as failed:
            now = time.perf_counter()
            record = failed_record(failed, exchange, started=self._started, due=due, now=now)
        self._records.append(record)
        self._on_record(record)
        return record
