"""`paceline bench` and `python -m bench`: run the levels asked for, report them.

It owns the order of a measurement: connect, calibrate, warm up, run, report. Ctrl-C ends the run
and still reports what finished.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.http_stream import HttpClient, RequestFailed
from bench.load import Driver, Limits
from bench.options import Options, parse_options
from bench.prompts import Calibration, Prompts, TokenPrompts, WordPrompts, calibrate
from bench.records import RequestRecord
from bench.report import document, level_report, print_levels, write_json
from bench.statistics import summarise
from bench.target import Target, connect
from bench.workload import Level, make_jobs

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 no request succeeded or no server, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["long-prompt"]:
        from bench.long_prompt import main as long_prompt

        return long_prompt(argv[1:])
    if argv[:1] == ["peers"]:
        from bench.peers.__main__ import main as peers

        return peers(argv[1:])
    options = parse_options(argv)
    console = Console(quiet=options.quiet, width=None if sys.stdout.isatty() else 100)
    try:
        return asyncio.run(_measure(options, console))
    except RequestFailed as failed:
        print(f"{options.url}: {failed.kind}: {failed.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def client_for(url: str, api_key: str) -> HttpClient:
    return HttpClient(url, {"Authorization": f"Bearer {api_key}"} if api_key else {})


async def prepare(
    client: HttpClient, *, api: str, model: str, seed: int, token_ids: tuple[int, int] | None
) -> tuple[Target, Prompts]:
    """Find out what the server accepts and how it counts."""
    target = await connect(client, api=api, model=model)
    if token_ids:
        return target, TokenPrompts(seed, *token_ids)
    return target, WordPrompts(seed, await calibrate(target.count_prompt, seed))


async def _measure(options: Options, console: Console) -> int:
    client = client_for(options.url, options.api_key)
    try:
        target, prompts = await prepare(
            client,
            api=options.api,
            model=options.model,
            seed=options.seed,
            token_ids=options.token_ids,
        )
        if target.refused:
            console.print(f"The server refuses {', '.join(target.refused)}: left out.")
        reports, interrupted = await _run_levels(options, console, target, prompts)
    finally:
        client.close()
    _publish(options, console, target, prompts, reports)
    if interrupted:
        return INTERRUPTED
    return 0 if any(report["requests"]["ok"] for report in reports) else 1


async def _run_levels(
    options: Options, console: Console, target: Target, prompts: Prompts
) -> tuple[list[dict[str, Any]], bool]:
    reports: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        refresh_per_second=2,
        transient=True,
        disable=options.quiet,
    ) as progress:
        bar = progress.add_task("warm-up", total=options.warmup, note="")
        counts = {"failed": 0, "tokens": 0}

        def on_record(record: RequestRecord) -> None:
            counts["failed"] += record.error is not None
            counts["tokens"] += record.output_tokens
            failed = f", {counts['failed']} failed" if counts["failed"] else ""
            progress.update(bar, advance=1, note=f"{counts['tokens']} tokens{failed}")

        limits = Limits(options.timeout_seconds, options.level_seconds)
        driver = Driver(target.client, limits, on_record)
        with suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, driver.stop.set)
        if options.warmup:
            warm = Level(options.levels[0].shape, options.warmup, concurrency=1)
            jobs = make_jobs(warm, target, prompts, key="warm-up", seed=options.seed)
            await driver.closed(jobs, 1)
        for number, level in enumerate(options.levels):
            if driver.stop.is_set():
                break
            jobs = make_jobs(level, target, prompts, key=f"level {number}", seed=options.seed)
            counts.update(failed=0, tokens=0)
            name = f"{level.shape.label()}, {level.name}"
            progress.reset(bar, description=name, total=len(jobs), note="")
            run = await (
                driver.closed(jobs, level.concurrency) if level.concurrency else driver.open(jobs)
            )
            reports.append(
                level_report(
                    name=level.name,
                    load="trace" if level.trace else level.shape.label(),
                    settings=_level_settings(level),
                    figures=summarise(run, options.slo),
                )
            )
    return reports, driver.stop.is_set()


def _level_settings(level: Level) -> dict[str, Any]:
    shape = level.shape
    fixed = not (level.trace or shape.lengths)
    return {
        "requests": level.num_requests,
        "concurrency": level.concurrency or None,
        "rate": level.rate or None,
        "burstiness": level.burstiness if level.rate else None,
        "time_scale": level.time_scale if level.trace else None,
        "input": shape.input if fixed else None,
        "output": shape.output if fixed else None,
        "shared_prefix": shape.shared_prefix,
    }


def _publish(
    options: Options,
    console: Console,
    target: Target,
    prompts: Prompts,
    reports: Sequence[dict[str, Any]],
) -> None:
    print_levels(console, reports, options.slo_text)
    data = document(
        target={
            "url": options.url,
            "api": target.api,
            "model": target.model,
            "fields_refused": list(target.refused),
        },
        settings={
            "seed": options.seed,
            "slo": options.slo_text,
            "warmup": options.warmup,
            "timeout_seconds": options.timeout_seconds,
            "prompts": _prompt_settings(prompts),
        },
        levels=reports,
    )
    if options.out:
        write_json(options.out, data)
        console.print(f"Report: {options.out}")
    if options.plot and reports:
        from bench.plot import draw_levels

        draw_levels(options.plot, reports, f"{target.model} at {options.url}")
        console.print(f"Plot: {options.plot}")


def _prompt_settings(prompts: Prompts) -> dict[str, Any]:
    if isinstance(prompts, TokenPrompts):
        return {"kind": "token ids", "first": prompts.first_id, "last": prompts.last_id}
    line: Calibration = prompts.calibration
    return {
        "kind": "words",
        "overhead_tokens": line.overhead,
        "tokens_per_word": line.tokens_per_word,
        "source": line.source,
    }


if __name__ == "__main__":
    sys.exit(main())
