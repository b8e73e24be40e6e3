"""make bench-grammar: time per token with and without a grammar, in one run, batch after batch.

Sixteen streams at a time, alternately free and under a JSON Schema, all of the same length. The
last line says the medians and their ratio. The time is from a stream's first token to its last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import httpx

from tests.structured.server import real_server

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}},
    },
    "required": ["name", "kind", "year", "tags"],
    "additionalProperties": False,
}
# More items than there are tokens: no stream ends early.
SCHEMA = {"type": "array", "items": ITEM, "minItems": 500}
FORMAT = {"type": "json_schema", "json_schema": {"name": "items", "schema": SCHEMA}}


async def stream(client: httpx.AsyncClient, seed: int, tokens: int, more: dict[str, Any]) -> float:
    """Seconds a token, after the first."""
    body = {
        "messages": [{"role": "user", "content": "List things as JSON."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        **more,
    }
    first = last = 0.0
    count = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"]:
                choice = event["choices"][0]
                if choice["delta"].get("content"):
                    first = first or time.perf_counter()
                if choice["finish_reason"]:  # the last tokens may have no text
                    last = time.perf_counter()
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    assert count == tokens, f"a stream ended after {count} tokens"
    return (last - first) / (count - 1)


async def run(url: str, options: argparse.Namespace) -> dict[str, list[float]]:
    kinds: dict[str, dict[str, Any]] = {"free": {}, "grammar": {"response_format": FORMAT}}
    seen: dict[str, list[float]] = {kind: [] for kind in kinds}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for turn in range(-1, options.rounds):  # the first is for warming up
            for kind, more in kinds.items():
                values = await asyncio.gather(
                    *(
                        stream(client, 100 * turn + index, options.tokens, more)
                        for index in range(options.batch)
                    )
                )
                if turn >= 0:
                    seen[kind] += values
                    print(f"round {turn} {kind}: {1e3 * statistics.median(values):.2f} ms a token")
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.url:
        seen = asyncio.run(run(options.url, options))
    else:
        with real_server("--no-prefix-caching") as url:
            seen = asyncio.run(run(url, options))
    free, grammar = (1e3 * statistics.median(seen[kind]) for kind in ("free", "grammar"))
    print(
        f"bench-grammar: batch {options.batch}, median time per token {free:.2f} ms free, "
        f"{grammar:.2f} ms with a grammar, ratio {grammar / free:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
