"""What is asked: a list of jobs for each level of load, made before the clock starts.

It owns the choice of lengths and prompts for closed loops, rates and traces. It must not know how
jobs are sent, nor how results are shown.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load import Job, gamma_arrivals
from bench.prompts import Prompts
from bench.target import Prompt, Target
from bench.traces import TraceRow, block_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Token counts of the requests. `shared_prefix` > 0: that long a prefix, then `input` more.

    `lengths`, where given, are sampled instead of the fixed counts. Clips: 0 is none.
    """

    input: int
    output: int
    shared_prefix: int = 0
    lengths: tuple[TraceRow, ...] = ()
    max_input: int = 0
    max_output: int = 0

    def label(self) -> str:
        if self.lengths:
            return "lengths/file"
        if self.shared_prefix:
            return f"{self.shared_prefix}+{self.input}/{self.output}"
        return f"{self.input}/{self.output}"

    def clipped(self, row: TraceRow) -> tuple[int, int]:
        num_input = min(row.input_tokens, self.max_input or row.input_tokens)
        num_output = min(row.output_tokens, self.max_output or row.output_tokens)
        return max(1, num_input), max(1, num_output)


@dataclass(frozen=True, slots=True)
class Level:
    """One run: closed loop if `concurrency` is set, else open; `rate` is for the report."""

    shape: Shape
    num_requests: int
    concurrency: int = 0
    rate: float = 0.0
    burstiness: float = 1.0
    trace: tuple[TraceRow, ...] = ()
    time_scale: float = 1.0

    @property
    def name(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} client{'s' if self.concurrency > 1 else ''}"
        return f"{self.rate:g} req/s" if self.rate else "trace"


def make_jobs(level: Level, target: Target, prompts: Prompts, *, key: str, seed: int) -> list[Job]:
    """The jobs of a level. `key` makes its prompts differ from those of every other run."""
    if level.trace:
        return _trace_jobs(level, target, prompts, key)
    due = [0.0] * level.num_requests
    if level.rate:
        due = gamma_arrivals(level.rate, level.num_requests, burstiness=level.burstiness, seed=seed)
    rng = random.Random(f"{seed}:{key}:lengths")
    jobs = []
    for index, seconds in enumerate(due):
        prompt, output = _request(level.shape, prompts, f"{key}:{index}", rng)
        jobs.append(Job(target.path, target.body(prompt, output), seconds))
    return jobs


def _request(shape: Shape, prompts: Prompts, key: str, rng: random.Random) -> tuple[Prompt, int]:
    if shape.lengths:
        num_input, num_output = shape.clipped(rng.choice(shape.lengths))
        return prompts.prompt(key, num_input), num_output
    if shape.shared_prefix:
        prompt = prompts.prompt_with_prefix(
            key, prefix_tokens=shape.shared_prefix, tail_tokens=shape.input
        )
        return prompt, shape.output
    return prompts.prompt(key, shape.input), shape.output


def _trace_jobs(level: Level, target: Target, prompts: Prompts, key: str) -> list[Job]:
    """Replay a trace; its first request is sent at once."""
    rows: Sequence[TraceRow] = level.trace
    size = block_tokens(rows)
    first = rows[0].arrival_seconds or 0.0
    jobs = []
    for index, row in enumerate(rows):
        num_input, num_output = level.shape.clipped(row)
        if row.block_runs:
            prompt = prompts.prompt_of_blocks(row.block_keys, block_tokens=size, tokens=num_input)
        else:
            prompt = prompts.prompt(f"{key}:{index}", num_input)
        seconds = ((row.arrival_seconds or 0.0) - first) * level.time_scale
        jobs.append(Job(target.path, target.body(prompt, num_output), seconds))
    return jobs
