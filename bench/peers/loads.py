"""The loads of the comparison and how one is measured on a running server.

It owns the cells (clients, input, output) and what is kept of each. It must not know servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.http_stream import HttpClient
from bench.load import Driver, Limits
from bench.prompts import WordPrompts, calibrate
from bench.records import RequestRecord
from bench.statistics import summarise
from bench.target import connect
from bench.workload import Level, Shape, make_jobs


@dataclass(frozen=True, slots=True)
class Cell:
    """One load. shared_prefix: tokens common to all prompts, `input` more follow."""

    clients: int
    input: int
    output: int
    requests: int
    shared_prefix: int = 0

    @property
    def name(self) -> str:
        prefix = f"{self.shared_prefix}+" if self.shared_prefix else ""
        return f"{prefix}{self.input}/{self.output} x{self.clients}"

    @property
    def level(self) -> Level:
        shape = Shape(self.input, self.output, self.shared_prefix)
        return Level(shape, self.requests, concurrency=self.clients)


REQUESTS = {1: 8, 4: 24, 16: 64, 32: 128}
QUICK_REQUESTS = {1: 2, 4: 4, 16: 16, 32: 32}
SHARED_PREFIX = Cell(8, 32, 32, 16, shared_prefix=1024)
FULL = (
    *(Cell(clients, 128, 64, count) for clients, count in REQUESTS.items()),
    *(Cell(clients, 512, 64, count) for clients, count in REQUESTS.items()),
    SHARED_PREFIX,
)
QUICK = tuple(Cell(clients, 128, 64, count) for clients, count in QUICK_REQUESTS.items())
SMOKE = (Cell(1, 16, 4, 1), Cell(2, 16, 4, 2), Cell(2, 8, 4, 2, shared_prefix=32))


def measure(
    url: str,
    cells: Iterable[Cell],
    *,
    seed: int,
    cell_seconds: float,
    may_start: Callable[[], bool],
    on_cell: Callable[[Cell, dict[str, Any]], None],
) -> list[Cell]:
    """Run the cells in order; returns those that `may_start` left out. Raises RequestFailed."""
    return asyncio.run(_measure(url, cells, seed, cell_seconds, may_start, on_cell))


async def _measure(
    url: str,
    cells: Iterable[Cell],
    seed: int,
    cell_seconds: float,
    may_start: Callable[[], bool],
    on_cell: Callable[[Cell, dict[str, Any]], None],
) -> list[Cell]:
    client = HttpClient(url, {})
    left_out = []
    try:
        target = await connect(client, api="completions", model="auto")
        prompts = WordPrompts(seed, await calibrate(target.count_prompt, seed))
        driver = Driver(client, Limits(cell_seconds, cell_seconds), _ignore)
        for cell in cells:
            if not may_start():
                left_out.append(cell)
                continue
            jobs = make_jobs(cell.level, target, prompts, key=cell.name, seed=seed)
            on_cell(cell, summarise(await driver.closed(jobs, cell.clients), None))
    finally:
        client.close()
    return left_out


def _ignore(record: RequestRecord) -> None:
    """The comparison shows cells, not single requests."""
    del record
