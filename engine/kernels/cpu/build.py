"""Compiles the CPU kernels: one shared library for each instruction set, from the same sources.

Used by setup.py, which loads it by path before anything is installed, so it imports the standard
library only. As a script it builds in place, or with `--sanitize FOLDER` checked variants there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
AVX2 = ("-mavx2", "-mfma", "-mf16c")
X86_TIERS = {
    "generic": (),
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512vnni": (
        *AVX2,
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        "-mprefer-vector-width=512",
    ),
}
# GCC since 8 and Clang; PACELINE_NEON since a compiler may have dot products without being asked
ARM_TIERS = {
    "generic": (),
    "neon": ("-march=armv8.2-a+dotprod", "-DPACELINE_NEON"),
}
# as platform.machine() calls them on Linux, macOS and BSD
TIERS = {"x86_64": X86_TIERS, "amd64": X86_TIERS, "aarch64": ARM_TIERS, "arm64": ARM_TIERS}
# No contraction: a product and a sum are fused only where the source says so, on every tier.
FLAGS = (
    *("-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared"),
    *("-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    # GCC's own headers for AVX-512 set these off
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"),
)
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


class CannotBuild(RuntimeError):
    """No compiler, or it refused; the message is one line."""


def tiers(machine: str = platform.machine()) -> dict[str, tuple[str, ...]]:
    """Tiers worth building on a kind of machine, by default this one -> compiler flags."""
    return TIERS.get(machine.lower(), {"generic": ()})


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def compile_tier(
    tier: str, output: Path, extra: tuple[str, ...] = (), machine: str = platform.machine()
) -> None:
    """Compile one library; for another machine with its compiler in $CXX. Raises CannotBuild."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise CannotBuild("no C++ compiler (c++, g++ or $CXX)")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *compiler.split(),
        *(*FLAGS, *tiers(machine)[tier], *extra),
        f'-DPACELINE_TIER="{tier}"',
        *map(str, sources()),
        *("-o", str(output)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise CannotBuild(f"{compiler}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        raise CannotBuild(f"{tier}: {lines[0] if lines else error.stderr[-200:]!r}") from None


def build_all(folder: Path, names: list[str], extra: tuple[str, ...] = ()) -> list[str]:
    """Compile tiers into a folder; a line about each."""

    def build(tier: str) -> str:
        try:
            compile_tier(tier, folder / f"paceline_{tier}.so", extra)
        except CannotBuild as error:
            return f"{tier}: not built ({error})"
        return f"{tier}: built"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build, names))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CPU kernels in place.")
    parser.add_argument("--sanitize", type=Path, metavar="FOLDER", help="checked variants, there")
    parser.add_argument("tiers", nargs="*", help=f"of {', '.join(tiers())}; default: all")
    given = parser.parse_args()
    names = given.tiers or list(tiers())
    folder: Path | None = given.sanitize
    lines = build_all(folder, names, SANITIZE) if folder else build_all(FOLDER, names)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
