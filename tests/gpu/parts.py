"""One part of the GPU check, as the process that tests.gpu.check starts for it.

Writes its results to a pipe, a line of JSON each. torch is imported when it is needed, so that even
its lack is a result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.absent import stand_in_for_unused_packages
from tests.gpu.guard import Result, guarded

if TYPE_CHECKING:
    import torch

NO_DEVICE = 3  # exit status
# By size; the first is the one with requests end to end.
MODELS = {"full": ("Qwen3-8B", "Llama-3.1-8B"), "dry": ("tiny",)}
STEPS = "steps "  # and the name of a model


def names(models: tuple[str, ...]) -> tuple[str, ...]:
    return (*(STEPS + model for model in models), "deterministic", "kernels", "peers")


def results(part: str, device: torch.device, *, dry_run: bool) -> Iterator[Result]:
    """Imports here, so that what is missing ends this part alone."""
    if part.startswith(STEPS):
        from tests.gpu import steps

        sizes = steps.DRY if dry_run else steps.FULL
        yield from steps.measure_model(part.removeprefix(STEPS), sizes, device)
    elif part == "deterministic":
        from tests.gpu import steps

        yield from steps.measure_deterministic(steps.DRY if dry_run else steps.FULL, device)
    elif part == "kernels":
        from tests.gpu import kernels

        yield from kernels.measure(kernels.DRY if dry_run else kernels.FULL, device)
    else:
        from tests.gpu import peers, steps

        sizes = steps.DRY if dry_run else steps.FULL
        yield from peers.transformers_continuous_batching(sizes, device)


def until(deadline: float, name: str, found: Iterator[Result]) -> Iterator[Result]:
    """The results as they come, until the time is over."""
    for result in found:
        yield result
        if time.monotonic() > deadline:
            yield {"name": name, "skipped": "out of time"}
            return


def environment(absent: list[str]) -> dict[str, object]:
    import torch
    import triton

    header = Path(sysconfig.get_path("include")) / "Python.h"
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "stand_ins": absent,
        # Triton compiles its launchers with it.
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "python_header": header.exists(),
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


def strict(value: object) -> object:
    """JSON has no number for what is not finite."""
    if isinstance(value, dict):
        return {key: strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="tests.gpu.parts", description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--results", type=int, required=True, help="file descriptor")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    absent = stand_in_for_unused_packages()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        return NO_DEVICE
    device = torch.device("cpu" if options.dry_run else "cuda")
    with os.fdopen(options.results, "w") as out:

        def write(result: Result) -> None:
            out.write(json.dumps(strict(result)) + "\n")
            out.flush()

        write({"environment": environment(absent)})
        found = guarded(options.part, results(options.part, device, dry_run=options.dry_run))
        # Not inference mode: threads of other libraries may not touch tensors made in it.
        with torch.no_grad():
            for result in until(begin + options.seconds, options.part, found):
                write(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
