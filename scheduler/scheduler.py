"""The scheduler: commands and step results in, step plans and events out.

A pure state machine. It must not read a clock, draw a random number or know an engine: the same
commands, results and times give the same plans and events. It may be ahead of the engine: planning
counts as computing, because plans run in order, each writing its KV before any later one reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from scheduler.batch import Batch
from scheduler.deadlines import Deadlines
from scheduler.draft import Draft
from scheduler.limits import SchedulerLimits
from scheduler.line import GENERATED_COST, Line
from scheduler.places import Places
from scheduler.policy import Policy, max_total_tokens, never_fits
from scheduler.prefix import Digest, KeyChain, sha256
from scheduler.room import Room
from scheduler.rows import Rows
from scheduler.sequence import Sequence
from scheduler.trace import Counts, kv_map, prompt_rows, step_stats
from scheduler.types import (
    Abort,
    Command,
    Drain,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Inspect,
    KVCapacity,
    Request,
    StepPlan,
    StepResult,
    StepStats,
    Submit,
    TokenLogprobs,
    Tokens,
)

# How often a request may be refused memory for a small row alone.
MAX_REFUSALS = 3


class Scheduler:
    """Decides, step by step, which sequences run and on which blocks.

    `digest` names block contents; it is a parameter so that tests can make it collide.
    """

    def __init__(
        self,
        capacity: KVCapacity,
        limits: SchedulerLimits,
        policy: Policy,
        *,
        digest: Digest = sha256,
    ) -> None:
        assert 1 <= limits.max_running <= capacity.num_slots
        assert limits.max_step_tokens >= 1
        self.capacity = capacity
        self.limits = limits
        chain = KeyChain(capacity.block_size, digest) if limits.prefix_caching else None
        self.batch = Batch(capacity, limits.max_running, limits.watermark_blocks, chain)
        self.line = Line(dict(limits.weights))
        self.sequences: dict[str, Sequence] = {}
        self._policy = policy
        self.places = Places(limits)
        self._deadlines = Deadlines()
        self._rows = Rows(self.batch, self.line, policy, capacity=capacity, limits=limits)
        self._room = Room(limits.max_step_tokens)
        self._in_flight: deque[Draft] = deque()
        self._step = 0
        self._serial = 0
        self._draining = False

    @property
    def idle(self) -> bool:
        """Nothing that was accepted is unfinished."""
        return not self.sequences

    @property
    def drained(self) -> bool:
        return self._draining and self.idle

    # --- commands ---------------------------------------------------------------------------------

    def handle(self, command: Command, now: float) -> list[Event]:
        """Takes in one command; the events are refusals and aborts."""
        match command:
            case Submit(requests):
                return self._submit(requests, now)
            case Abort(request_ids):
                # A client may say it twice in one breath.
                ids = dict.fromkeys(request_ids)
                found = [self.sequences[i] for i in ids if i in self.sequences]
                return [self._finish(sequence, FinishReason.ABORT, now) for sequence in found]
            case Drain():
                self._draining = True
                return []
            case Inspect():
                return [kv_map(self.batch)]

    def _submit(self, requests: tuple[Request, ...], now: float) -> list[Event]:
        refusal = self._refusal(requests)
        if refusal is not None:
            return [
                Finished(request.id, FinishReason.ERROR, refusal, finished_at=now)
                for request in requests
            ]
        family: list[Sequence] = []
        for request in requests:
            assert request.id not in self.sequences, "request ids are unique"
            assert request.prompt, "a prompt has a token"
            assert request.prompt == requests[0].prompt, "one Submit, one prompt"
            self._serial += 1
            sequence = Sequence(
                request,
                self._policy.key(request, self._serial),
                self.line.lane(self._policy.lane(request)),
                list(request.prompt),
                end=len(request.prompt) + max(1, request.max_tokens) - 1,
                family=family,
            )
            if len(requests) > 1:
                family.append(sequence)
            self.sequences[request.id] = sequence
            self.line.join(sequence)
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.id)
        self.places.take(requests[0].tenant, len(requests))
        return []

    def _refusal(self, requests: tuple[Request, ...]) -> str | None:
        """Why none of `requests` is taken, or None."""
        if self._draining:
            return "the server is shutting down"
        if any(never_fits(request, self.capacity) for request in requests):
            limit = max_total_tokens(self.capacity)
            return f"prompt and answer together may have at most {limit} tokens"
        return self.places.refusal(requests[0].tenant, len(requests))

    def expire(self, now: float) -> list[Event]:
        """Ends those of which nothing has been begun by their deadline; call it every turn."""
        due = [self.sequences.get(request_id) for request_id in self._deadlines.due(now)]
        self._deadlines.forget(self.sequences, len(self.sequences))
        return [
            self._finish(sequence, FinishReason.EXPIRED, now, "it could not be begun in time")
            for sequence in due
            if sequence is not None and not sequence.has_begun
        ]

    # --- planning ---------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if no sequence can move before a result or a command arrives.

        Every plan must be submitted, in order, or taken back at once.
        """
        draft = Draft(self._step + 1, self._room.tokens)
        self._rows.fill(draft, now)
        if not draft.rows:
            return None
        self._step = draft.step
        self._in_flight.append(draft)
        return draft.plan()

    def take_back(self, plan: StepPlan, now: float) -> list[Event]:
        """The engine had no memory for the newest plan: it never was, and its rows enter anew.

        What the engine did of it before can be anything but tokens, so nothing of it is trusted,
        and steps have less room for a while. A row that is small and alone is tried a few times
        and then ends its request. The last event is a StepStats.
        """
        draft = self._in_flight.pop()
        assert draft.step == plan.step, "only the newest plan can be taken back"
        self._step -= 1
        self._room.refuse(sum(draft.lengths))
        self._rows.counts.refused_steps += 1
        for _, block in draft.published:
            self.batch.pool.unpublish(block)
        draft.take_back()
        first = draft.rows[0]
        if len(draft.rows) == 1 and draft.lengths[0] <= self.capacity.block_size:
            first.num_refusals += 1
            if first.num_refusals == MAX_REFUSALS:
                self._room.relieve()
                message = "the engine has no memory left for this request"
                return [self._finish(first, FinishReason.ERROR, now, message), self.stats()]
        for sequence in draft.rows:
            if sequence in draft.entered:
                self._rows.turn_back(sequence)
            else:
                self._rows.preempt(sequence)
        return [self.stats()]

    # --- results ----------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Takes in what the oldest plan in flight yielded; the last event is a StepStats.

        Rows whose sequence is gone are dropped. The loop fills in plan_seconds and step_seconds.
        """
        draft = self._in_flight.popleft()
        assert draft.step == plan.step == result.step, "results come in the order of plans"
        self._room.fit()
        self._rows.counts.add(draft)
        errors = dict(result.row_errors)
        for row, block in draft.published:
            if row in errors:
                self.batch.pool.unpublish(block)
        events: list[Event] = []
        for row, request_id in enumerate(plan.seq_ids):
            sequence = self.sequences.get(request_id)
            if sequence is None:
                continue
            if row in errors:
                events.append(self._finish(sequence, FinishReason.ERROR, now, errors[row]))
            else:
                events.extend(self._apply_row(sequence, plan, result, row, now))
        num_decodes = draft.num_decodes
        num_prefill = sum(draft.lengths) - num_decodes
        self._rows.pace.observe(num_prefill, num_decodes, result.device_seconds)
        stats = replace(
            self.stats(),
            step=plan.step,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decodes,
            device_seconds=result.device_seconds,
            prompt_rows=prompt_rows(plan, num_decodes),
        )
        return [*events, stats]

    def _apply_row(
        self, sequence: Sequence, plan: StepPlan, result: StepResult, row: int, now: float
    ) -> list[Event]:
        request = sequence.request
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if result.prompt_logprobs is not None:
            prompt_logprobs = sequence.report(result.prompt_logprobs[row], plan.starts[row])
        if not plan.samples[row]:
            if not prompt_logprobs:
                return []
            return [Tokens(request.id, (), prompt_logprobs=prompt_logprobs)]
        first = None
        if not sequence.has_sampled:
            sequence.has_sampled = True
            assert sequence.scheduled_at is not None
            prefilled_at = now - result.sample_seconds
            first = FirstToken(sequence.scheduled_at, prefilled_at, now, sequence.num_cached)
        sequence.num_pending -= 1
        sequence.lane.charge(GENERATED_COST)
        pooled = result.pooled[row] if result.pooled is not None else b""
        if request.max_tokens == 0:  # the token is nobody's
            done = Tokens(request.id, (), (), prompt_logprobs, first, pooled)
            return [done, self._finish(sequence, FinishReason.LENGTH, now)]
        token_ids = result.token_ids[row]
        logprobs = result.logprobs[row] if result.logprobs is not None else ()
        tokens = Tokens(request.id, token_ids, logprobs, prompt_logprobs, first, pooled)
        (token,) = token_ids
        sequence.token_ids.append(token)
        if sequence.is_running:
            self.batch.publish(sequence, plan.starts[row] + plan.lengths[row])
        if token in request.stop_token_ids and sequence.num_generated > request.sampling.min_tokens:
            finished = self._finish(sequence, FinishReason.STOP, now, stop_token_id=token)
            return [tokens, finished]
        if row in result.ended_rows:
            return [tokens, self._finish(sequence, FinishReason.STOP, now)]
        if sequence.num_generated == request.max_tokens:
            return [tokens, self._finish(sequence, FinishReason.LENGTH, now)]
        return [tokens]

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        message: str = "",
        *,
        stop_token_id: int | None = None,
    ) -> Finished:
        """Ends a sequence wherever it is; rows of it that are in flight will find it gone."""
        request = sequence.request
        self.line.leave(sequence)
        self.places.give_back(request.tenant)
        if sequence.is_running:
            self.batch.leave(sequence)
        del self.sequences[request.id]
        return Finished(request.id, reason, message, stop_token_id, sequence.num_preemptions, now)

    def fail_all(self, message: str, now: float) -> list[Event]:
        """The engine is lost: ends every sequence and trusts nothing in its KV memory."""
        events: list[Event] = [
            self._finish(sequence, FinishReason.ERROR, now, message)
            for sequence in list(self.sequences.values())
        ]
        self._in_flight.clear()
        self.batch.pool.clear()
        return [*events, self.stats()]

    def stats(self) -> StepStats:
        """The gauges and what was counted since the last StepStats, outside of any step."""
        counts, self._rows.counts = self._rows.counts, Counts()
        return step_stats(counts, self.batch, self.line, step=self._step)
