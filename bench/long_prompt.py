"""What a long prompt does to streams that are running: `paceline bench long-prompt`.

It owns the experiment: N streams decode, a long prompt arrives in their midst, and each stream's
largest gap before, while and after the prompt is prefilled is reported, with the server's own
histogram of step times where it has one. Run it once with a small --max-step-tokens on the server
and once with a budget above the prompt, to see what chunking gives.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import flags
from bench.http_stream import Exchange, HttpClient, RequestFailed
from bench.options import add_target_flags
from bench.prometheus import Histograms, difference, read_histograms
from bench.prompts import WordPrompts, calibrate
from bench.records import RequestRecord, output_times, read_exchange
from bench.report import write_json
from bench.statistics import spread_ms
from bench.target import Target, connect

SCHEMA = "paceline-bench-long-prompt/1"
DESCRIPTION = """\
N streams decode, a long prompt arrives in their midst, and each stream's largest gap before, while
and after it is prefilled is reported, with the server's own histogram of step times where it has
one. Run it once with a small --max-step-tokens on the server and once with a budget above the
prompt, to see what chunking gives.
"""
PHASES = ("before", "during", "after")
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """The experiment. lead_seconds: how long all streams run before the long prompt is sent."""

    streams: int
    stream_input: int
    stream_output: int
    long_input: int
    long_output: int
    lead_seconds: float
    limit_seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """When the long prompt was sent and answered first, and the times of all streams' chunks."""

    sent_at: float
    first_output_at: float
    long: RequestRecord
    chunk_times: tuple[tuple[float, ...], ...]
    errors: tuple[str, ...]


def largest_gaps(times: Sequence[float], sent_at: float, first_at: float) -> dict[str, float]:
    """The largest gap of each phase; a gap belongs to every phase that it overlaps.

    during: from the long prompt's sending to its first token. 0.0 where no gap lies in a phase.
    """
    bounds = {"before": (-1e18, sent_at), "during": (sent_at, first_at), "after": (first_at, 1e18)}
    gaps = list(pairwise(times))
    return {
        phase: max((end - start for start, end in gaps if start < high and end > low), default=0.0)
        for phase, (low, high) in bounds.items()
    }


async def observe(target: Target, prompts: WordPrompts, plan: Plan) -> Observed:
    """Run the experiment once. Raises RequestFailed if the long prompt itself fails."""
    started = time.perf_counter()
    exchanges: dict[int, Exchange] = {}

    async def stream(index: int) -> None:
        prompt = prompts.prompt(f"stream {index}", plan.stream_input)
        body = target.body(prompt, plan.stream_output)

        def remember(exchange: Exchange) -> None:
            exchanges[index] = exchange

        await target.client.request(
            "POST", target.path, body, plan.limit_seconds, on_start=remember
        )

    tasks = [asyncio.create_task(stream(index)) for index in range(plan.streams)]
    try:
        await _all_running(exchanges, tasks, plan)
        await asyncio.sleep(plan.lead_seconds)
        prompt = prompts.prompt("long", plan.long_input)
        exchange = await target.send(prompt, plan.long_output, plan.limit_seconds)
        long = read_exchange(exchange, started=started, due=exchange.sent_at)
        if long.error is not None or long.ttft_seconds is None:
            raise RequestFailed(long.error or "empty", f"the long prompt: {long.message}")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Observed(
        sent_at=exchange.sent_at,
        first_output_at=exchange.sent_at + long.ttft_seconds,
        long=long,
        chunk_times=tuple(tuple(output_times(exchange)) for exchange in exchanges.values()),
        errors=tuple(str(outcome) for outcome in outcomes if isinstance(outcome, Exception)),
    )


async def _all_running(
    exchanges: Mapping[int, Exchange], tasks: Sequence[asyncio.Task[None]], plan: Plan
) -> None:
    """Wait until every stream has shown output; raises RequestFailed if one ends before."""
    deadline = time.perf_counter() + plan.limit_seconds
    while time.perf_counter() < deadline:
        ended = [task for task in tasks if task.done()]
        if ended:
            failure = ended[0].exception()
            raise failure or RequestFailed(
                "too_short", "a stream ended before all ran: raise --stream-output"
            )
        if len(exchanges) == plan.streams and all(map(output_times, exchanges.values())):
            return
        await asyncio.sleep(POLL_SECONDS)
    raise RequestFailed("timeout", "not all streams began")


