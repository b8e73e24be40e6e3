"""Does Prometheus tell what the clients saw? A load, its own measurements, and PromQL beside them.

`make test-prometheus` runs it on the real server with the embedded model; a small share of it, with
a scripted engine, is in test_prometheus.py. Everything is on the loopback, on free ports.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from server.metrics import REQUEST_BUCKETS
from tests.deploy.promql import panels, with_windows
from tests.deploy.real_prometheus import Prometheus, installed, running_prometheus
from tests.support.scripted_core import ROOT
from tests.support.scripted_server import running_server

TTFT = "paceline_time_to_first_token_seconds"
# Longer than any run, so that a rate sees all of it; the first scrape is before the first request.
WINDOW = "30m"
# On a slow machine a long run may well overspend a latency budget, but none of these.
MUST_NOT_FIRE = (
    "PacelineDown",
    "PacelineEngineStuck",
    "PacelineEngineNotReady",
    "PacelineEngineRestarts",
    "PacelineEngineUnavailable",
    "PacelineQueueFull",
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One answered request as its client saw it; `server_ttft_seconds` is what the answer says."""

    request_id: str
    ttft_seconds: float
    server_ttft_seconds: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> Seen:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings": True,
    }
    started = time.monotonic()
    first = None
    reason, last = "", {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        request_id = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            last = json.loads(line.removeprefix("data: "))
            for choice in last["choices"]:
                if choice["text"] and first is None:
                    first = time.monotonic()
                reason = choice["finish_reason"] or reason
    assert first is not None
    return Seen(
        request_id,
        first - started,
        last["timings"]["ttft_ms"] / 1e3,
        last["usage"]["prompt_tokens"],
        last["usage"]["completion_tokens"],
        reason,
    )


async def load(url: str, num_requests: int, concurrency: int) -> list[Seen]:
    """A closed loop of clients with prompts and answers of different lengths."""
    rng = random.Random(5)
    jobs = [
        (f"{i} " + "pace " * rng.randint(1, 60), rng.randint(1, 24)) for i in range(num_requests)
    ]
    remaining = iter(jobs)
    seen: list[Seen] = []

    async def user(client: httpx.AsyncClient) -> None:
        for prompt, max_tokens in remaining:
            seen.append(await ask(client, prompt, max_tokens))

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        refused = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
        assert refused.status_code == 400
        await asyncio.gather(*(user(client) for _ in range(concurrency)))
    return seen


def bucket(value: float) -> int:
    """The index of the bucket that holds it; a bound belongs to the bucket below."""
    return bisect.bisect_left(REQUEST_BUCKETS, value)


def quantile_bucket(values: Sequence[float], q: float) -> int:
    """The bucket in which the q-quantile lies, by nearest rank."""
    return bucket(sorted(values)[max(math.ceil(q * len(values)), 1) - 1])


def compare(prometheus: Prometheus, seen: Sequence[Seen], *, is_quiet: bool = True) -> str:
    """Raises AssertionError where they disagree; else one line that says what was seen.

    On a machine that is not quiet, clients may see a first token long after it was sent.
    """
    counts = {
        "sum(paceline_requests_accepted_total)": len(seen),
        "sum(paceline_requests_finished_total)": len(seen),
        'sum(paceline_requests_finished_total{reason=~"abort|error"})': 0,
        'sum(paceline_requests_refused_total{reason="invalid_value"})': 1,
        "sum(paceline_generated_tokens_total)": sum(one.completion_tokens for one in seen),
        "sum(paceline_prompt_tokens_total)": sum(one.prompt_tokens for one in seen),
        f"sum({TTFT}_count)": len(seen),
        'sum(paceline_slo_requests_total{slo="ttft"})': len(seen),
        "sum(paceline_requests_running) + sum(paceline_requests_waiting)": 0,
    }
    for reason in ("stop", "length"):
        wanted = sum(one.finish_reason == reason for one in seen)
        counts[f'sum(paceline_requests_finished_total{{reason="{reason}"}})'] = wanted
    for expression, wanted in counts.items():
        found = prometheus.number(expression)
        assert found == wanted, f"{expression}: Prometheus says {found}, the clients {wanted}"
    _compare_buckets(prometheus, seen)
    shown = []
    for q in (0.5, 0.99):
        found = prometheus.number(
            f"histogram_quantile({q}, sum by (le) (rate({TTFT}_bucket[{WINDOW}])))"
        )
        ours = quantile_bucket([one.ttft_seconds for one in seen], q)
        most = 1 if is_quiet else len(REQUEST_BUCKETS)
        assert -1 <= ours - bucket(found) <= most, (
            f"p{q * 100:g} TTFT: Prometheus says {found:.4f} s, the clients {_within(ours)}"
        )
        shown.append(f"p{q * 100:g} TTFT {found * 1e3:.1f} ms (clients {_within(ours)})")
    num_exemplars = _compare_exemplars(prometheus, seen)
    num_queries = check_panels(prometheus)
    num_rules = check_rules(prometheus)
    return (
        f"{len(seen)} requests, {sum(one.completion_tokens for one in seen)} generated and "
        f"{sum(one.prompt_tokens for one in seen)} prompt tokens counted alike by clients and "
        f"PromQL; {'; '.join(shown)}; {num_exemplars} exemplars name their requests; "
        f"{num_queries} dashboard queries answered, {num_rules} rules "
        "evaluated"
    )


def _within(index: int) -> str:
    low = REQUEST_BUCKETS[index - 1] if index else 0.0
    high = REQUEST_BUCKETS[index] if index < len(REQUEST_BUCKETS) else math.inf
    return f"{low * 1e3:g} to {high * 1e3:g} ms"


def _compare_buckets(prometheus: Prometheus, seen: Sequence[Seen]) -> None:
    """The server told each client its TTFT, so each bucket can be counted exactly."""
    for series in prometheus.query(f"sum by (le) ({TTFT}_bucket)"):
        bound = float(series["metric"]["le"])
        wanted = sum(one.server_ttft_seconds <= bound for one in seen)
        found = float(series["value"][1])
        assert found == wanted, f"TTFT <= {bound} s: Prometheus says {found}, the answers {wanted}"


def _compare_exemplars(prometheus: Prometheus, seen: Sequence[Seen]) -> int:
    """An exemplar of the TTFT leads to the request that took so long."""
    took = {one.request_id: one.server_ttft_seconds for one in seen}
    exemplars = prometheus.exemplars(f"{TTFT}_bucket")
    assert exemplars, "there are no exemplars"
    for one in exemplars:
        wanted = took[one["labels"]["request_id"]]
        assert math.isclose(float(one["value"]), wanted, abs_tol=1e-6), one
    return len(exemplars)


def check_panels(prometheus: Prometheus) -> int:
    """Every query of the dashboards gets an answer.

    Refusals of ours may have no series; what is by key has none on a server without keys.
    """
    count = 0
    for where, panel in panels():
        for target in panel["targets"]:
            series = prometheus.query(with_windows(target["expr"], WINDOW))
            may_be_empty = "Refusals that are ours" in where or "by key" in where
            assert series or may_be_empty, f"{where}: no series"
            count += 1
    return count


def check_rules(prometheus: Prometheus, timeout_seconds: float = 20.0) -> int:
    """Every rule is evaluated without an error, and none that tells of a fault fires."""
    deadline = time.monotonic() + timeout_seconds
    while any(rule["health"] == "unknown" for rule in prometheus.rules()):
        assert time.monotonic() < deadline, "rules are not evaluated"
        time.sleep(0.2)
    rules = prometheus.rules()
    for rule in rules:
        assert rule["health"] == "ok", f"{rule['name']}: {rule.get('lastError')}"
        fires = rule.get("state") == "firing" and rule["name"] in MUST_NOT_FIRE
        assert not fires, f"{rule['name']} fires"
    return len(rules)


@contextmanager
def loaded(
    url: str, *, num_requests: int, concurrency: int
) -> Iterator[tuple[Prometheus, list[Seen]]]:
    """Prometheus has seen the server idle, then loaded, then idle."""
    with running_prometheus(url.removeprefix("http://")) as prometheus:
        prometheus.wait_for_scrape_after(0.0)
        seen = asyncio.run(load(url, num_requests, concurrency))
        # The last facts of the core arrive within its own beat.
        prometheus.wait_for_scrape_after(time.time() + 1.0)
        yield prometheus, seen


@contextmanager
def _server(scripted: bool) -> Iterator[str]:
    if scripted:
        with running_server("ready") as (_process, client):
            yield str(client.base_url).rstrip("/")
    else:
        with real_server() as url:
            yield url


@contextmanager
def real_server() -> Iterator[str]:
    """`paceline serve` with the embedded model on a free port."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0]
                return
        raise AssertionError("the server did not start")
    finally:
        process.terminate()
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--scripted", action="store_true", help="a scripted engine, no model")
    options = parser.parse_args()
    if not installed():
        print("test-prometheus: skipped, prometheus is not installed (apt install prometheus)")
        return 0
    with _server(options.scripted) as url:
        load_of = {"num_requests": options.requests, "concurrency": options.concurrency}
        with loaded(url, **load_of) as (prometheus, seen):
            line = compare(prometheus, seen)
    print(f"test-prometheus: {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
