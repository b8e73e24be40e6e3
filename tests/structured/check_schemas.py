"""make test-schemas: the corpus with the real model at temperature 1, judged by `jsonschema`.

Sends every schema that must be accepted and reads what comes; sends every schema that must be
refused and looks for the word. The last line says what was seen; the exit code is 1 if any finished
output does not validate, or a refusal does not name its keyword.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
from jsonschema.validators import validator_for

from tests.structured.corpus import ACCEPTED, REFUSED
from tests.structured.server import real_server

CONCURRENCY = 16
QUESTION = "Invent some data and write it down as JSON. Keep every text short."


@dataclass
class Seen:
    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    faults: list[str] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, schema: Any, seed: int, tokens: int) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": tokens,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    return await client.post("/v1/chat/completions", json=body)


def judge(schema: Any, text: str) -> None:
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


async def check_accepted(
    client: httpx.AsyncClient, name: str, options: argparse.Namespace, seen: Seen
) -> None:
    schema = ACCEPTED[name]
    answer = await ask(client, schema, options.seed, options.max_tokens)
    if answer.status_code != 200:
        seen.faults.append(f"{name}: {answer.status_code} {answer.text[:300]}")
        return
    body = answer.json()
    choice = body["choices"][0]
    seen.num_tokens += body["usage"]["completion_tokens"]
    seen.outcomes[choice["finish_reason"]] += 1
    if choice["finish_reason"] != "stop":
        return
    try:
        judge(schema, choice["message"]["content"])
    except (ValueError, jsonschema.ValidationError) as error:
        seen.faults.append(f"{name}: {choice['message']['content']!r}: {str(error)[:300]}")
    else:
        seen.outcomes["valid"] += 1


async def check_refused(client: httpx.AsyncClient, schema: Any, word: str, seen: Seen) -> None:
    answer = await ask(client, schema, 0, 5)
    message = answer.json().get("error", {}).get("message", "") if answer.status_code else ""
    if answer.status_code == 400 and word in message:
        seen.outcomes["refused"] += 1
    else:
        seen.faults.append(f"{schema!r}: {answer.status_code} {message!r} does not name {word!r}")


async def run(url: str, options: argparse.Namespace) -> Seen:
    seen = Seen()
    names = list(ACCEPTED)[:: options.every]
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def gated(work: Any) -> None:
            async with gate:
                await work

        await asyncio.gather(
            *(gated(check_accepted(client, name, options, seen)) for name in names),
            *(gated(check_refused(client, schema, word, seen)) for schema, word in REFUSED),
        )
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--every", type=int, default=1, help="only every N-th schema")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    if options.url:
        seen = asyncio.run(run(options.url, options))
    else:
        with real_server() as url:
            seen = asyncio.run(run(url, options))
    for fault in seen.faults:
        print("FAULT", fault)
    outcomes = seen.outcomes
    print(
        f"test-schemas: {outcomes['valid']} of {outcomes['stop']} finished outputs valid, "
        f"{outcomes['length']} cut by length, "
        f"{outcomes['refused']} of {len(REFUSED)} refusals named, "
        f"{len(seen.faults)} faults, {seen.num_tokens} tokens in "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
