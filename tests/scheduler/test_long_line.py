"""A long line of new prompts: what one step spends on them is bounded, and nobody is left out."""

from __future__ import annotations

from scheduler.limits import SchedulerLimits
from scheduler.policy import Fair, FirstComeFirstServed, Policy
from scheduler.prefix import sha256
from scheduler.rows import MAX_NEW_TOKENS, MAX_PASSED
from scheduler.scheduler import Scheduler
from scheduler.types import Finished, KVCapacity, Request, StepResult, Submit

BLOCK = 16


class Served:
    """A scheduler alone; it counts the blocks that each of its steps hashes."""

    def __init__(self, max_step_tokens: int, policy: Policy | None = None) -> None:
        self.num_hashed = 0
        self.hashed: list[int] = []  # by step
        self.finished: list[str] = []
        self.scheduler = Scheduler(
            KVCapacity(100_000, BLOCK, 512, 1 << 20),
            SchedulerLimits(max_step_tokens, 10_000, 512, 0),
            policy or FirstComeFirstServed(),
            digest=self._digest,
        )

    def _digest(self, data: bytes) -> bytes:
        self.num_hashed += 1
        return sha256(data)

    def add(self, name: str, prompt: tuple[int, ...], tenant: str = "") -> None:
        self.scheduler.handle(Submit((Request(name, prompt, 1, tenant=tenant),)), 0.0)

    def step(self) -> tuple[str, ...]:
        before = self.num_hashed
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        self.hashed.append(self.num_hashed - before)
        token_ids = tuple((7,) if samples else () for samples in plan.samples)
        events = self.scheduler.apply(plan, StepResult(plan.step, token_ids), 0.0)
        self.finished += [event.request_id for event in events if isinstance(event, Finished)]
        return plan.seq_ids

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()


def test_a_step_hashes_few_of_those_who_share_a_prefix() -> None:
    """600 at once, each of which used to be looked at in the first step of their leader."""
    served = Served(max_step_tokens=256)
    shared = tuple(range(2000))
    for number in range(600):
        served.add(str(number), (*shared, number))
    served.run()
    assert sorted(served.finished, key=int) == [str(number) for number in range(600)]
    assert max(served.hashed) <= (MAX_NEW_TOKENS + len(shared)) // BLOCK


def test_a_step_passes_over_few_of_those_who_wait_for_a_leader() -> None:
    served = Served(max_step_tokens=4 * BLOCK)
    shared = tuple(range(8 * BLOCK))
    for number in range(3 * MAX_PASSED):
        served.add(str(number), (*shared, number))
    served.step()
    sequences = served.scheduler.sequences.values()
    assert sum(sequence.leader is not None for sequence in sequences) == MAX_PASSED
    served.run()
    assert len(served.finished) == 3 * MAX_PASSED


def test_those_who_wait_for_a_leader_hold_up_no_other_tenant() -> None:
    served = Served(max_step_tokens=64, policy=Fair())
    shared = tuple(range(5000))
    for number in range(3 * MAX_PASSED):
        served.add(str(number), (*shared, number), tenant="many")
    served.step()
    served.add("other", tuple(range(20)), tenant="one")
    assert "other" in served.step()
    served.run()
    assert len(served.finished) == 3 * MAX_PASSED + 1


def test_a_prompt_above_the_bound_is_not_held_back() -> None:
    served = Served(max_step_tokens=1 << 20)
    for number in range(3):
        served.add(str(number), tuple(range(number, number + MAX_NEW_TOKENS + 1)))
    assert [served.step() for _ in range(3)] == [("0",), ("1",), ("2",)]
    served.run()
    assert served.finished == ["0", "1", "2"]


def test_full_hits_enter_over_several_steps() -> None:
    """Each takes one token of the budget, so the budget alone would let in all at once."""
    served = Served(max_step_tokens=4096)
    shared = tuple(range(4000))
    served.add("first", shared)
    served.run()
    for number in range(64):
        served.add(str(number), shared)
    entered = served.step()
    assert len(entered) == MAX_NEW_TOKENS // len(shared)
    served.run()
    assert len(served.finished) == 65
