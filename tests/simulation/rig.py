"""A rig: scheduler and SimulatedEngine joined by hand, so that a test chooses what happens when.

It checks every invariant after every move, and each answer against what the model would have said
to that request alone.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.simulated import SimulatedEngine, SimulatedResult, VirtualClock
from scheduler.limits import SchedulerLimits
from scheduler.loop import OutOfMemory
from scheduler.policy import FirstComeFirstServed, Policy
from scheduler.prefix import BlockKey, Digest, sha256
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Abort,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    KVCapacity,
    Request,
    SamplingParams,
    StepPlan,
    StepStats,
    Submit,
    Tokens,
)
from tests.simulation.invariants import PlanCheck, check_invariants
from tests.simulation.ledger import Ledger

VOCAB = 23


def next_token(request_id: str, token_ids: tuple[int, ...]) -> int:
    """A model whose every token depends on all tokens before it, and on the request's seed."""
    return zlib.crc32(array("i", token_ids).tobytes(), zlib.crc32(request_id.encode())) % VOCAB


def alone(request: Request) -> tuple[tuple[int, ...], FinishReason]:
    """What the request yields with nobody else around."""
    token_ids: list[int] = []
    while len(token_ids) < request.max_tokens:
        token_ids.append(next_token(request.id, (*request.prompt, *token_ids)))
        may_stop = len(token_ids) > request.sampling.min_tokens
        if may_stop and token_ids[-1] in request.stop_token_ids:
            return tuple(token_ids), FinishReason.STOP
    return tuple(token_ids), FinishReason.LENGTH


@dataclass
class Answer:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    first: FirstToken | None = None
    finished: Finished | None = None


