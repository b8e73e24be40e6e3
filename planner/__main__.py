"""`paceline simulate`: what would a trace see from this scheduler on that machine?

Owns the flags and the report. Nothing is served and no model is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from bench.statistics import spread_ms
from bench.traces import TraceError, block_tokens, read_trace
from planner.cost import Cost, LinearCost, ProfiledCost, ProfileError
from planner.replay import Replay, replay
from scheduler.limits import SchedulerLimits
from scheduler.policy import POLICIES
from scheduler.types import KVCapacity

DESCRIPTION = """\
Replay a trace through the scheduler that serves, on a cost model, in virtual time.

  paceline simulate trace.csv --kv-tokens 100000 --linear 5,0.02,0.1,0.01

TRACE has arrival_s, input_tokens, output_tokens and, where known, session in each row. JSONL may
have hash_ids too, the ids of a prompt's blocks, so that the prefix cache is simulated as well.
"""


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, not a list of all flags; no flag has a second, shorter name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 simulated, 2 a wrong flag or file."""
    options = _parser().parse_args(argv)
    try:
        outcome = _replay(options)
        report(outcome, Console())
        if options.out:
            options.out.write_text(json.dumps([asdict(r) for r in outcome.requests], indent=1))
    except OSError as error:
        where = error.filename or "the output"
        print(f"paceline simulate: {where}: {error.strerror}", file=sys.stderr)
        return 2
    except (TraceError, ProfileError, ValueError) as error:
        print(f"paceline simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _replay(options: argparse.Namespace) -> Replay:
    num_blocks = options.kv_tokens // options.block_size
    if num_blocks < 2:
        raise ValueError(
            f"--kv-tokens {options.kv_tokens}: that is less than two blocks of "
            f"{options.block_size} tokens, and one is kept spare"
        )
    cost = _cost(options)
    rows = read_trace(options.trace)[: options.requests]
    if options.out:
        options.out.open("a").close()  # before the work, so that none is lost
    return replay(
        rows,
        block_tokens=block_tokens(rows),
        capacity=KVCapacity(
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_slots=options.max_running,
            max_model_len=options.max_model_len,
        ),
        limits=SchedulerLimits(
            max_step_tokens=options.max_step_tokens,
            max_waiting=options.max_waiting,
            max_running=options.max_running,
            watermark_blocks=num_blocks // 100,
            prefix_caching=options.prefix_caching,
            max_chunk_tokens=options.max_chunk_tokens,
            max_step_seconds=options.tpot_limit_seconds,
        ),
        policy=POLICIES[options.policy](),
        cost=cost,
        depth=options.depth,
        max_queue_seconds=options.max_queue_seconds,
    )


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= 10**9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low}")
        return int(text)

    return parse


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def _above_0(text: str) -> float:
    if not (value := _number(text)):
        raise argparse.ArgumentTypeError("0 is not above 0")
    return value


def _four_numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(_number(part) for part in text.split(","))
    if len(numbers) != 4 or not any(numbers):
        raise argparse.ArgumentTypeError("it takes four numbers of milliseconds, not all 0")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="paceline simulate",
        usage="paceline simulate TRACE --kv-tokens N (--linear A,B,C,D | --profile PREFIX) [FLAGS]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="csv or jsonl, plain or gzipped")
    parser.add_argument("--requests", type=_whole(1), metavar="N", help="only the first N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each request as JSON")
    server = parser.add_argument_group(
        "server", "as `paceline serve` has them, with the same defaults where it has one"
    )
    server.add_argument(
        "--kv-tokens",
        type=_whole(1),
        required=True,
        metavar="N",
        help="tokens of the KV cache; the server shows its own at the start as KV budget",
    )
    server.add_argument(
        "--max-model-len",
        type=_whole(2),
        default=131072,
        metavar="N",
        help="the model's context (default: %(default)s)",
    )
    for flag, default, words in (
        ("--block-size", 16, "tokens of one KV block"),
        ("--max-running", 64, "requests in the running batch"),
        ("--max-waiting", 1024, "requests that may wait; more are refused"),
        ("--max-step-tokens", 512, "tokens of one step, prefill and decode"),
    ):
        server.add_argument(
            flag,
            type=_whole(0 if flag == "--max-waiting" else 1),
            default=default,
            metavar="N",
            help=f"{words} (default: %(default)s)",
        )
    server.add_argument(
        "--max-chunk-tokens", type=_whole(1), metavar="N", help="prefill of one request in one step"
    )
    server.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of equal prefixes (default: on)",
    )
    server.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        default="fcfs",
        help="order of the waiting; fair: each session is a tenant (default: %(default)s)",
    )
    server.add_argument(
        "--max-queue-seconds", type=_above_0, metavar="S", help="refuse what is not begun in time"
    )
    server.add_argument(
        "--tpot-limit-seconds",
        type=_above_0,
        default=0.1,
        metavar="S",
        help="target of TPOT, which steps keep to (default: %(default)s)",
    )
    server.add_argument(
        "--depth",
        type=int,
        choices=(0, 1),
        default=0,
        help="1 plans the next step while one runs (default: %(default)s)",
    )
    cost = parser.add_argument_group(
        "cost of a step", "a line through four numbers, or measured kernel tables"
    )
    cost.add_argument(
        "--linear",
        type=_four_numbers,
        metavar="STEP,PREFILL,DECODE,CONTEXT",
        help="milliseconds a step, a prompt token, a decode row, 1000 KV positions",
    )
    cost.add_argument(
        "--profile", type=Path, metavar="PREFIX", help="kernel tables PREFIX_*.csv.gz"
    )
    cost.add_argument(
        "--layers", type=_whole(1), metavar="N", help="layers, with --profile (default: 32)"
    )
    cost.add_argument(
        "--host-ms", type=_number, metavar="MS", help="host time a step, with --profile"
    )
    return parser


def _cost(options: argparse.Namespace) -> Cost:
    if (options.linear is None) == (options.profile is None):
        raise ValueError("give either --linear or --profile")
    if options.profile is not None:
        layers, host_ms = options.layers or 32, options.host_ms or 0.0
        return ProfiledCost(options.profile, num_layers=layers, host_seconds=host_ms / 1e3)
    for flag, value in (("--layers", options.layers), ("--host-ms", options.host_ms)):
        if value is not None:
            raise ValueError(f"{flag} goes with --profile only")
    step, prefill, decode, context = (number / 1e3 for number in options.linear)
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
        f"KV peak {outcome.max_blocks_used / outcome.num_blocks:.0%}",
        soft_wrap=True,
    )
    refusals = [r.refusal for r in outcome.requests if r.refusal]
    if refusals:
        console.print(f"The first refusal: {refusals[0]}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
