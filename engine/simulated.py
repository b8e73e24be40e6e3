"""SimulatedEngine: a model that costs virtual time and checks every KV position it reads.

It runs the scheduler's plans on shadow KV: each position of a block remembers the whole prefix of
tokens that it was written for. A read of a stale, foreign or missing position is an error at once,
so tests need no model to catch a mixed-up block. It must not know torch nor the scheduler's state:
all it has is the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler.loop import OutOfMemory
from scheduler.types import (
    Admission,
    KVCapacity,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

Cost = Callable[[StepPlan], float]
NextToken = Callable[[str, tuple[int, ...]], int]


class ShadowKVError(AssertionError):
    """A plan reads or writes what it must not."""


class VirtualClock:
    """Time that moves only when it is told to; call it to read it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance_to(self, instant: float) -> None:
        self._now = max(self._now, instant)


@dataclass(slots=True)
class _Slot:
    """What the device knows of one sequence. `prefixes[p]` stands for tokens 0 .. p."""

    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    blocks: dict[int, int] = field(default_factory=dict)
    prefixes: list[int] = field(default_factory=list)


class SimulatedEngine:
    """Implements scheduler.loop.Engine in virtual time.

    `cost` gives a step's seconds; with pipelining a step starts when it is submitted or when the
    one before it ends. `next_token(request_id, tokens so far)` is the model. `domain` tells apart
    KV that equal tokens do not make equal (an adapter, a tenant); `row_errors` injects the faults
    of a plan as (row, message), `refuses` a lack of memory.
    """

    def __init__(
        self,
        capacity: KVCapacity,
        cost: Cost,
        next_token: NextToken,
        clock: VirtualClock | None = None,
        *,
        domain: Callable[[str], int] = lambda request_id: 0,  # noqa: ARG005
        row_errors: Callable[[StepPlan], Iterable[tuple[int, str]]] = lambda plan: (),  # noqa: ARG005
        refuses: Callable[[StepPlan], bool] = lambda plan: False,  # noqa: ARG005
    ) -> None:
        self.capacity = capacity
        self.clock = clock or VirtualClock()
        self._cost = cost
        self._next_token = next_token
        self._domain = domain
        self._row_errors = row_errors
        self._refuses = refuses
        self._slots: dict[int, _Slot] = {}
        # Of each block the prefixes of its written offsets. Writing an offset drops those behind.
        self._kv: list[list[int]] = [[] for _ in range(capacity.num_blocks)]
        self._last_step = 0
        self._free_at = 0.0

    def submit(self, plan: StepPlan) -> SimulatedResult:
        """Runs `plan` on the shadow KV now and lets its time pass when the result is awaited."""
        _require(plan.step == self._last_step + 1, "every plan runs, in order")
        if self._refuses(plan):
            self._begin(plan)
            self._spoil(plan)
            raise OutOfMemory("injected")
        self._last_step = plan.step
        seconds = self._cost(plan)
        self._free_at = max(self._free_at, self.clock()) + seconds
        return SimulatedResult(self._run(plan, seconds), self._free_at, self.clock)

    def _run(self, plan: StepPlan, seconds: float) -> StepResult:
        self._begin(plan)
        for row in range(len(plan.seq_ids)):
            self._read(plan, row)
        errors = tuple(self._row_errors(plan))
        return self._sample(plan, errors, seconds)

    def _begin(self, plan: StepPlan) -> None:
        """Everything of a step that has an effect on KV."""
        for admission in plan.admissions:
            self._admit(admission)
        for slot, index, block in zip(
            plan.block_slots, plan.block_indices, plan.block_ids, strict=True
        ):
            _require(0 <= block < self.capacity.num_blocks, f"block {block} exists")
            _require(index not in self._slots[slot].blocks, "a table only grows")
            self._slots[slot].blocks[index] = block
        for source, target in plan.copies:
            self._kv[target] = list(self._kv[source])
        writers: dict[int, int] = {}
        for row in range(len(plan.seq_ids)):
            self._write(plan, row, writers)

    def _admit(self, admission: Admission) -> None:
        _require(0 <= admission.slot < self.capacity.num_slots, "the slot exists")
        self._slots[admission.slot] = _Slot(
            list(admission.token_ids), admission.num_prompt_tokens, admission.sampling
        )

    def _write(self, plan: StepPlan, row: int, writers: dict[int, int]) -> None:
        """Writes the row's positions; one row alone may write a block in a step."""
        slot, start, length = plan.slots[row], plan.starts[row], plan.lengths[row]
        state = self._slots[slot]
        end = start + length
        _require(length >= 1, "a row has a position")
        _require(end <= len(state.token_ids), f"positions below {end} have a token")
        _require(end <= self.capacity.max_model_len, f"position {end - 1} is inside the limit")
        reaches_end = end == len(state.token_ids)
        _require(bool(plan.samples[row]) == reaches_end, "a row samples where it reaches the end")
        self._extend_prefixes(state, self._domain(plan.seq_ids[row]), end)
        size = self.capacity.block_size
        for position in range(start, end):
            index, offset = divmod(position, size)
            _require(index in state.blocks, f"position {position} has a block")
            block = state.blocks[index]
            _require(writers.setdefault(block, row) == row, f"block {block} has one writer")
            content = self._kv[block]
            before = state.prefixes[position - 1] if offset else None
            held = content[offset - 1] if 0 < offset <= len(content) else None
            _require(before == held, f"block {block} continues its own sequence")
            del content[offset:]
            content.append(state.prefixes[position])

    def _spoil(self, plan: StepPlan) -> None:
        """What a refused step leaves where it would have written is worth nothing."""
        for row, start in enumerate(plan.starts):
            blocks = self._slots[plan.slots[row]].blocks
            for position in range(start, start + plan.lengths[row]):
                index, offset = divmod(position, self.capacity.block_size)
                del self._kv[blocks[index]][offset:]

    @staticmethod
    def _extend_prefixes(state: _Slot, domain: int, end: int) -> None:
        prefixes = state.prefixes
        for position in range(len(prefixes), end):
            before = prefixes[-1] if prefixes else domain
            prefixes.append(hash((before, position, state.token_ids[position])))

    def _read(self, plan: StepPlan, row: int) -> None:
        """Checks the table below the row's end: a block is one chain, so its last offset tells."""
        state = self._slots[plan.slots[row]]
        end = plan.starts[row] + plan.lengths[row]
        size = self.capacity.block_size
        for first in range(0, end, size):
            position = min(first + size, end) - 1
            block = state.blocks.get(first // size)
            content = self._kv[block] if block is not None else []
            offset = position - first
            intact = offset < len(content) and content[offset] == state.prefixes[position]
            _require(
                intact, f"{plan.seq_ids[row]} reads its own position {position} in block {block}"
            )

    def _sample(
        self, plan: StepPlan, errors: tuple[tuple[int, str], ...], seconds: float
    ) -> StepResult:
        states = [self._slots[slot] for slot in plan.slots]
        asked = any(state.sampling.num_logprobs is not None for state in states)
        asked_prompt = any(state.sampling.prompt_logprobs is not None for state in states)
        # Before sampling adds tokens, since prompt logprobs look one token ahead.
        prompt_logprobs = tuple(
            _prompt_logprobs(state, plan.starts[row], plan.starts[row] + plan.lengths[row])
            for row, state in enumerate(states)
        )
        token_ids: list[tuple[int, ...]] = []
        for row, state in enumerate(states):
            if not plan.samples[row]:
                token_ids.append(())
                continue
            token = self._next_token(plan.seq_ids[row], tuple(state.token_ids))
            state.token_ids.append(token)
            token_ids.append((token,))
        logprobs = tuple(
            tuple(_certain(token, state.sampling.num_logprobs) for token in tokens)
            if state.sampling.num_logprobs is not None
            else ()
            for state, tokens in zip(states, token_ids, strict=True)
        )
        return StepResult(
            step=plan.step,
            token_ids=tuple(token_ids),
            logprobs=logprobs if asked else None,
            prompt_logprobs=prompt_logprobs if asked_prompt else None,
            row_errors=errors,
            device_seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class SimulatedResult:
    """A step on its way; waiting for it moves the clock to its end."""

    value: StepResult
    done_at: float
    clock: VirtualClock

    def result(self) -> StepResult:
        self.clock.advance_to(self.done_at)
        return self.value


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ShadowKVError(f"not so: {what}")


def _certain(token_id: int, num_top: int | None) -> TokenLogprobs:
    """The log-probabilities of a model that has no doubt."""
    return TokenLogprobs(token_id, 0.0, ((token_id, 0.0),) if num_top else ())


def _prompt_logprobs(state: _Slot, start: int, end: int) -> tuple[TokenLogprobs, ...]:
    num_top = state.sampling.prompt_logprobs
    if num_top is None:
        return ()
    last = min(end, state.num_prompt - 1)
    return tuple(_certain(state.token_ids[p + 1], num_top) for p in range(start, last))
