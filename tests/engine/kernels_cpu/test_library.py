"""Which libraries are built; those that do not fit this code are one line and no kernels."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.kernels.cpu import build, library

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "engine/kernels/cpu/api.h"
# The interface without its comments. Who changes it changes PACELINE_ABI, library.ABI and this.
KNOWN = (10, "099a49ca1c0a5f57")


def ask(folder: Path | None, abi: int = library.ABI) -> list[str]:
    probe = (
        f"from engine.kernels.cpu import library\nlibrary.ABI = {abi}\n"
        "print(library.available_tiers(), library.load_library())\nprint(library.why_missing())"
    )
    environment = {name: value for name, value in os.environ.items() if "PACELINE" not in name}
    if folder is not None:
        environment[library.FOLDER_VARIABLE] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_tier_that_is_not_there_is_an_error_for_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(library.TIER_VARIABLE, "nonsense")
    with pytest.raises(ModelFileError, match="'nonsense' is not available here"):
        library.load_library()


def test_a_library_without_our_functions_is_older_than_the_code(tmp_path: Path) -> None:
    name = ctypes.util.find_library("m")
    found = [path for path in Path("/").glob(f"lib*/**/{name}") if path.is_file()] if name else []
    if not found:
        pytest.skip("no shared library to stand in for an old one")
    shutil.copy(found[0], tmp_path / "paceline_generic.so")
    tiers, reason = ask(tmp_path)
    assert tiers == "() None"
    assert reason.startswith("the CPU kernels are older than this code; rebuild with ")


@pytest.mark.skipif(not library.available_tiers(), reason="the native kernels are not built here")
def test_a_library_of_another_interface_is_older_than_the_code() -> None:
    tiers, reason = ask(None, abi=library.ABI + 1)
    assert tiers == "() None"
    assert reason.startswith("the CPU kernels are older than this code; rebuild with ")


def test_a_file_that_is_no_library_was_built_for_another_machine(tmp_path: Path) -> None:
    (tmp_path / "paceline_generic.so").write_bytes(b"\x7fELF no more")
    assert ask(tmp_path) == ["() None", "the native kernels were built for another machine"]


def test_no_library_was_not_built(tmp_path: Path) -> None:
    tiers, reason = ask(tmp_path)
    assert tiers == "() None"
    assert "were not built" in reason


def test_an_interface_that_changes_changes_its_number() -> None:
    text = HEADER.read_text()
    number = re.search(r"^#define PACELINE_ABI (\d+)$", text, re.MULTILINE)
    assert number is not None
    assert int(number[1]) == library.ABI
    code = " ".join(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).split())
    assert (library.ABI, hashlib.sha256(code.encode()).hexdigest()[:16]) == KNOWN


def test_limits_of_the_machine_are_numbers(kernels: ctypes.CDLL) -> None:
    for what in range(len(library.LIMITS)):
        assert kernels.paceline_limit(what, 1) > 0
    assert kernels.paceline_limit(len(library.LIMITS), 1) == 0
    assert kernels.paceline_limit(0, 0) == 0


@pytest.mark.parametrize(
    ("machine", "tier"),
    [("x86_64", "avx2"), ("AMD64", "avx512vnni"), ("aarch64", "neon"), ("arm64", "neon")],
)
def test_every_kind_of_machine_has_its_tiers(machine: str, tier: str) -> None:
    assert {"generic", tier} <= set(build.tiers(machine))
    assert set(build.tiers("riscv64")) == {"generic"}
