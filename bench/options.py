"""The command line of `paceline bench`, parsed once into frozen options.

It owns the flags, their checks and the levels they ask for. It must not know how runs are made.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.statistics import Slo
from bench.traces import TraceRow, read_trace
from bench.workload import Level, Shape

T = TypeVar("T")

DESCRIPTION = """\
Measure any OpenAI-compatible server: closed loop (--concurrency), open loop (--rate) or a trace.

  paceline bench --concurrency 1,4,16,32 --input 128,512 --output 64 --out report.json
  paceline bench --rate 2,4 --lengths sharegpt.csv.gz --slo ttft:2000,tpot:100
  paceline bench --trace azure.csv.gz --requests 200 --max-input 2000 --plot trace.png

`paceline bench long-prompt --help` measures the gap a long prompt leaves in running streams.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked and complete. `levels` in the order in which they run."""

    url: str
    api: str
    api_key: str
    model: str
    token_ids: tuple[int, int] | None
    levels: tuple[Level, ...]
    warmup: int
    slo: Slo | None
    slo_text: str | None
    seed: int
    timeout_seconds: float
    level_seconds: float
    out: Path | None
    plot: Path | None
    quiet: bool


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="with or without /v1")
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="or $OPENAI_API_KEY"
    )
    group.add_argument("--model", default="auto", help="auto: the first of /v1/models")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target_flags(parser)
    load = parser.add_argument_group("load (one of these)").add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_list_of(_positive_int),
        metavar="N[,N...]",
        help="closed loop: so many clients, each with one request in flight (default 1,4,16,32)",
    )
    load.add_argument(
        "--rate", type=_list_of(_positive), metavar="R[,R...]", help="open loop, requests a second"
    )
    load.add_argument("--trace", type=Path, help="replay the arrivals and lengths of a file")
    more = parser.add_argument_group("how much")
    more.add_argument(
        "--requests",
        type=_positive_int,
        help="per level (default: max(12, 3 x clients); 60 x rate; the whole trace)",
    )
    more.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="SHAPE",
        help="gamma shape of the gaps of --rate: 1 Poisson, below 1 bursts",
    )
    more.add_argument(
        "--time-scale",
        type=_positive,
        default=1.0,
        help="stretch the gaps of --trace by this factor",
    )
    more.add_argument("--warmup", type=_count, default=2, help="requests before the first level")
    more.add_argument("--timeout", type=_positive, default=600.0, help="seconds for one answer")
    more.add_argument("--max-seconds", type=_positive, default=1800.0, help="for one level")
    prompts = parser.add_argument_group("prompts and answers, in tokens")
    prompts.add_argument("--input", type=_list_of(_positive_int), default=(128,))
    prompts.add_argument("--output", type=_positive_int, default=64)
    prompts.add_argument(
        "--shared-prefix",
        type=_count,
        default=0,
        help="begin every prompt with the same so many tokens, then --tail",
    )
    prompts.add_argument("--tail", type=_positive_int, default=32, help="with --shared-prefix")
    prompts.add_argument("--lengths", type=Path, help="sample lengths from a file in trace format")
    prompts.add_argument("--max-input", type=_count, default=0, help="clip lengths of a file")
    prompts.add_argument("--max-output", type=_count, default=0, help="clip lengths of a file")
    prompts.add_argument(
        "--token-ids",
        type=_id_range,
        metavar="FIRST-LAST",
        help="send exact random token ids of this range instead of words (completions only)",
    )
    prompts.add_argument(
        "--seed",
        type=int,
        help="repeats the same prompts, which a prefix cache may remember "
        "(default: new ones, the seed is in the report)",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--slo", help="ttft:MS,tpot:MS,e2e:MS for goodput, any of them")
    results.add_argument("--out", type=Path, help="write the JSON report here")
    results.add_argument("--plot", type=Path, help="draw a PNG here (needs matplotlib)")
    results.add_argument("--quiet", action="store_true", help="no progress bar, no table")
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """Raises SystemExit with a usage message for what cannot be run."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        slo = Slo.parse(args.slo) if args.slo else None
        trace = tuple(read_trace(args.trace)) if args.trace else ()
        lengths = tuple(read_trace(args.lengths)) if args.lengths else ()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.token_ids and args.api == "chat":
        parser.error("--token-ids needs --api completions")
    if args.shared_prefix and (trace or lengths):
        parser.error("--shared-prefix goes with fixed lengths only")
    if trace and trace[0].arrival_seconds is None:
        parser.error(f"{args.trace} has lengths only, no arrivals: use it with --lengths")
    return Options(
        url=args.url,
        api=args.api,
        api_key=args.api_key,
        model=args.model,
        token_ids=args.token_ids,
        levels=_levels(args, trace, lengths),
        warmup=args.warmup,
        slo=slo,
        slo_text=args.slo,
        seed=int(time.time()) if args.seed is None else args.seed,
        timeout_seconds=args.timeout,
        level_seconds=args.max_seconds,
        out=args.out,
        plot=args.plot,
        quiet=args.quiet,
    )


def _levels(
    args: argparse.Namespace, trace: tuple[TraceRow, ...], lengths: tuple[TraceRow, ...]
) -> tuple[Level, ...]:
    inputs = (args.tail,) if args.shared_prefix else args.input
    shapes = [
        Shape(num, args.output, args.shared_prefix, lengths, args.max_input, args.max_output)
        for num in (inputs[:1] if trace or lengths else inputs)
    ]
    if trace:
        rows = trace[: args.requests or len(trace)]
        return (Level(shapes[0], len(rows), trace=rows, time_scale=args.time_scale),)
    if args.rate:
        return tuple(
            Level(
                shape,
                args.requests or max(12, round(60 * rate)),
                rate=rate,
                burstiness=args.burstiness,
            )
            for shape in shapes
            for rate in args.rate
        )
    return tuple(
        Level(shape, args.requests or max(12, 3 * clients), concurrency=clients)
        for shape in shapes
        for clients in args.concurrency or (1, 4, 16, 32)
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse_list(text: str) -> tuple[T, ...]:
        return tuple(parse(part) for part in text.split(","))

    return parse_list


def _id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    ids = int(first), int(last)
    if not 0 <= ids[0] < ids[1]:
        raise argparse.ArgumentTypeError(f"{text} is not FIRST-LAST with FIRST < LAST")
    return ids
