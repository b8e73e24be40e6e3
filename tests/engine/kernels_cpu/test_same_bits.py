"""One answer from every library of kernels: of this machine, and of 64-bit ARM under an emulator.

checksums.cpp prints what a library computes, a line for each kernel, shape and model. ARM's part
takes minutes: `make test-kernels-cpu` has it, where there are a cross compiler and qemu
(apt install g++-aarch64-linux-gnu qemu-user-static).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.kernels.cpu import build
from engine.kernels.cpu.library import available_tiers, library_path

FULL = os.environ.get("KERNEL_TESTS") == "all"  # `make test-kernels-cpu`
SOURCE = Path(__file__).with_name("checksums.cpp")
COMPILER = shutil.which(os.environ.get("CXX") or "c++")
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
CROSS_ROOT = Path("/usr/aarch64-linux-gnu")

pytestmark = [
    pytest.mark.skipif(not available_tiers(), reason="the native kernels are not built here"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def compiled_driver(compiler: str | None, folder: Path) -> Path:
    driver = folder / "checksums"
    subprocess.run(
        [
            *(str(compiler), "-std=c++17", "-O1", "-ffp-contract=off", f"-I{build.FOLDER}"),
            *(SOURCE, "-o", driver, "-ldl"),
        ],
        check=True,
    )
    return driver


def lines(*command: str | Path) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By tier of this machine."""
    driver = compiled_driver(COMPILER, tmp_path_factory.mktemp("here"))
    return {tier: lines(driver, library_path(tier)) for tier in available_tiers()}


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries of 64-bit ARM, compiled as on such a machine, and the driver."""
    if not FULL:
        pytest.skip("takes minutes: make test-kernels-cpu")
    if CROSS_COMPILER is None or EMULATOR is None or not CROSS_ROOT.is_dir():
        pytest.skip("no cross compiler for 64-bit ARM, or no qemu-aarch64")
    folder = tmp_path_factory.mktemp("arm")

    def compile_tier(tier: str) -> None:
        build.compile_tier(tier, folder / f"{tier}.so", machine="aarch64")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("CXX", str(CROSS_COMPILER))
        list(pool.map(compile_tier, build.tiers("aarch64")))
    compiled_driver(CROSS_COMPILER, folder)
    return folder


def emulate(folder: Path, cpu: str, *arguments: str | Path) -> list[str]:
    emulator = (str(EMULATOR), "-cpu", cpu, "-L", CROSS_ROOT)
    return lines(*emulator, folder / "checksums", *arguments)


def test_tiers_of_this_machine_give_the_same_bits(expected: dict[str, list[str]]) -> None:
    first, *others = expected.values()
    assert len(first) > 100
    for other in others:
        assert other == first


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", ["neon", "generic"])
def test_arm_gives_the_same_bits(arm: Path, expected: dict[str, list[str]], tier: str) -> None:
    assert emulate(arm, "max", arm / f"{tier}.so") == next(iter(expected.values()))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cpu", "has_dot_products"), [("max", "1"), ("cortex-a72", "0")])
def test_neon_runs_where_there_are_dot_products(arm: Path, cpu: str, has_dot_products: str) -> None:
    assert emulate(arm, cpu, arm / "generic.so", "neon") == [has_dot_products]
    assert emulate(arm, cpu, arm / "generic.so", "avx2") == ["0"]
