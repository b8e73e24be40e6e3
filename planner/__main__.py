"""`paceline simulate`: what would a trace see from this scheduler on that machine?

Owns the flags and the report. Nothing is served and no model is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.statistics import spread_ms
from bench.traces import TraceError, block_tokens, read_trace
from planner.cost import Cost, LinearCost, ProfiledCost, ProfileError
from planner.replay import Replay, replay
from scheduler.limits import SchedulerLimits
from scheduler.policy import POLICIES
from scheduler.types import KVCapacity


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 simulated, 2 a wrong flag or file."""
    options = _parser().parse_args(argv)
    try:
        rows = read_trace(options.trace)[: options.requests]
        outcome = replay(
            rows,
            block_tokens=block_tokens(rows),
            capacity=KVCapacity(
                num_blocks=options.kv_tokens // options.block_size,
                block_size=options.block_size,
                num_slots=options.max_running,
                max_model_len=options.max_model_len,
            ),
            limits=SchedulerLimits(
                max_step_tokens=options.max_step_tokens,
                max_waiting=options.max_waiting,
                max_running=options.max_running,
                watermark_blocks=options.kv_tokens // options.block_size // 100,
            ),
            policy=POLICIES[options.policy](),
            cost=_cost(options),
            depth=options.depth,
            max_queue_seconds=options.max_queue_seconds,
        )
    except (TraceError, ProfileError, OSError, ValueError) as error:
        print(f"paceline simulate: {error}", file=sys.stderr)
        return 2
    report(outcome, Console())
    if options.out:
        options.out.write_text(json.dumps([asdict(r) for r in outcome.requests], indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline simulate",
        description="Replay a trace through the scheduler that serves, on a cost model.",
    )
    parser.add_argument("trace", type=Path, help="csv or jsonl, plain or gzipped")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--kv-tokens", type=int, required=True, metavar="N", help="KV pool")
    parser.add_argument("--block-size", type=int, default=16, metavar="N")
    parser.add_argument("--max-model-len", type=int, default=131072, metavar="N")
    parser.add_argument("--max-running", type=int, default=256, metavar="N")
    parser.add_argument("--max-waiting", type=int, default=100_000, metavar="N")
    parser.add_argument("--max-step-tokens", type=int, default=2048, metavar="N")
    parser.add_argument(
        "--policy", choices=sorted(POLICIES), default="fcfs", help="fair: each session is a tenant"
    )
    parser.add_argument(
        "--max-queue-seconds", type=float, metavar="S", help="refuse what is not begun in time"
    )
    parser.add_argument("--depth", type=int, choices=(0, 1), default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each request as JSON")
    cost = parser.add_argument_group(
        "cost of a step", "a line through four numbers, or measured kernel tables"
    )
    cost.add_argument(
        "--linear",
        metavar="STEP,PREFILL,DECODE,CONTEXT",
        help="milliseconds a step, a prompt token, a decode row, 1000 KV positions",
    )
    cost.add_argument(
        "--profile", type=Path, metavar="PREFIX", help="kernel tables PREFIX_*.csv.gz"
    )
    cost.add_argument("--layers", type=int, default=32, metavar="N", help="layers (with --profile)")
    cost.add_argument("--host-ms", type=float, default=0.0, metavar="MS", help="host time a step")
    return parser


def _cost(options: argparse.Namespace) -> Cost:
    if (options.linear is None) == (options.profile is None):
        raise ValueError("give either --linear or --profile")
    if options.profile is not None:
        return ProfiledCost(
            options.profile, num_layers=options.layers, host_seconds=options.host_ms / 1e3
        )
    numbers = [float(part) for part in options.linear.split(",")]
    if len(numbers) != 4 or min(numbers) < 0:
        raise ValueError("--linear takes four numbers of milliseconds, none negative")
    step, prefill, decode, context = (number / 1e3 for number in numbers)
    return LinearCost(step, prefill, decode, context / 1e3)


def report(outcome: Replay, console: Console) -> None:
    """Prints what clients would have seen and how busy the engine was."""
    served = [r for r in outcome.requests if not r.refusal]
    table = Table("", "mean", "p50", "p90", "p99", box=None)
    spreads = {
        "TTFT ms": spread_ms(r.ttft for r in served),
        "TPOT ms": spread_ms(r.tpot for r in served),
    }
    for name, spread in spreads.items():
        if spread is not None:
            table.add_row(name, *(f"{spread[k]:.1f}" for k in ("mean", "p50", "p90", "p99")))
    console.print(table)
    output = sum(r.output_tokens for r in served)
    prompt = sum(r.input_tokens for r in served)
    span = outcome.makespan or 1.0
    console.print(
        f"{len(served)} served, {len(outcome.requests) - len(served)} refused; "
        f"{output / span:.0f} output tok/s over {outcome.makespan:.1f} s; "
        f"{outcome.num_steps} steps, engine busy {outcome.busy_seconds / span:.0%}; "
        f"prefix hits {sum(r.cached_tokens for r in served) / max(1, prompt):.1%}; "
        f"{outcome.num_preemptions} preemptions; "
        f"KV peak {outcome.max_blocks_used / outcome.num_blocks:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
