"""The whole HTTP side over the real core protocol and a byte tokenizer; only the model is a script.

A script says which text (or ids) follows a prompt that contains a word. `asgi_client` talks to the
app without a socket, `live_server` is uvicorn on a free port.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from scheduler.limits import SchedulerLimits
from scheduler.policy import Policy
from scheduler.types import KVCapacity, SamplingParams, StepPlan, TokenLogprobs
from server.app import create_app
from server.config import ServerConfig
from server.core_client import CoreClient
from server.http_limits import limited
from server.tokenizer import Tokenizer
from server.wire import CoreInfo
from tests.support.scripted_engine import CAPACITY, LIMITS, ScriptedEngine, _Pending, running_core
from tests.support.tokenizers import BYTE_VOCAB_SIZE, EOS, IM_END, byte_tokenizer

# Padded above the tokenizer, as real models are.
MODEL_VOCAB_SIZE = BYTE_VOCAB_SIZE + 4
MODEL = "scripted"
MASKED = float("-inf")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Script = str | Sequence[int]


def fake_logprob(token_id: int) -> float:
    return -0.25 - (token_id % 16) / 8


class TextEngine(ScriptedEngine):
    """Answers a prompt that contains a word of `scripts` with its text, then EOS.

    Any other prompt gets letters that depend on the seed, without end. Log-probabilities are
    `fake_logprob`; the second best token is masked, so -inf is always among the alternatives.
    """

    def __init__(
        self,
        scripts: dict[str, Script] | None = None,
        *,
        capacity: KVCapacity = CAPACITY,
        step_seconds: float = 0.0,
    ) -> None:
        super().__init__(self._script_token, capacity=capacity, step_seconds=step_seconds)
        self.scripts = {
            word.encode(): list(script.encode()) if isinstance(script, str) else list(script)
            for word, script in (scripts or {}).items()
        }
        self.sampling: dict[int, SamplingParams] = {}  # by slot
        self.by_request: dict[str, SamplingParams] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def _script_token(self, request_id: str, tokens: Sequence[int], num_prompt: int) -> int:
        prompt = bytes(token for token in tokens[:num_prompt] if token < 256)
        index = len(tokens) - num_prompt
        for word, script in self.scripts.items():
            if word in prompt:
                return script[index] if index < len(script) else EOS
        seed = self.by_request[request_id].seed
        return ord("a") + (seed + index * (1 + seed % 5)) % 26

    def submit(self, plan: StepPlan) -> _Pending:
        for admission in plan.admissions:
            self.sampling[admission.slot] = admission.sampling
            self.prompts[admission.slot] = admission.token_ids[: admission.num_prompt_tokens]
        for request_id, slot in zip(plan.seq_ids, plan.slots, strict=True):
            self.by_request[request_id] = self.sampling[slot]
        pending = super().submit(plan)
        sampled = pending.value.token_ids
        logprobs = tuple(
            tuple(self._logprobs(slot, token) for token in row)
            for slot, row in zip(plan.slots, sampled, strict=True)
        )
        prompt_logprobs = tuple(
            self._prompt_logprobs(slot, start, length)
            for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True)
        )
        value = replace(pending.value, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return _Pending(self, value)

    def _logprobs(self, slot: int, token_id: int) -> TokenLogprobs:
        return _with_top(token_id, self.sampling[slot].num_logprobs or 0)

    def _prompt_logprobs(self, slot: int, start: int, length: int) -> tuple[TokenLogprobs, ...]:
        prompt = self.prompts[slot]
        wanted = self.sampling[slot].prompt_logprobs
        if wanted is None:
            return ()
        end = min(start + length, len(prompt) - 1)
        return tuple(_with_top(prompt[position + 1], wanted) for position in range(start, end))


def _with_top(token_id: int, num_top: int) -> TokenLogprobs:
    best = [(token_id, fake_logprob(token_id)), ((token_id + 1) % 256, MASKED)]
    rest = [((token_id + 2 + i) % 256, -5.0 - i) for i in range(num_top)]
    return TokenLogprobs(token_id, fake_logprob(token_id), tuple((*best, *rest)[:num_top]))


@dataclass(frozen=True, slots=True)
class House:
    """What a test may look into."""

    app: FastAPI
    core: CoreClient
    engine: ScriptedEngine
    client: httpx.AsyncClient
    url: str = "http://test"

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post(CHAT, json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.client.post(COMPLETIONS, json={"prompt": prompt, **fields})

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.client.get("/metrics")).text
        return metric(text, name, **labels)


def metric(text: str, name: str, **labels: str) -> float:
    """The value of one series of an exposition; 0 where it does not exist (yet)."""
    shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    wanted = f"{name}{{{shown}}}" if labels else name
    for line in text.splitlines():
        if line.startswith(wanted + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def info_of(engine: ScriptedEngine, limits: SchedulerLimits) -> CoreInfo:
    return CoreInfo(
        model_name=MODEL,
        max_model_len=engine.capacity.max_model_len,
        context_length=engine.capacity.max_model_len,
        vocab_size=MODEL_VOCAB_SIZE,
        eos_token_ids=(EOS, IM_END),
        capacity=engine.capacity,
        limits=limits,
        dtype="none",
        device="cpu",
        kernels="scripted",
    )


@functools.cache
def shared_tokenizer() -> Tokenizer:
    """One for all tests: its chat template has a child process."""
    return byte_tokenizer()


@asynccontextmanager
async def house(
    engine: ScriptedEngine | None = None,
    config: ServerConfig | None = None,
    *,
    limits: SchedulerLimits = LIMITS,
    policy: Policy | None = None,
    tokenizer: Tokenizer | None = None,
    depth: int = 0,
    live: bool = False,
    **app_options: Any,
) -> AsyncIterator[House]:
    """A server and a client for it; `live` puts uvicorn and a socket between them."""
    engine = engine or TextEngine()
    info = info_of(engine, limits)
    async with running_core(engine, limits=limits, policy=policy, info=info, depth=depth) as core:
        app = create_app(
            core, tokenizer or shared_tokenizer(), config or ServerConfig(), **app_options
        )
        if live:
            async with live_server(app) as url, httpx.AsyncClient(base_url=url) as client:
                client.timeout = httpx.Timeout(60.0)
                yield House(app, core, engine, client, url)
            return
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield House(app, core, engine, client)


async def connect(
    server: House, *, limit: int = 1 << 16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A socket to a live server, for what no HTTP client would send."""
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), limit=limit)


@asynccontextmanager
async def live_server(app: FastAPI) -> AsyncIterator[str]:
    """uvicorn in this event loop."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    http = limited(max_header_bytes=64 << 10, count_refusal=app.state.count_refusal)
    config = uvicorn.Config(app, http=http, ws="none", log_config=None, lifespan="on")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


class _no_signals:
    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...


def run(test: Callable[[], Awaitable[None]], timeout_seconds: float = 120.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(timeout_seconds):
            await test()

    asyncio.run(limited())


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Makes a test of a coroutine function, with a limit of time."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        run(lambda: test(*args, **kwargs))

    return wrapped


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], seconds: float = 30.0
) -> None:
    """Waits until it holds; fails the test if it does not within `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        assert asyncio.get_running_loop().time() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def events(text: str) -> list[Any]:
    """The data of a finished stream, [DONE] checked and taken off; comments are left out."""
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data[-1] == "[DONE]"
    assert "[DONE]" not in data[:-1]
    return [json.loads(item) for item in data[:-1]]


def texts(chunks: list[Any]) -> dict[int, str]:
    """Joined text by choice, of either kind of stream."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined


def finish_reasons(chunks: list[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                found.setdefault(choice["index"], []).append(choice["finish_reason"])
    return found
