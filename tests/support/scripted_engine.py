"""An engine for tests of the server: real threads and sockets, tokens from a script, no model.

It can be slow, stand still, fail a step or fail a row when a test says so. `running_core` puts it
behind the real protocol and hands out the client.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scheduler.limits import SchedulerLimits
from scheduler.loop import Engine
from scheduler.policy import FirstComeFirstServed, Policy
from scheduler.types import KVCapacity, Request, StepPlan, StepResult
from server.config import EngineConfig
from server.core_client import CoreClient, CoreState
from server.core_process import start_core_thread
from server.wire import CoreInfo, Start

VOCAB_SIZE = 260  # all of tests.support.tokenizers' bytes and specials
EOS = 255
CAPACITY = KVCapacity(num_blocks=256, block_size=16, num_slots=16, max_model_len=2048)
LIMITS = SchedulerLimits(max_step_tokens=256, max_waiting=64, max_running=16, watermark_blocks=1)

NextToken = Callable[[str, Sequence[int], int], int]  # request id, tokens so far, prompt length


def count_up(_request_id: str, tokens: Sequence[int], num_prompt_tokens: int) -> int:
    """Token i of every answer is i (modulo 200): order and gaps are easy to check."""
    return (len(tokens) - num_prompt_tokens) % 200


@dataclass(slots=True)
class _Pending:
    engine: ScriptedEngine
    value: StepResult

    def result(self) -> StepResult:
        self.engine.wait()
        return self.value


class ScriptedEngine:
    """Implements scheduler.loop.Engine.

    `step_seconds` is the real length of a step; while `running` is cleared, steps do not end.
    `fail_step` breaks the next step; ids in `bad_requests` fail their row.
    """

    def __init__(
        self,
        next_token: NextToken = count_up,
        *,
        capacity: KVCapacity = CAPACITY,
        step_seconds: float = 0.0,
    ) -> None:
        self.capacity = capacity
        self.step_seconds = step_seconds
        self.running = threading.Event()
        self.running.set()
        self.fail_step = threading.Event()
        self.bad_requests: set[str] = set()
        self.num_steps = 0
        self._next_token = next_token
        self._slots: dict[int, tuple[list[int], int]] = {}

    def submit(self, plan: StepPlan) -> _Pending:
        self.num_steps += 1
        for admission in plan.admissions:
            tokens = list(admission.token_ids)
            self._slots[admission.slot] = (tokens, admission.num_prompt_tokens)
        sampled: list[tuple[int, ...]] = []
        errors: list[tuple[int, str]] = []
        for row, (request_id, slot) in enumerate(zip(plan.seq_ids, plan.slots, strict=True)):
            if request_id in self.bad_requests:
                errors.append((row, "this row is scripted to fail"))
            if not plan.samples[row] or request_id in self.bad_requests:
                sampled.append(())
                continue
            tokens, num_prompt_tokens = self._slots[slot]
            token = self._next_token(request_id, tokens, num_prompt_tokens)
            tokens.append(token)
            sampled.append((token,))
        result = StepResult(
            plan.step,
            tuple(sampled),
            row_errors=tuple(errors),
            device_seconds=self.step_seconds,
        )
        return _Pending(self, result)

    def wait(self) -> None:
        """Until the step that was submitted is over. Raises what the test ordered."""
        self.running.wait(60.0)
        time.sleep(self.step_seconds)
        if self.fail_step.is_set():
            raise RuntimeError("this step is scripted to fail")


def info_for(engine: Engine, limits: SchedulerLimits = LIMITS) -> CoreInfo:
    return CoreInfo(
        model_name="scripted",
        max_model_len=engine.capacity.max_model_len,
        context_length=engine.capacity.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        capacity=engine.capacity,
        limits=limits,
        dtype="none",
        device="cpu",
        kernels="scripted",
    )


def request(
    name: str, num_prompt_tokens: int = 4, max_tokens: int = 8, **fields: object
) -> Request:
    """A plain request; its prompt differs by name."""
    prompt = tuple((len(name) + i) % 100 for i in range(num_prompt_tokens))
    return Request(name, prompt, max_tokens, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def running_core(
    engine: Engine,
    *,
    limits: SchedulerLimits = LIMITS,
    policy: Policy | None = None,
    depth: int = 0,
    info: CoreInfo | None = None,
) -> AsyncIterator[CoreClient]:
    """A client that is ready, over a socket to a core in a thread."""
    info = info or info_for(engine, limits)
    core = start_core_thread(
        engine, limits, policy or FirstComeFirstServed(), info=info, depth=depth
    )
    client = CoreClient()
    ready = asyncio.Event()
    client.on_ready = lambda _info: ready.set()
    serving = asyncio.create_task(
        client.serve(core.sock, Start(EngineConfig(), limits, VOCAB_SIZE))
    )
    try:
        await asyncio.wait_for(ready.wait(), 10.0)
        assert client.state is CoreState.READY
        yield client
    finally:
        await asyncio.to_thread(core.stop)
        await serving
