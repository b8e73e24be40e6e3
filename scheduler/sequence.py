"""Sequence: the progress of one request, the only mutable per-request state.

It holds what is known and what is planned, and answers questions about them; who changes it, and
when, is the scheduler's business. It must not know the pool, the policy or the clock.

    0           num_computed       len(token_ids)    num_tokens          end
    |--- KV is written or planned ---|...known...|...pending...|.............|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler.prefix import BlockKey
from scheduler.types import Pooling, Request, TokenLogprobs

if TYPE_CHECKING:
    from scheduler.line import Lane

NO_SLOT = -1

Key = tuple[float, ...]  # the smaller, the earlier; unique, since a serial ends it


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    `num_computed` counts the positions whose KV a plan has written or will have written by the
    time anything later runs, `num_pending` the tokens that plans in flight will yield. `end` is
    the number of positions ever computed: the last token of an answer is never fed back. `turn` is
    the policy's order inside its lane; `key` is its place among all that have ever had a slot, ()
    before it has had one.
    """

    request: Request
    turn: Key
    lane: Lane
    token_ids: list[int]
    end: int
    # All sequences of the same Submit, this one among them; empty if it came alone.
    family: list[Sequence] = field(default_factory=list)

    key: Key = ()
    num_computed: int = 0
    num_pending: int = 0
    # Tokens to compute before this entry decodes: all that were known when it got its slot.
    num_prefill: int = 0
    # The step in which the row with the last of them was planned; 0 before that.
    prefilled_step: int = 0
    slot: int = NO_SLOT
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)
    # Leading blocks that need not be offered to the prefix cache (any more).
    num_published: int = 0

    # While waiting: wait on until `leader` has computed `leader_end` positions that we can share.
    leader: Sequence | None = None
    leader_end: int = 0

    scheduled_at: float | None = None
    num_cached: int = 0
    has_sampled: bool = False
    num_prompt_logprobs: int = 0
    num_preemptions: int = 0
    num_found: int = 0  # of the prompt, as it first entered
    gave_way: bool = False  # to another lane, which it need not do again
    # Times that there was no memory for a small row of it alone.
    num_refusals: int = 0
    # Positions computed before the last preemption; computing them again is waste worth counting.
    num_lost: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def is_running(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def has_begun(self) -> bool:
        """It or one of its Submit has had a slot."""
        return any(member.scheduled_at is not None for member in (self, *self.family))

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prefill

    @property
    def needs_every_position(self) -> bool:
        """Something of each of the prompt's positions is owed; only computing one yields it."""
        if self.request.sampling.pooling is Pooling.MEAN and not self.has_sampled:
            return True
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt - 1

    @property
    def waits_for_leader(self) -> bool:
        leader = self.leader
        return leader is not None and leader.is_running and leader.num_computed < self.leader_end

    def report(self, entries: tuple[TokenLogprobs, ...], start: int) -> tuple[TokenLogprobs, ...]:
        """Of a row's prompt logprobs those that are news: a preempted prompt is computed again."""
        news = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs += len(news)
        return news
