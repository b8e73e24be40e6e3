"""The GPU check: steps, kernels, requests, determinism, a peer; one JSON file of what was seen.

python -m tests.gpu.check [--dry-run] [--seconds N] [--out FILE]. --dry-run runs all of it on the
CPU in Triton's interpreter at small sizes: its times mean nothing, only that it runs. Each part is
a process of its own (tests.gpu.parts): one that fails, hangs or breaks the device costs its own
results and no others. The file is whole after each result.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.parts import MODELS, NO_DEVICE, names

# When each part starts nothing more, as a share of the time; what is faster leaves its time.
SHARES = (0.36, 0.52, 0.72, 0.9, 1.0)
GRACE = 8.0  # seconds after which a part that has not ended is killed


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the CPU")
    parser.add_argument(
        "--seconds", type=float, default=340, help="the last part starts nothing after this"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    return parser.parse_args(arguments)


def start(part: str, *, dry_run: bool, seconds: float) -> tuple[subprocess.Popen[bytes], int]:
    """The part's process, and where its results come from, a line each."""
    ours, theirs = os.pipe()
    environment = dict(os.environ)
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"  # before triton is imported
    arguments = ["--part", part, "--results", str(theirs), "--seconds", f"{seconds:.1f}"]
    if dry_run:
        arguments.append("--dry-run")
    command = [sys.executable, "-m", "tests.gpu.parts", *arguments]
    process = subprocess.Popen(command, env=environment, pass_fds=(theirs,), stdout=sys.stderr)
    os.close(theirs)
    return process, ours


def lines(source: int, deadline: float) -> Iterator[bytes]:
    """Whole lines until the end of them or the deadline."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(source, 1 << 16)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            yield from whole


def results_of(part: str, *, dry_run: bool, deadline: float) -> Iterator[dict]:
    """What the part finds, and how it ended if that was not well."""
    left = deadline - time.monotonic()
    if left <= 0:
        yield {"name": part, "skipped": "out of time"}
        return
    process, source = start(part, dry_run=dry_run, seconds=left)
    try:
        for line in lines(source, deadline + GRACE):
            yield json.loads(line)
        try:
            code = process.wait(max(0.1, deadline + GRACE - time.monotonic()))
        except subprocess.TimeoutExpired:
            yield {"name": part, "error": "killed: it did not end in its time"}
        else:
            if code == NO_DEVICE:
                yield {"no_device": True}
            elif code:
                yield {"name": part, "error": f"its process ended with {code}"}
    finally:
        process.kill()
        process.wait()
        os.close(source)


class Report:
    """The file: replaced as a whole, so that whoever is killed leaves it as it was."""

    def __init__(self, path: Path, *, dry_run: bool) -> None:
        self._path = path
        self._begin = time.monotonic()
        self.failed = 0
        self.content: dict = {"dry_run": dry_run}

    def add(self, part: str, result: dict) -> None:
        if "environment" in result:
            self.content["environment"] = result["environment"]
        else:
            self.content.setdefault(part, []).append(result)
            self.failed += "error" in result
        print(json.dumps(result), flush=True)
        self.save()

    def save(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._begin, 1)
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        beside.replace(self._path)


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part is ended too
    begin = time.monotonic()
    report = Report(options.out, dry_run=options.dry_run)
    models = MODELS["dry" if options.dry_run else "full"]
    parts = names(models)
    shares = SHARES[-len(parts) :]
    for part, share in zip(parts, shares, strict=True):
        deadline = begin + options.seconds * share
        for result in results_of(part, dry_run=options.dry_run, deadline=deadline):
            if "no_device" in result:
                print(
                    "there is no CUDA device that torch can use; --dry-run needs none",
                    file=sys.stderr,
                )
                return 1
            report.add(part, result)
    report.save()
    seconds = report.content["seconds"]
    print(f"{options.out}: {seconds:.0f} s, {report.failed} errors", file=sys.stderr)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
