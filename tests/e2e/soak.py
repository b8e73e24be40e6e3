"""Many clients of the real server, a third of whom hang up: nothing may be lost or left behind.

`python -m tests.e2e.soak` sends 2,000 requests, 200 at a time, and prints figures. Beside the
answers it watches what a server cannot hide: its metrics, memory and descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = "/v1/completions"
START_SECONDS = 120.0
ANSWER_SECONDS = 600.0
QUIET_SECONDS = 20.0
SENTENCE = (
    "the light of the river in that bridge and as it was for his mountain on a road with them"
)
WORDS = tuple(SENTENCE.split())


@contextmanager
def running_server(*flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """`paceline serve` on a free port: its URL and process. It must end with 0 when told to."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (found := re.search(r" at (http://\S+)", _read(output))):
                assert process.poll() is None, _read(log)
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
            yield found.group(1), psutil.Process(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert "Traceback" not in _read(log), _read(log)
        finally:
            process.kill()
            process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read())


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of the server and its core together."""

    private_bytes: int  # anonymous memory, in RAM or swapped out (B130)
    descriptors: int

    @classmethod
    def of(cls, server: psutil.Process) -> Footprint:
        processes = [server, *server.children(recursive=True)]
        memory = [process.memory_full_info() for process in processes]
        return cls(
            sum(info.uss + info.swap for info in memory),
            sum(process.num_fds() for process in processes),
        )


class Metrics:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self._values = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                self._values[name] = float(value)

    @classmethod
    async def read(cls, client: httpx.AsyncClient) -> Metrics:
        return cls((await client.get("/metrics")).text)

    def __getitem__(self, name: str) -> float:
        return self._values[f"paceline_{name}"]

    @property
    def quiet(self) -> bool:
        gauges = ("requests_running", "requests_waiting", "kv_usage_ratio")
        return not any(self[gauge] for gauge in gauges)

    @property
    def finished(self) -> dict[str, int]:
        return {
            reason: int(self[f'requests_finished_total{{reason="{reason}"}}'])
            for reason in ("stop", "length", "abort", "error")
        }


@dataclass(frozen=True, slots=True)
class Report:
    outcomes: Counter[str]
    accepted: int
    finished: dict[str, int]
    preemptions: int
    footprints: tuple[Footprint, ...]  # after each round, when all was quiet
    seconds: float


def make_body(draw: random.Random, max_tokens: int) -> dict[str, Any]:
    """Shared and own prefixes, one choice or two, streams and plain answers."""
    shared = " ".join(WORDS[: draw.choice((0, 10, 20))])
    own = " ".join(draw.choices(WORDS, k=draw.randint(1, 40)))
    return {
        "prompt": f"{shared} {own}",
        "max_tokens": draw.randint(1, max_tokens),
        "stream": draw.random() < 0.7,
        "n": draw.choice((1, 1, 1, 2)),
        "temperature": draw.choice((0, 0.8)),
        "ignore_eos": draw.random() < 0.5,
    }


async def ask(client: httpx.AsyncClient, body: dict[str, Any], patience: float | None) -> str:
    """The outcome: complete, hung up, or the status of a refusal. Checks that answers are whole."""
    try:
        async with asyncio.timeout(patience):
            response = await client.post(COMPLETIONS, json=body)
    except TimeoutError:
        return "hung up"
    if response.status_code != 200:
        return str(response.status_code)
    if body["stream"]:
        *events, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: ")]
    else:
        chunks = [response.json()]
    ends = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] in ("stop", "length")
    ]
    assert sorted(ends) == list(range(body["n"])), "every choice ends once"
    return "complete"


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` in each of `rounds`, of which `clients` are in flight at once."""

    requests: int = 500
    clients: int = 200
    rounds: int = 4
    max_tokens: int = 32
    seed: int = 1


async def soak(url: str, server: psutil.Process, load: Load) -> Report:
    """The server must be quiet, with every connection closed, after each round."""
    draw = random.Random(load.seed)
    outcomes: Counter[str] = Counter()
    footprints = []
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS) as watcher:
        first = await watcher.post(COMPLETIONS, json=make_body(draw, load.max_tokens) | {"n": 1})
        assert first.status_code == 200
        before = Footprint.of(server)
        for _ in range(load.rounds):
            outcomes += await one_round(url, load, draw)
            metrics = await become_quiet(watcher)
            footprints.append(await connections_close(server, before.descriptors))
        await fill_the_pool(watcher)
        return Report(
            outcomes=outcomes,
            accepted=int(metrics["requests_accepted_total"]),
            finished=metrics.finished,
            preemptions=int(metrics["preemptions_total"]),
            footprints=tuple(footprints),
            seconds=time.monotonic() - started,
        )


