"""How many cores this process may really use: affinity, hardware threads, and the cgroup's quota.

A container with a limit of 4 CPUs sees all cores of its machine; with a thread for each of them it
would be stopped for most of every period. Knows no engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """At least 1: physical cores, but no more than the whole CPUs of the quota."""
    quota = cpu_quota()
    cores = physical_cores()
    return cores if quota is None else max(min(cores, math.floor(quota)), 1)


def physical_cores() -> int:
    """Cores this process may run on, hardware threads of one core counted once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    siblings = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.is_file() else str(cpu))
    return len(siblings) or os.cpu_count() or 1


def cpu_quota(root: Path = _CGROUPS, own_groups: Path = _OWN_GROUPS) -> float | None:
    """The CPUs that the tightest cgroup above this process allows; None without a limit."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # no Linux
        return None
    quotas = [
        quota
        for line in lines
        if line.count(":") >= 2
        for folder in _folders(root, *line.split(":", 2)[1:])
        if (quota := _quota(folder)) is not None
    ]
    return min(quotas, default=None)


def _folders(root: Path, controllers: str, group: str) -> Iterator[Path]:
    """The group's folder and all above it. A container may see its own as the root."""
    if not controllers:
        tops = [root, root / "unified"]
    elif "cpu" in controllers.split(","):
        tops = [root / controllers, root / "cpu"]
    else:
        return
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for top in tops:
        for depth in range(len(parts) + 1):
            yield top.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():  # version 2
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cpus = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max", or no such group
        return None
    return cpus if cpus > 0 else None  # -1: no limit