class Rig:
    """`depth` plans may be in flight when the next is made."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_step_tokens: int = 64,
        max_running: int = 8,
        max_waiting: int = 1000,
        watermark_blocks: int = 0,
        prefix_caching: bool = True,
        max_chunk_tokens: int | None = None,
        max_model_len: int = 1 << 20,
        policy: Policy | None = None,
        depth: int = 0,
        digest: Digest = sha256,
        model: Callable[[str, tuple[int, ...]], int] = next_token,
        weights: tuple[tuple[str, float], ...] = (),
        num_tenants: int = 1,
    ) -> None:
        self.capacity = KVCapacity(num_blocks, block_size, max_running, max_model_len)
        self.limits = SchedulerLimits(
            max_step_tokens,
            max_waiting,
            max_running,
            watermark_blocks,
            prefix_caching,
            max_chunk_tokens,
            num_tenants=num_tenants,
            weights=weights,
        )
        self.digest = digest
        self.scheduler = Scheduler(
            self.capacity, self.limits, policy or FirstComeFirstServed(), digest=digest
        )
        self.ledger = Ledger(self.scheduler)
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(
            self.capacity,
            lambda plan: 1.0,  # noqa: ARG005
            model,
            self.clock,
            domain=lambda request_id: hash(self.answers[request_id].request.cache_namespace),
            row_errors=lambda plan: self._faults(plan),
            refuses=lambda plan: sum(plan.lengths) > self.memory,
        )
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, SimulatedResult]] = deque()
        self.plans: list[StepPlan] = []
        self.answers: dict[str, Answer] = {}
        self.stats: list[StepStats] = []
        self.failing: set[str] = set()  # requests whose next row fails
        self.num_refused = 0
        self.refused_alone: Counter[str] = Counter()
        self.memory = 1 << 20  # tokens of the largest step that the engine has memory for
        self._num_made = 0
        self._published: deque[list[list[tuple[int, BlockKey]]]] = deque()

    # --- moves ------------------------------------------------------------------------------------

    def request(
        self, prompt: Iterable[int], max_tokens: int = 4, *, id: str | None = None, **fields: object
    ) -> Request:
        self._num_made += 1
        fields.setdefault("arrival", self.clock())
        return Request(
            id or f"r{self._num_made}",
            tuple(prompt),
            max_tokens,
            **fields,  # type: ignore[arg-type]
        )

    def submit(self, *requests: Request) -> list[Event]:
        for request in requests:
            self.answers[request.id] = Answer(request)
        levels = self.ledger.levels()
        events = self.scheduler.handle(Submit(requests), self.clock())
        self.ledger.submitted([request.id for request in requests], levels)
        return self._record(events)

    def add(self, prompt: Iterable[int], max_tokens: int = 4, **fields: object) -> Request:
        """Submits one request, alone."""
        request = self.request(prompt, max_tokens, **fields)  # type: ignore[arg-type]
        self.submit(request)
        return request

    def add_group(self, n: int, prompt: Iterable[int], max_tokens: int = 4, **fields: object):
        prompt = tuple(prompt)
        group = tuple(self.request(prompt, max_tokens, **fields) for _ in range(n))  # type: ignore[arg-type]
        self.submit(*group)
        return group

    def abort(self, *request_ids: str) -> list[Event]:
        known = [i for i in request_ids if i in self.scheduler.sequences]
        events = self._record(self.scheduler.handle(Abort(request_ids), self.clock()))
        ended = [e.request_id for e in events if isinstance(e, Finished)]
        assert ended == known, "an abort ends what it names at once, and nothing else"
        return events

    def plan(self) -> StepPlan | None:
        """Plans a step and submits it; None if there is none, or no memory for it."""
        self.expire()
        self.ledger.planning(self.clock())
        check = PlanCheck(self.scheduler)
        plan = self.scheduler.schedule(self.clock())
        check.check(plan)
        check_invariants(self.scheduler, self.digest)
        if plan is None:
            return None
        try:
            pending = self.engine.submit(plan)
        except OutOfMemory:
            self._take_back(plan)
            return None
        self.plans.append(plan)
        self.ledger.planned(plan)
        self._note_published(plan)
        self.in_flight.append((plan, pending))
        return plan

    def expire(self) -> list[Event]:
        """Ends what waited too long; nothing of it was begun."""
        now = self.clock()
        late = [
            request_id
            for request_id, sequence in self.scheduler.sequences.items()
            if sequence.request.deadline is not None
            and sequence.request.deadline <= now
            and not sequence.has_begun
        ]
        events = self._record(self.scheduler.expire(now))
        ended = [event for event in events if isinstance(event, Finished)]
        assert {event.reason for event in ended} <= {FinishReason.EXPIRED}
        assert sorted(event.request_id for event in ended) == sorted(late)
        assert not any(self.num_computed(request_id) for request_id in late)
        return events

    def _take_back(self, plan: StepPlan) -> None:
        """Nobody of the plan runs any more; none fails but a small row alone, at its third try."""
        events = self._record(self.scheduler.take_back(plan, self.clock()))
        self.num_refused += 1
        ended = [event for event in events if isinstance(event, Finished)]
        small = len(plan.lengths) == 1 and plan.lengths[0] <= self.capacity.block_size
        self.refused_alone += Counter(plan.seq_ids[:1] if small else ())
        assert len(ended) == (small and self.refused_alone[plan.seq_ids[0]] == 3)
        running = {sequence.request.id for sequence in self.scheduler.batch.running}
        assert not running & set(plan.seq_ids)

    def apply(self) -> list[Event]:
        """Takes in the oldest result."""
        plan, pending = self.in_flight.popleft()
        result = pending.result()
        events = self._record(self.scheduler.apply(plan, result, self.clock()))
        published = self._published.popleft()
        for row, _ in result.row_errors:
            for block, key in published[row]:
                assert self.scheduler.batch.pool.key_of(block) is not key, "a failed row is no hit"
        return events

    def _note_published(self, plan: StepPlan) -> None:
        """What each row of the new plan writes that others can find now."""
        rows = []
        for row, request_id in enumerate(plan.seq_ids):
            table = self.scheduler.sequences[request_id].block_ids
            first = plan.starts[row] // self.capacity.block_size
            keys = ((block, self.scheduler.batch.pool.key_of(block)) for block in table[first:])
            rows.append([(block, key) for block, key in keys if key is not None])
        self._published.append(rows)

    def step(self) -> StepPlan | None:
        """One turn of the loop."""
        refused = self.num_refused
        plan = self.plan()
        moved = plan or self.in_flight or self.num_refused > refused
        assert moved or self.scheduler.idle, "somebody can always move"
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.apply()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Until everything has finished; then nothing may be left behind."""
        for _ in range(max_steps):
            if self.scheduler.idle and not self.in_flight:
                break
            self.step()
        assert self.scheduler.idle, f"not done after {max_steps} steps"
        assert self.scheduler.batch.pool.num_available == self.capacity.num_blocks
        assert not self.scheduler.batch.running
        assert not len(self.scheduler.line)

    def _faults(self, plan: StepPlan) -> list[tuple[int, str]]:
        rows = [(i, "injected") for i, r in enumerate(plan.seq_ids) if r in self.failing]
        self.failing -= {plan.seq_ids[row] for row, _ in rows}
        return rows

    # --- what came of it --------------------------------------------------------------------------

    def _record(self, events: list[Event]) -> list[Event]:
        check_invariants(self.scheduler, self.digest)
        self.ledger.told(events)
        self.ledger.check()
        for event in events:
            if isinstance(event, StepStats):
                self.stats.append(event)
                continue
            answer = self.answers[event.request_id]
            assert answer.finished is None, "nothing comes after Finished"
            if isinstance(event, Finished):
                answer.finished = event
                self._check_answer(answer)
            else:
                self._add(answer, event)
        unfinished = {i for i, a in self.answers.items() if a.finished is None}
        assert unfinished == set(self.scheduler.sequences), "one Finished for each request"
        return events

    def _add(self, answer: Answer, event: Tokens) -> None:
        is_first = answer.first is None and (
            bool(event.token_ids) or answer.request.max_tokens == 0
        )
        if event.first is not None:
            assert is_first, "FirstToken comes once, with the first token"
            assert answer.request.arrival <= event.first.scheduled_at <= event.first.prefilled_at
            assert event.first.prefilled_at <= event.first.sampled_at
            answer.first = event.first
        else:
            assert not event.token_ids or not is_first
        answer.token_ids += event.token_ids
        answer.num_prompt_logprobs += len(event.prompt_logprobs)

    def _check_answer(self, answer: Answer) -> None:
        request, finished = answer.request, answer.finished
        assert finished is not None
        token_ids, reason = alone(request) if self.engine._next_token is next_token else ((), None)
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            if reason is not None:
                assert (tuple(answer.token_ids), finished.reason) == (token_ids, reason)
            stopped = finished.reason is FinishReason.STOP
            assert finished.stop_token_id == (answer.token_ids[-1] if stopped else None)
            wanted = request.sampling.prompt_logprobs is not None
            assert answer.num_prompt_logprobs == (len(request.prompt) - 1 if wanted else 0)
        elif reason is not None:
            assert tuple(answer.token_ids) == token_ids[: len(answer.token_ids)]

    def num_computed(self, request_id: str) -> int:
        """Positions of a request in all plans, with those computed again."""
        return sum(
            plan.lengths[row]
            for plan in self.plans
            for row, seq_id in enumerate(plan.seq_ids)
            if seq_id == request_id
        )

    @property
    def num_preemptions(self) -> int:
        return sum(stats.num_preemptions for stats in self.stats)

    def reasons(self) -> Counter[FinishReason]:
        return Counter(a.finished.reason for a in self.answers.values() if a.finished)


GREEDY = SamplingParams(temperature=0.0)
