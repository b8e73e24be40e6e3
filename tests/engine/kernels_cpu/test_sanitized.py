"""The kernel tests on a build with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu.library import available_tiers

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)


def has_sanitizers() -> bool:
    compiler = shutil.which("c++")
    if compiler is None:
        return False
    shown = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True
    )
    return Path(shown.stdout.strip()).is_absolute()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not available_tiers(), reason="the native kernels are not built here")
@pytest.mark.skipif(not has_sanitizers(), reason="no C++ compiler with libasan")
def test_kernels_are_clean_under_the_sanitizers(tmp_path: Path) -> None:
    tiers = dict.fromkeys(("generic", available_tiers()[0]))
    done = subprocess.run(
        [
            *("engine/kernels/cpu/sanitize.sh", tmp_path, " ".join(tiers)),
            *(HERE / "test_multiply.py", HERE / "test_attention.py", HERE / "test_native_model.py"),
            HERE / "test_sampling.py",
            *("-k", "not families"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
