"""The GPU check: kernels, steps, requests, determinism, a peer; one JSON file of what was seen.

python -m tests.gpu.check [--dry-run] [--seconds N] [--out FILE]. --dry-run runs all of it on the
CPU in Triton's interpreter at small sizes: its times mean nothing, only that it runs. A part that
fails is noted with its error and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.guard import guarded

if TYPE_CHECKING:
    import torch


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the CPU")
    parser.add_argument(
        "--seconds", type=float, default=340, help="the last part starts nothing after this"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    return parser.parse_args(arguments)


def steps_part(device: torch.device, dry_run: bool) -> Iterator[dict]:
    from tests.gpu import steps

    yield from steps.measure(steps.DRY if dry_run else steps.FULL, device)


def kernels_part(device: torch.device, dry_run: bool) -> Iterator[dict]:
    from tests.gpu import kernels

    yield from kernels.measure(kernels.DRY if dry_run else kernels.FULL, device)


def peers_part(device: torch.device, dry_run: bool) -> Iterator[dict]:
    from tests.gpu import peers, steps

    yield peers.transformers_continuous_batching(steps.DRY if dry_run else steps.FULL, device)


# Each part ends when so much of the time has passed; a part that is faster leaves its time.
PARTS = {"steps": (0.65, steps_part), "kernels": (0.85, kernels_part), "peers": (1.0, peers_part)}


def until(deadline: float, name: str, results: Iterator[dict]) -> Iterator[dict]:
    """The results as they come, until the time is over."""
    if time.monotonic() > deadline:
        yield {"name": name, "skipped": "out of time"}
        return
    for result in results:
        yield result
        if time.monotonic() > deadline:
            yield {"name": name, "skipped": "out of time"}
            return


def environment(absent: list[str]) -> dict:
    import torch
    import triton

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "stand_ins": absent,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gigabytes": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
        }
    return found


def main() -> int:
    options = parse(sys.argv[1:])
    begin = time.monotonic()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from tests.gpu.absent import stand_in_for_unused_packages

    absent = stand_in_for_unused_packages()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("there is no CUDA device that torch can use; --dry-run needs none", file=sys.stderr)
        return 1
    device = torch.device("cpu" if options.dry_run else "cuda")
    report: dict = {"dry_run": options.dry_run, "environment": environment(absent)}
    failed = 0

    def save() -> None:
        report["seconds"] = time.monotonic() - begin
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    with torch.inference_mode():
        for name, (share, part) in PARTS.items():
            report[name] = []
            save()
            deadline = begin + options.seconds * share
            for result in until(deadline, name, guarded(name, part(device, options.dry_run))):
                report[name].append(result)
                failed += isinstance(result.get("error"), str)
                print(json.dumps(result), flush=True)
                save()
    print(f"{options.out}: {report['seconds']:.0f} s, {failed} parts failed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
