"""What the scheduler tells those who watch: rows of prompts, preemptions, the map of the pool."""

from __future__ import annotations

import random

from engine.simulated import SimulatedEngine
from scheduler.limits import SchedulerLimits
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Abort,
    Inspect,
    KVCapacity,
    KVMap,
    Request,
    StepPlan,
    StepStats,
    Submit,
)

CAPACITY = KVCapacity(num_blocks=24, block_size=4, num_slots=8, max_model_len=64)
LIMITS = SchedulerLimits(max_step_tokens=16, max_waiting=64, max_running=8, watermark_blocks=0)


def make() -> tuple[Scheduler, SimulatedEngine]:
    engine = SimulatedEngine(CAPACITY, lambda _plan: 1.0, lambda _id, tokens: len(tokens) % 50)
    return Scheduler(CAPACITY, LIMITS, FirstComeFirstServed()), engine


def step(scheduler: Scheduler, engine: SimulatedEngine, now: float) -> tuple[StepPlan, StepStats]:
    plan = scheduler.schedule(now)
    assert plan is not None
    *_, stats = scheduler.apply(plan, engine.submit(plan).result(), now + 0.5)
    assert isinstance(stats, StepStats)
    return plan, stats


def inspect(scheduler: Scheduler) -> tuple[list[int], tuple[str, ...]]:
    (found,) = scheduler.handle(Inspect(), 0.0)
    assert isinstance(found, KVMap)
    return list(memoryview(found.blocks).cast("H")), found.owners


def test_map_agrees_with_the_pool_under_random_load() -> None:
    scheduler, engine = make()
    rng = random.Random(3)
    states: set[int] = set()
    for turn in range(120):
        if rng.random() < 0.4:
            prompt = tuple(range(rng.choice((8, 12, 20))))
            name = f"r{turn}"
            twins = tuple(Request(f"{name}-{i}", prompt, 12) for i in range(rng.choice((1, 1, 2))))
            scheduler.handle(Submit(twins), turn)
        if scheduler.sequences and rng.random() < 0.1:
            scheduler.handle(Abort((rng.choice(list(scheduler.sequences)),)), turn)
        if not scheduler.idle:
            step(scheduler, engine, turn)
        cells, owners = inspect(scheduler)
        pool = scheduler.batch.pool
        assert cells.count(0) == len(pool.free_blocks())
        assert cells.count(1) == pool.num_cached
        assert owners == tuple(s.request.id for s in scheduler.batch.running)
        for sequence in scheduler.batch.running:
            for block in sequence.block_ids:
                alone = pool.refs[block] == 1
                assert cells[block] == (3 + owners.index(sequence.request.id) if alone else 2)
        states |= {min(cell, 3) for cell in cells}
    assert states == {0, 1, 2, 3}


def test_prompt_rows_and_decodes_are_all_rows_of_the_plan() -> None:
    scheduler, engine = make()
    for index in range(6):
        prompt = tuple(range(index, index + 14))
        scheduler.handle(Submit((Request(f"r{index}", prompt, 20),)), 0.0)
    entered: dict[str, int] = {}
    preempted: list[str] = []
    now = 0.0
    while not scheduler.idle:
        now += 1.0
        plan, stats = step(scheduler, engine, now)
        rows = {row.request_id: row for row in stats.prompt_rows}
        assert len(plan.seq_ids) == len(rows) + stats.num_decode_tokens
        assert sum(row.length for row in rows.values()) == stats.num_prefill_tokens
        for name, slot, start, length in zip(
            plan.seq_ids, plan.slots, plan.starts, plan.lengths, strict=True
        ):
            if name in rows:
                row = rows[name]
                assert (row.slot, row.start, row.length) == (slot, start, length)
                entered[name] = entered.get(name, 0) + row.entered
        assert all(event.at == now for event in stats.preempted)
        assert len(stats.preempted) == stats.num_preemptions
        preempted += [event.request_id for event in stats.preempted]
    assert preempted
    assert entered == {f"r{i}": 1 + preempted.count(f"r{i}") for i in range(6)}
