"""Kernels compile for sm_90 ahead of time: no spills, bounded registers, the instructions meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# `make test-kernels` sets it: every head size, group and form.
FULL = os.environ.get("KERNEL_TESTS") == "all"
MAX_REGISTERS = 255  # of a thread, by the hardware; more would spill
MAX_SHARED = 227 * 1024  # of a program on sm_90


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Compiled by a process of its own: this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.kernels_triton.compile_sm90"]
    if FULL:
        command.append("all")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}


def test_no_kernel_spills(compiled: dict[str, dict[str, Any]]) -> None:
    assert len(compiled) >= 16
    for name, case in compiled.items():
        assert case["spill_bytes"] == case["local_memory"] == 0, name
        assert case["registers"] <= MAX_REGISTERS, name
        assert case["shared"] <= MAX_SHARED, name


def test_two_decode_programs_fit_a_multiprocessor(compiled: dict[str, dict[str, Any]]) -> None:
    """The grid has two of them for each: 64 Ki registers, 227 KiB of shared memory."""
    case = compiled["attention decode"]
    assert 2 * case["registers"] * 128 <= 65536
    assert 2 * case["shared"] <= MAX_SHARED


def test_keys_and_weights_are_loaded_asynchronously(compiled: dict[str, dict[str, Any]]) -> None:
    for name, case in compiled.items():
        if name.startswith(("attention", "gemm")):
            assert case["async_copies"] > 0, name


def test_wide_tiles_multiply_with_warp_groups(compiled: dict[str, dict[str, Any]]) -> None:
    for name, case in compiled.items():
        if name.startswith("gemm") or "prefill" in name or "fixed" in name:
            assert case["wgmma"] > 0, name
        elif name.startswith("attention"):
            assert case["mma"] > 0, name


def test_nothing_that_changes_from_step_to_step_is_compiled_for(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """A new number of rows must not stop requests for the seconds of a compilation.

    What is left are sizes of the model and of the token table.
    """
    seen = {name for case in compiled.values() for name in case["specialised"]}
    assert seen == {"vocab", "stride", "positions"}
