"""The command line of `paceline bench`, parsed once into frozen options.

It owns the flags, their checks and the levels they ask for. It must not know how runs are made.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import flags
from bench.statistics import Slo
from bench.traces import TraceRow, read_trace
from bench.workload import Level, Shape

DESCRIPTION = """\
Measure any OpenAI-compatible server: closed loop (--concurrency), open loop (--rate) or a trace.

  paceline bench --concurrency 1,4,16,32 --input 128,512 --output 64 --out report.json
  paceline bench --rate 2,4 --lengths sharegpt.csv.gz --slo ttft:2000,tpot:100
  paceline bench --trace azure.csv.gz --requests 200 --max-input 2000 --plot trace.png

Files are CSV or JSONL, plain or gzipped, with arrival_s, input_tokens and output_tokens; lengths
alone need no arrival_s.

`paceline bench long-prompt --help` measures the gap a long prompt leaves in running streams.
"""

# Flags that mean something only beside one of others.
_BESIDE = {
    "burstiness": ("rate",),
    "time_scale": ("trace",),
    "tail": ("shared_prefix",),
    "max_input": ("trace", "lengths"),
    "max_output": ("trace", "lengths"),
}
# And those of which one only can be.
_APART = (
    *(("trace", name) for name in ("lengths", "input", "output", "shared_prefix")),
    *(("lengths", name) for name in ("input", "output", "shared_prefix")),
    ("shared_prefix", "input"),
)


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
    group.add_argument(
        "--url", type=flags.server_url, default="http://127.0.0.1:8000", help="with or without /v1"
    )
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--api-key",
        type=flags.key,
        metavar="KEY",
        default=os.environ.get("OPENAI_API_KEY", ""),
        help="or $OPENAI_API_KEY",
    )
    group.add_argument("--model", default="auto", help="auto: the first of /v1/models")


def build_parser() -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="paceline bench",
        usage="paceline bench [FLAGS]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target_flags(parser)
    load = parser.add_argument_group("load (one of these)").add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=flags.list_of(flags.whole(1)),
        metavar="N[,N...]",
        help="closed loop: so many clients, each with one request in flight (default 1,4,16,32)",
    )
    load.add_argument(
        "--rate",
        type=flags.list_of(flags.positive),
        metavar="R[,R...]",
        help="open loop, requests a second",
    )
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay the arrivals and lengths of a file"
    )
    more = parser.add_argument_group("how much")
    more.add_argument(
        "--requests",
        type=flags.whole(1),
        metavar="N",
        help="per level (default: max(12, 3 x clients); 60 x rate; the whole trace)",
    )
    more.add_argument(
        "--burstiness",
        type=flags.positive,
        metavar="SHAPE",
        help="gamma shape of the gaps of --rate: 1 (default) Poisson, below 1 bursts",
    )
    more.add_argument(
        "--time-scale",
        type=flags.positive,
        metavar="FACTOR",
        help="stretch the gaps of --trace by this factor",
    )
    more.add_argument(
        "--warmup",
        type=flags.whole(0),
        default=2,
        metavar="N",
        help="requests before the first level",
    )
    more.add_argument(
        "--timeout", type=flags.positive, default=600.0, metavar="S", help="seconds for one answer"
    )
    more.add_argument(
        "--max-seconds", type=flags.positive, default=1800.0, metavar="S", help="for one level"
    )
    prompts = parser.add_argument_group("prompts and answers, in tokens")
    prompts.add_argument(
        "--input", type=flags.list_of(flags.whole(1)), metavar="N[,N...]", help="default 128"
    )
    prompts.add_argument("--output", type=flags.whole(1), metavar="N", help="default 64")
    prompts.add_argument(
        "--shared-prefix",
        type=flags.whole(1),
        metavar="N",
        help="begin every prompt with the same so many tokens, then --tail",
    )
    prompts.add_argument(
        "--tail", type=flags.whole(1), metavar="N", help="with --shared-prefix (default 32)"
    )
    prompts.add_argument(
        "--lengths", type=Path, metavar="FILE", help="sample lengths from a file in trace format"
    )
    prompts.add_argument(
        "--max-input", type=flags.whole(1), metavar="N", help="clip lengths of a file"
    )
    prompts.add_argument(
        "--max-output", type=flags.whole(1), metavar="N", help="clip lengths of a file"
    )
    prompts.add_argument(
        "--token-ids",
        type=flags.id_range,
        metavar="FIRST-LAST",
        help="send exact random token ids of this range instead of words (completions only)",
    )
    prompts.add_argument(
        "--seed",
        type=flags.whole(0, 2**63 - 1),
        metavar="N",
        help="repeats the same prompts, which a prefix cache may remember "
        "(default: new ones, the seed is in the report)",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--slo", help="ttft:MS,tpot:MS,e2e:MS for goodput, any of them")
    results.add_argument(
        "--out", type=flags.result_file, metavar="FILE", help="write the JSON report here"
    )
    results.add_argument(
        "--plot",
        type=flags.picture_file,
        metavar="FILE",
        help="draw a .png, .svg or .pdf here (needs matplotlib)",
    )
    results.add_argument("--quiet", action="store_true", help="no progress bar, no table")
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """Raises SystemExit with a usage message for what cannot be run."""
    parser = build_parser()
    args = parser.parse_args(argv)
    _check_together(parser, args)
    try:
        slo = Slo.parse(args.slo) if args.slo else None
        trace = tuple(read_trace(args.trace)) if args.trace else ()
        lengths = tuple(read_trace(args.lengths)) if args.lengths else ()
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    if args.token_ids and args.api == "chat":
        parser.error("--token-ids needs --api completions")
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


def _check_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Nothing that was asked for is passed over in silence."""

    def flag(name: str) -> str:
        return "--" + name.replace("_", "-")

    given = {name for name, value in vars(args).items() if value is not None}
    for name, others in _BESIDE.items():
        if name in given and not given & set(others):
            parser.error(f"{flag(name)} goes with {' or '.join(map(flag, others))} only")
    for one, other in _APART:
        if {one, other} <= given:
            parser.error(f"{flag(one)} and {flag(other)} do not go together")


def _levels(
    args: argparse.Namespace, trace: tuple[TraceRow, ...], lengths: tuple[TraceRow, ...]
) -> tuple[Level, ...]:
    inputs = (args.tail or 32,) if args.shared_prefix else args.input or (128,)
    output, clips = args.output or 64, (args.max_input or 0, args.max_output or 0)
    shapes = [
        Shape(num, output, args.shared_prefix or 0, lengths, *clips)
        for num in (inputs[:1] if trace or lengths else inputs)
    ]
    if trace:
        rows = trace[: args.requests or len(trace)]
        return (Level(shapes[0], len(rows), trace=rows, time_scale=args.time_scale or 1.0),)
    if args.rate:
        return tuple(
            Level(
                shape,
                args.requests or max(12, round(60 * rate)),
                rate=rate,
                burstiness=args.burstiness or 1.0,
            )
            for shape in shapes
            for rate in args.rate
        )
    return tuple(
        Level(shape, args.requests or max(12, 3 * clients), concurrency=clients)
        for shape in shapes
        for clients in args.concurrency or (1, 4, 16, 32)
    )
