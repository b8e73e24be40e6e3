"""bench/gpu_check.sh runs to its end without a GPU, whatever becomes of its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the dry run interprets Triton kernels")

from tests.gpu import check

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("KERNEL_TESTS") == "all"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    "PYTHON": sys.executable,
    "CUDA_VISIBLE_DEVICES": "",
}


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "bench" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.timeout(3000)
@pytest.mark.skipif(not FULL, reason="`make test-kernels` runs it: it takes minutes")
def test_the_dry_run_reaches_its_end_and_nothing_fails(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run_check("--dry-run", "--seconds", "3000", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["dry_run"] is True
    assert report["environment"]["triton"]
    least_results = {"steps tiny": 9, "deterministic": 4, "kernels": 15, "peers": 2}
    for part, least in least_results.items():
        assert len(report[part]) >= least
        assert not [result for result in report[part] if "error" in result]
    assert [r["right"] for r in report["kernels"] if "right" in r].count(False) == 0
    assert report["deterministic"][0]["equal_alone_in_a_batch_and_in_chunks"] is True


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run_check("--out", str(tmp_path / "report.json"))
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


SCRIPTS = {
    "prints a line that is no result": "print('hello')",
    "ends with an error": "raise SystemExit(7)",
    "is killed": "os.kill(os.getpid(), 9)",
    "hangs": "time.sleep(600)",
    "leaves half a line": 'os.write(fd, b\'{"name": "ha\')',
}
EXPECTED = {
    "prints a line that is no result": [],
    "ends with an error": ["its process ended with 7"],
    "is killed": ["its process ended with -9"],
    "hangs": ["killed: it did not end in its time"],
    "leaves half a line": [],
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_part_that_goes_wrong_costs_its_own_results(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had found before is kept, the next part runs, and the file is whole all the time."""

    def start(part: str, **_options: object) -> tuple[subprocess.Popen[bytes], int]:
        ours, theirs = os.pipe()
        code = SCRIPTS[what] if part == "kernels" else "pass"
        script = f'import os, time\nfd = {theirs}\nos.write(fd, b\'{{"name": "x"}}\\n\')\n{code}'
        process = subprocess.Popen([sys.executable, "-c", script], pass_fds=(theirs,))
        os.close(theirs)
        return process, ours

    monkeypatch.setattr(check, "start", start)
    monkeypatch.setattr(check, "GRACE", 0.0 if what == "hangs" else 60.0)
    report = check.Report(tmp_path / "report.json", dry_run=True)
    for part in ("kernels", "peers"):
        seconds = 5 if what == "hangs" and part == "kernels" else 60
        for result in check.results_of(part, dry_run=True, deadline=time.monotonic() + seconds):
            report.add(part, result)
            assert json.loads((tmp_path / "report.json").read_text())[part][-1] == result
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["peers"] == [{"name": "x"}]
    errors = [result["error"] for result in found["kernels"] if "error" in result]
    assert errors == EXPECTED[what]
    if what != "hangs":  # a slow machine may have killed it before its first result
        assert found["kernels"][0] == {"name": "x"}


def test_a_part_whose_time_is_over_is_not_started() -> None:
    results = list(check.results_of("kernels", dry_run=True, deadline=time.monotonic() - 1))
    assert results == [{"name": "kernels", "skipped": "out of time"}]
