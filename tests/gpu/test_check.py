"""bench/gpu_check.sh runs to its end without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the dry run interprets Triton kernels")

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("KERNEL_TESTS") == "all"


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [str(ROOT / "bench" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not FULL, reason="`make test-kernels` runs it: it takes minutes")
def test_the_dry_run_reaches_its_end_and_nothing_fails(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run_check("--dry-run", "--seconds", "3000", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["dry_run"] is True
    for part in ("steps", "kernels"):
        assert len(report[part]) > 8
        assert not [result for result in report[part] if isinstance(result.get("error"), str)]
    verdicts = [
        r["equal_alone_in_a_batch_and_in_chunks"] for r in report["steps"] if "capture" in r
    ]
    assert verdicts == [True]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run_check("--out", str(tmp_path / "report.json"))
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
