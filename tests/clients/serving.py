"""A server with scripted answers for real clients; as a program it prints its URL.

Takes a folder for files and batches, and a limit of output tokens. It ends when its standard input
does. The HTTP side, tokenizer and core protocol are the real ones.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import numpy as np

from scheduler.types import StepPlan
from server.config import ServerConfig
from tests.support.http_server import TextEngine, house
from tests.support.scripted_engine import _Pending

KEY = "sk-conformance"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPTS = {
    "22 degrees": "It is 22 degrees in Paris.",
    "weather": CALL,
    "as json": '{"city": "Paris", "country": "France"}',
    "stop early": "one two STOP three",
    "count": "1 2 3 4 5 6 7 8 9",
    "hello": "Hello there, čau \U0001f600!",
}
DIMENSIONS = 16


class ClientEngine(TextEngine):
    """Scripted texts, and vectors that depend on the prompt."""

    def submit(self, plan: StepPlan) -> _Pending:
        pending = super().submit(plan)
        pooled = tuple(
            self._vector(slot) if samples and self.sampling[slot].pooling is not None else b""
            for slot, samples in zip(plan.slots, plan.samples, strict=True)
        )
        return _Pending(self, replace(pending.value, pooled=pooled))

    def _vector(self, slot: int) -> bytes:
        draw = np.random.default_rng(list(self.prompts[slot]))
        return draw.standard_normal(DIMENSIONS).astype("<f4").tobytes()


async def serve(data_dir: str = "", max_output_tokens: str = "") -> None:
    limit = int(max_output_tokens) if max_output_tokens else None
    config = ServerConfig(api_keys=(KEY,), data_dir=data_dir, max_output_tokens=limit)
    async with house(ClientEngine(SCRIPTS), config, live=True) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
