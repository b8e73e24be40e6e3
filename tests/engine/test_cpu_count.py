"""The engine's threads: never more than the cgroup lets run at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import cpu_count
from engine.cpu_count import cpu_quota, physical_cores, usable_cores

V2 = "0::/a/b\n"
V1 = "12:memory:/x\n4:cpu,cpuacct:/docker/77\n0::/\n"


def tree(folder: Path, own: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return cpu_quota(folder / "cgroup", folder / "own")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        (V2, {"a/b/cpu.max": "250000 100000\n"}, 2.5),
        (V2, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0),
        (V2, {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "150000 50000\n"}, 3.0),
        (V2, {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1.0),  # a container's own namespace
        ("0::/../../other\n", {"cpu.max": "100000 100000\n"}, 1.0),
        (
            V1,
            {
                "cpu,cpuacct/docker/77/cpu.cfs_quota_us": "200000\n",
                "cpu,cpuacct/docker/77/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (V2, {"a/b/cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_group_is_the_quota(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    assert tree(tmp_path, own, files) == quota


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "absent") is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 16), (64.0, 16), (4.0, 4), (2.9, 2), (0.5, 1)])
def test_threads_are_whole_cpus_of_the_quota_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(cpu_count, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu_count, "physical_cores", lambda: 16)
    assert usable_cores() == cores


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores() <= physical_cores()
