"""Time of a piece of device work, and what it reached of the device's floors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from tests.gpu.roofline import BYTES_PER_SECOND, FLOPS_PER_SECOND

Work = Callable[[], object]
QUEUEING_SECONDS = 1e-3
CYCLES_PER_SECOND = 2e9  # about; a little more than an H200's clock


def seconds(work: Work, device: torch.device, *, repeats: int) -> float:
    """Median of `repeats`, after a first one for compilation; the device's clock where it has one.

    Between repeats on a GPU a buffer larger than its L2 cache is written, and the device sleeps
    while the host queues the work: a short kernel would else be timed as its launch.
    """
    work()
    times: list[float] = []
    if device.type != "cuda":
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    cache = torch.empty(128 << 20, dtype=torch.int8, device=device)
    events = []
    for _ in range(repeats):
        cache.zero_()
        sleep(QUEUEING_SECONDS)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) / 1000 for begin, end in events)


def sleep(seconds: float) -> None:
    """Of the CUDA device, in order with its work."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def against_floor(took: float, *, num_bytes: float = 0, flops: float = 0) -> dict[str, float]:
    floor = max(num_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
    return {
        "microseconds": took * 1e6,
        "floor_microseconds": floor * 1e6,
        "share_of_floor": floor / took,
        "terabytes_per_second": num_bytes / took / 1e12,
        "teraflops": flops / took / 1e12,
    }