async def one_round(url: str, load: Load, draw: random.Random) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    waiting = [make_body(draw, load.max_tokens) for _ in range(load.requests)]
    limits = httpx.Limits(max_connections=load.clients)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits) as client:

        async def work() -> None:
            while waiting:
                patience = draw.uniform(0.0, 3.0) if draw.random() < 1 / 3 else None
                outcomes[await ask(client, waiting.pop(), patience)] += 1

        await asyncio.gather(*(work() for _ in range(load.clients)))
    return outcomes


async def connections_close(server: psutil.Process, most: int) -> Footprint:
    """B131: the descriptors return to what they were."""
    deadline = time.monotonic() + QUIET_SECONDS
    while (footprint := Footprint.of(server)).descriptors > most:
        assert time.monotonic() < deadline, f"{footprint.descriptors} descriptors, not {most}"
        await asyncio.sleep(0.1)
    return footprint


async def become_quiet(client: httpx.AsyncClient) -> Metrics:
    """B115: the gauges return to 0 by themselves."""
    deadline = time.monotonic() + QUIET_SECONDS
    while not (metrics := await Metrics.read(client)).quiet:
        assert time.monotonic() < deadline, "running, waiting or KV usage stays above 0"
        await asyncio.sleep(0.05)
    return metrics


async def fill_the_pool(client: httpx.AsyncClient) -> None:
    """A request that needs all the KV there is: it would fail or hang if a block were lost."""
    longest = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
    body = {"prompt": [100 + i % 1000 for i in range(longest - 1)], "max_tokens": 1}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == longest - 1


def check(report: Report, load: Load) -> None:
    """What must hold of any soak, whatever the speed of the machine."""
    requests = load.requests * load.rounds
    assert report.outcomes.total() == requests
    assert report.outcomes.keys() <= {"complete", "hung up"}, report.outcomes
    assert report.outcomes["complete"] > requests / 3
    assert report.outcomes["hung up"] > requests / 10
    assert sum(report.finished.values()) == report.accepted, "every request ends once"
    assert report.finished["error"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Load):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(Load(), field.name))
    load = Load(**vars(parser.parse_args()))
    with running_server("--kv-memory", "64MiB", "--log-level", "warning") as (url, server):
        report = asyncio.run(soak(url, server, load))
    print(f"{report.outcomes.total()} requests, {load.clients} at once: {dict(report.outcomes)}")
    print(f"sequences accepted {report.accepted}, finished {report.finished}")
    print(f"preemptions {report.preemptions}, {report.seconds:.0f} s; then all blocks were free")
    for number, footprint in enumerate(report.footprints, 1):
        memory = footprint.private_bytes / 2**20
        print(f"after round {number}: {memory:.1f} MiB, {footprint.descriptors} descriptors")
    check(report, load)
    # Pools and caches fill up in the first half.
    middle = report.footprints[(load.rounds - 1) // 2].private_bytes
    assert report.footprints[-1].private_bytes < middle * 1.03, "memory grows"
    return 0


if __name__ == "__main__":
    sys.exit(main())
