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


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--seconds", type=float, default=340, help="start nothing after this")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    return parser.parse_args(arguments)


def until(deadline: float, name: str, results: Iterator[dict]) -> Iterator[dict]:
    """The results as they come, until the time is over."""
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
    deadline = begin + options.seconds
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from tests.gpu.absent import stand_in_for_unused_packages

    absent = stand_in_for_unused_packages()
    import torch

    from tests.gpu import kernels, peers, steps, timing

    if not options.dry_run and not torch.cuda.is_available():
        print("there is no CUDA device that torch can use; --dry-run needs none", file=sys.stderr)
        return 1
    device = torch.device("cpu" if options.dry_run else "cuda")
    of_kernels = kernels.DRY if options.dry_run else kernels.FULL
    of_steps = steps.DRY if options.dry_run else steps.FULL

    def peer() -> Iterator[dict]:
        yield peers.transformers_continuous_batching(of_steps, device)

    parts = {
        "steps": lambda: steps.measure(of_steps, device),
        "kernels": lambda: kernels.measure(of_kernels, device),
        "peers": peer,
    }
    report: dict = {"dry_run": options.dry_run, "environment": environment(absent)}
    with torch.inference_mode():
        for name, measure in parts.items():
            report[name] = []
            if time.monotonic() > deadline:
                continue
            for result in until(deadline, name, timing.guarded(name, measure())):
                report[name].append(result)
                print(json.dumps(result), flush=True)
                report["seconds"] = time.monotonic() - begin
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [r for name in parts for r in report[name] if isinstance(r.get("error"), str)]
    print(f"{options.out}: {report['seconds']:.0f} s, {len(failed)} parts failed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