def describe(observed: Observed, plan: Plan, steps: Histograms) -> dict[str, Any]:
    """The report as plain JSON data, times in ms."""
    rows = [
        {
            phase: gap * 1e3
            for phase, gap in largest_gaps(
                times, observed.sent_at, observed.first_output_at
            ).items()
        }
        for times in observed.chunk_times
    ]
    unfinished = [
        times for times in observed.chunk_times if not times or times[-1] < observed.first_output_at
    ]
    return {
        "schema": SCHEMA,
        "streams": plan.streams,
        "stream_input": plan.stream_input,
        "stream_output": plan.stream_output,
        "long_input": observed.long.input_tokens or plan.long_input,
        "long_ttft_ms": (observed.long.ttft_seconds or 0.0) * 1e3,
        "largest_gap_ms": {phase: spread_ms(row[phase] / 1e3 for row in rows) for phase in PHASES},
        "gaps_by_stream_ms": rows,
        "streams_ended_too_soon": len(unfinished),
        "stream_errors": list(observed.errors),
        "server_step_histograms": steps,
    }


def print_report(console: Console, report: dict[str, Any]) -> None:
    title = (
        f"{report['streams']} streams, a prompt of {report['long_input']} tokens "
        f"(its TTFT {report['long_ttft_ms']:.0f} ms)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("largest gap of a stream, ms")
    for column in ("median stream", "worst stream"):
        table.add_column(column, justify="right")
    for phase in PHASES:
        spread = report["largest_gap_ms"][phase]
        table.add_row(f"{phase} the prefill", f"{spread['p50']:.1f}", f"{spread['max']:.1f}")
    console.print(table)
    if report["streams_ended_too_soon"]:
        console.print("  Some streams ended before the prefill did: raise --stream-output.")
    for name, buckets in report["server_step_histograms"].items():
        console.print(f"  {name}: " + _buckets(buckets), markup=False)


def _buckets(cumulative: dict[str, float]) -> str:
    parts, below = [], 0.0
    for bound, count in cumulative.items():
        if count > below:
            parts.append(f"<= {bound} s: {count - below:.0f}")
        below = count
    return ", ".join(parts)


def build_parser() -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="paceline bench long-prompt",
        usage="paceline bench long-prompt [FLAGS]",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_target_flags(parser)
    for name, default, words in (
        ("--streams", 16, "streams that run when the long prompt comes"),
        ("--stream-input", 32, "tokens of each of their prompts"),
        ("--stream-output", 512, "tokens of each answer, enough to outlast the long prompt"),
        ("--long-input", 6000, "tokens of the long prompt"),
        ("--long-output", 16, "tokens of its answer"),
    ):
        parser.add_argument(name, type=flags.whole(1), default=default, metavar="N", help=words)
    for name, parse, seconds, words in (
        ("--lead", flags.number(0), 2.0, "seconds that all streams run before it"),
        ("--timeout", flags.positive, 600.0, "seconds for one answer"),
    ):
        parser.add_argument(name, type=parse, default=seconds, metavar="S", help=words)
    parser.add_argument(
        "--seed",
        type=flags.whole(0, 2**63 - 1),
        metavar="N",
        help="repeats the same prompts; without it they are new",
    )
    parser.add_argument(
        "--out", type=flags.result_file, metavar="FILE", help="write the JSON report here"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 not, 130 interrupted."""
    args = build_parser().parse_args(argv)
    plan = Plan(
        streams=args.streams,
        stream_input=args.stream_input,
        stream_output=args.stream_output,
        long_input=args.long_input,
        long_output=args.long_output,
        lead_seconds=args.lead,
        limit_seconds=args.timeout,
    )
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    seed = int(time.time()) if args.seed is None else args.seed
    try:
        client = HttpClient(args.url, headers)
        report = asyncio.run(_measure(client, args.api, args.model, seed, plan))
    except RequestFailed as failed:
        print(f"{args.url}: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_report(Console(), report)
    if args.out:
        write_json(args.out, report)
    return 0


async def _measure(
    client: HttpClient, api: str, model: str, seed: int, plan: Plan
) -> dict[str, Any]:
    try:
        target = await connect(client, api=api, model=model)
        prompts = WordPrompts(seed, await calibrate(target.count_prompt, seed))
        steps = await read_histograms(client, containing="step")
        observed = await observe(target, prompts, plan)
        after = await read_histograms(client, containing="step")
        return describe(observed, plan, difference(steps, after))
    finally:
        client.close()


if __name__ == "__main__":
    sys.exit(main())
