"""Loads in virtual time: clients that ask, wait, hang up and ask again, and a machine.

Owns who sends what when, and what a machine's steps take. It must not know what is right: it tells
what happened, step by step.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.simulated import VirtualClock
from planner.replay import CostEngine
from scheduler.limits import SchedulerLimits
from scheduler.loop import ServingLoop
from scheduler.policy import Fair, FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Abort,
    Command,
    Drain,
    Event,
    Finished,
    KVCapacity,
    Request,
    StepPlan,
    StepStats,
    Submit,
)

BLOCK = 16
PROMPTS = ((1, 30), (20, 300), (20, 1500))
ANSWERS = ((1, 4), (1, 100), (60, 120))


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a step. Between `begin` and `end` all of it takes `factor` times as long."""

    fixed: float
    of_token: float
    of_decode: float
    factor: float
    begin: float
    end: float

    def phase(self, now: float) -> int:
        return (now > self.begin) + (now >= self.end)

    def seconds(self, num_prefill: int, num_decodes: int, now: float) -> float:
        seconds = self.fixed + self.of_token * num_prefill + self.of_decode * num_decodes
        return seconds * (self.factor if self.phase(now) == 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Step:
    """It ended in `phase` of the machine.

    `wants`: a prompt would have taken more. `fits`: somebody who waits could have begun."""

    stats: StepStats
    at: float
    phase: int
    wants: bool
    fits: bool


class Load:
    """One load, all of it from `seed`."""

    def __init__(self, seed: int) -> None:
        numbers = self._numbers = random.Random(seed)
        self.depth = numbers.randrange(2)
        self.clock = VirtualClock()
        self.seconds = 20.0
        self.machine = _machine(numbers, self.seconds)
        self.num_tenants = numbers.choice((1, 1, 3))
        max_running = numbers.choice((1, 2, 8, 32, 32))
        num_blocks = numbers.choice((110, 110 + 20 * max_running, 120 * max_running))
        self.limits = SchedulerLimits(
            max_step_tokens=512,
            max_waiting=1000,
            max_running=max_running,
            watermark_blocks=num_blocks // 100,
            max_step_seconds=0.1,
            num_tenants=self.num_tenants,
        )
        self.scheduler = Scheduler(
            KVCapacity(num_blocks, BLOCK, max_running, 2000),
            self.limits,
            Fair() if self.num_tenants > 1 else FirstComeFirstServed(),
        )
        self.steps: list[Step] = []
        self.unfinished: dict[str, Callable[[], None] | None] = {}
        self.num_finished = 0
        self._prompts, self._answers = numbers.choice(PROMPTS), numbers.choice(ANSWERS)
        self._shares_prefixes = numbers.random() < 0.3
        self._hangs_up = numbers.choice((0.0, 0.0, 0.2))
        self._commands: list[Command] = []
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._num_made = 0
        self._plan_arrivals(numbers.choice(("closed", "closed", "open", "bursts")))

    def run(self) -> None:
        engine = CostEngine(self.scheduler.capacity, self._cost, self.clock)
        ServingLoop(self.scheduler, engine, self, self._emit, self.clock, self.depth).run()

    # --- the clients ------------------------------------------------------------------------------

    def _plan_arrivals(self, kind: str) -> None:
        numbers = self._numbers
        clients = numbers.choice((1, 8, 40))
        if kind == "closed":
            begin = numbers.choice((0.3, 2.0))  # at once, or after one that is alone
            for number in range(clients):
                self._at(begin + 0.1 * number / clients, lambda: self._ask(again=True))
            self._at(0.0, lambda: self._ask(again=True))
            return
        now, gap = 0.0, numbers.choice((0.1, 1.0)) if kind == "open" else 5.0
        while now < self.seconds:
            for _ in range(1 if kind == "open" else clients):
                self._at(now, lambda: self._ask(again=False))
            now += numbers.expovariate(1 / gap)

    def _at(self, instant: float, act: Callable[[], None]) -> None:
        self._num_made += 1
        heapq.heappush(self._acts, (instant, self._num_made, act))

    def _ask(self, *, again: bool) -> None:
        if self.clock() >= self.seconds:
            return
        numbers = self._numbers
        self._num_made += 1
        request_id = str(self._num_made)
        own = [self._num_made] * numbers.randint(*self._prompts)
        shared = list(range(-160, 0)) if self._shares_prefixes else []
        self._commands.append(
            Submit(
                (
                    Request(
                        request_id,
                        (*shared, *own),
                        numbers.randint(*self._answers),
                        tenant=str(numbers.randrange(self.num_tenants)),
                        arrival=self.clock(),
                    ),
                )
            )
        )
        self.unfinished[request_id] = (lambda: self._ask(again=True)) if again else None
        if numbers.random() < self._hangs_up:
            abort = Abort((request_id,))
            later = self.clock() + 10 ** numbers.uniform(-3, 1)
            self._at(later, lambda: self._commands.append(abort))

    def take(self, *, block: bool) -> list[Command]:
        """The inbox of the loop."""
        while block and not self._commands:
            if not self._acts:
                return [Drain()]
            self.clock.advance_to(self._acts[0][0])
            self._act()
        self._act()
        commands, self._commands = self._commands, []
        return commands

    def _act(self) -> None:
        while self._acts and self._acts[0][0] <= self.clock():
            heapq.heappop(self._acts)[2]()

    # --- the machine, and what it did -------------------------------------------------------------

    def _cost(self, plan: StepPlan) -> float:
        num_decodes = sum(1 for length in plan.lengths if length == 1)
        num_prefill = sum(plan.lengths) - num_decodes
        return self.machine.seconds(num_prefill, num_decodes, self.clock())

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.num_finished += 1
                again = self.unfinished.pop(event.request_id)
                if again is not None:
                    self._at(self.clock(), again)
            elif isinstance(event, StepStats) and event.device_seconds:
                batch = self.scheduler.batch
                wants = any(sequence.is_prefilling for sequence in batch.running)
                now = self.clock()
                self.steps.append(Step(event, now, self.machine.phase(now), wants, self._fits()))

    def _fits(self) -> bool:
        first = self.scheduler.line.first()
        if first is None or first.num_pending or not self.scheduler.batch.has_free_slot:
            return False
        entry = self.scheduler.batch.find_entry(first, 1 << 30)
        return entry is not None and self.scheduler.batch.fits(first, entry)


def _machine(numbers: random.Random, seconds: float) -> Machine:
    """A CPU with a small model, a GPU with a large one, or anything."""
    fixed, of_token, of_decode = numbers.choice(
        (
            (0.004, 0.0004, 0.0006),
            (0.020, 0.00003, 0.00005),
            tuple(10 ** numbers.uniform(*powers) for powers in ((-4, -1.6), (-5, -3), (-5, -2.5))),
        )
    )
    begin = seconds * numbers.uniform(0.2, 0.5)
    return Machine(
        fixed, of_token, of_decode, numbers.choice((1.0, 3.0, 0.3)), begin, begin + seconds / 5
    )
