"""Hostile constraints on the real server: do the neighbours notice, and does memory stay bounded?

`python -m tests.structured.bench_hostile`. Free streams run all the time. By turns they are alone,
or beside clients with harmless schemas, or beside clients that send one bomb after the other, each
in a form that no cache knows; so what a bomb costs is told from what any neighbour costs. The last
line says the gaps between tokens (p99) and the peak of the memory of all the server's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx

from bench.statistics import percentile
from tests.structured.hostile import NAMES, bomb
from tests.structured.server import real_process

CHAT = "/v1/chat/completions"
PHASES = ("alone", "harmless", "hostile")


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 1.0, **more}


class Watch:
    """The gaps of the free streams and the server's memory, by what runs beside them."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self.phase = ""
        self.gaps: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, float] = defaultdict(float)
        self.ends: Counter[str] = Counter()
        self._server = server

    async def stream(self, client: httpx.AsyncClient, first_seed: int) -> None:
        for seed in itertools.count(first_seed, 1000):
            last = 0.0
            wish = body("Tell a long story.", stream=True, max_tokens=300, ignore_eos=True)
            async with client.stream("POST", CHAT, json={**wish, "seed": seed}) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if '"content":' not in line:
                        continue
                    now = time.perf_counter()
                    if last and self.phase:
                        self.gaps[self.phase].append(now - last)
                    last = now

    async def memory(self) -> None:
        while True:
            self.peaks[self.phase] = max(self.peaks[self.phase], memory_mib(self._server.pid))
            await asyncio.sleep(0.05)

    async def disturb(self, client: httpx.AsyncClient, salts: itertools.count[int]) -> None:
        """One client, which sends what the phase says."""
        for salt in salts:
            if self.phase == "hostile":
                wish = bomb(NAMES[salt % len(NAMES)], salt)
            else:
                wish = {"json": {"type": "array", "items": {"const": f"thing {salt}"}}}
            answer = await client.post(
                CHAT, json=body("Go on.", max_tokens=60, seed=1, structured_outputs=wish)
            )
            if self.phase == "hostile":
                self.ends[str(answer.status_code)] += 1
            if answer.status_code == 429:
                await asyncio.sleep(0.2)


def memory_mib(root: int) -> float:
    """What a process and its descendants hold that is no file."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += children[pid]
    total = 0
    for pid in found:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1])
    return total / 1024


async def run(url: str, server: subprocess.Popen[bytes], options: argparse.Namespace) -> Watch:
    watch = Watch(server)
    salts = itertools.count(1)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        running = [
            asyncio.create_task(watch.stream(client, index)) for index in range(options.streams)
        ]
        running.append(asyncio.create_task(watch.memory()))
        await asyncio.sleep(3)
        for _ in range(options.rounds):
            for phase in PHASES:
                watch.phase = phase
                clients = 0 if phase == "alone" else options.clients
                tasks = [asyncio.create_task(watch.disturb(client, salts)) for _ in range(clients)]
                await asyncio.sleep(options.seconds)
                watch.phase = ""
                await end(tasks)
        await end(running)
    return watch


async def end(tasks: list[asyncio.Task[None]]) -> None:
    """Raises what one of them raised."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase in a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with real_process() as (url, server):
        watch = asyncio.run(run(url, server, options))
    shown = []
    for phase in PHASES:
        gaps = sorted(watch.gaps[phase])
        p50, p99 = (1e3 * percentile(gaps, q) for q in (0.5, 0.99))
        print(
            f"{phase}: {len(gaps)} gaps, p50 {p50:.1f} ms, p99 {p99:.1f} ms, max "
            f"{1e3 * gaps[-1]:.0f} ms, memory {watch.peaks[phase]:.0f} MiB"
        )
        shown.append(f"{p99:.1f} ms and {watch.peaks[phase]:.0f} MiB {phase}")
    ends = ", ".join(f"{count} of {code}" for code, count in sorted(watch.ends.items()))
    print(f"bench-hostile: p99 gap and peak memory {'; '.join(shown)}; bombs ended: {ends}")
    return 0 if set(watch.ends) <= {"200", "400", "429", "500"} else 1


if __name__ == "__main__":
    sys.exit(main())
