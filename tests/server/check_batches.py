"""Batches beside people: each line once across a kill -9, and what the lines cost those who wait.

`python -m tests.server.check_batches` serves the embedded model. Rounds without and with a batch
take turns, so that a noisy machine is noisy to both; in the middle of the lines the server is
killed. The last line says what was seen.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.structured.server import real_process

SENTENCE = "the light of a river in that bridge and as it was for his mountain on a road with"
WORDS = SENTENCE.split()
THINK_SECONDS = 0.8  # mean, between an answer and the next question
MAX_PROBES = 2000
MOST_GROWTH = 0.2


class People:
    """Asks a question, waits for its answer, thinks. Times in seconds."""

    def __init__(self, url: str, draw: random.Random, num_words: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=120)
        self._draw = draw
        self._num_words = num_words

    def ask(self) -> float:
        body = {
            "prompt": " ".join(self._draw.choices(WORDS, k=self._num_words)),
            "max_tokens": 8,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.monotonic()
        first = None
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and first is None:
                    first = time.monotonic() - began
        assert first is not None, "no text came"
        time.sleep(min(self._draw.expovariate(1 / THINK_SECONDS), 4 * THINK_SECONDS))
        return first

    def ask_while(self, goes_on: Callable[[int], bool]) -> list[float]:
        ttfts: list[float] = []
        while goes_on(len(ttfts)) and len(ttfts) < MAX_PROBES:
            ttfts.append(self.ask())
        return ttfts


def start(client: httpx.Client, name: str, num_lines: int) -> dict[str, Any]:
    lines = [
        json.dumps(
            {
                "custom_id": f"{name}-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "prompt": f"{name} {number}: " + " ".join(WORDS),
                    "max_tokens": 16,
                    "ignore_eos": True,
                },
            }
        )
        for number in range(num_lines)
    ]
    sent = client.post(
        "/v1/files",
        files={"file": ("lines.jsonl", "\n".join(lines).encode())},
        data={"purpose": "batch"},
    )
    sent.raise_for_status()
    body = {
        "input_file_id": sent.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    made: dict[str, Any] = client.post("/v1/batches", json=body).json()
    return made


class Check:
    def __init__(self, folder: Path, seed: int, num_words: int) -> None:
        self._folder = folder
        self._num_words = num_words
        self._draw = random.Random(seed)
        self.alone: list[float] = []
        self.beside: list[float] = []

    def round(self, name: str, num_lines: int, *, is_killed: bool) -> int:
        """How many lines have exactly one result, a good one."""
        with real_process("--data-dir", str(self._folder)) as (url, process):
            client = httpx.Client(base_url=url, timeout=60)
            people = People(url, self._draw, self._num_words)
            for _ in range(3):
                people.ask()
            batch = start(client, name, num_lines)
            path = f"/v1/batches/{batch['id']}"

            def is_running(_num_asked: int) -> bool:
                found = client.get(path).json()
                num_done = found["request_counts"]["completed"]
                is_half = is_killed and num_done >= num_lines // 2
                return found["status"] == "in_progress" and not is_half

            beside = people.ask_while(is_running)
            if is_killed:
                process.kill()
                process.wait()
            else:
                self.beside += beside
                self.alone += people.ask_while(lambda num_asked: num_asked < len(beside))
                return self._num_right(client, path, name, num_lines)
        return self._after_the_kill(path, name, num_lines, beside)

    def _after_the_kill(self, path: str, name: str, num_lines: int, before: list[float]) -> int:
        with real_process("--data-dir", str(self._folder)) as (url, _):
            client = httpx.Client(base_url=url, timeout=60)
            people = People(url, self._draw, self._num_words)
            for _ in range(3):
                people.ask()
            after = people.ask_while(lambda _: client.get(path).json()["status"] == "in_progress")
            self.beside += before + after
            num_asked = len(before) + len(after)
            self.alone += people.ask_while(lambda num: num < num_asked)
            return self._num_right(client, path, name, num_lines)

    def _num_right(self, client: httpx.Client, path: str, name: str, num_lines: int) -> int:
        batch = client.get(path).json()
        assert batch["status"] == "completed", batch
        content = client.get(f"/v1/files/{batch['output_file_id']}/content").text
        rows = [json.loads(row) for row in content.splitlines()]
        expected = [f"{name}-{number}" for number in range(num_lines)]
        ids = [row["custom_id"] for row in rows if row["response"]["status_code"] == 200]
        return sum(ids.count(one) == 1 for one in expected) if len(rows) == num_lines else 0


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", type=int, default=400, help="of an interactive prompt")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    each, num_right = options.lines // options.rounds, 0
    with tempfile.TemporaryDirectory() as folder:
        check = Check(Path(folder), options.seed, options.words)
        for number in range(options.rounds):
            is_killed = number == options.rounds // 2
            num_right += check.round(f"round{number}", each, is_killed=is_killed)
            alone, beside = p95(check.alone), p95(check.beside)
            print(f"round {number + 1}: TTFT p95 {alone:.3f} s alone, {beside:.3f} s beside lines")
    growth = beside / alone - 1
    total = each * options.rounds
    medians = [statistics.median(values) * 1000 for values in (check.alone, check.beside)]
    print(
        f"batches: {num_right} of {total} lines have one result each across a kill -9; TTFT p95 of "
        f"{options.words} words {alone * 1000:.0f} ms alone, {beside * 1000:.0f} ms beside them "
        f"({growth:+.0%}, limit {MOST_GROWTH:+.0%}; p50 {medians[0]:.0f} and {medians[1]:.0f} ms; "
        f"{len(check.alone)} and {len(check.beside)} requests)"
    )
    return int(num_right != total or growth >= MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
