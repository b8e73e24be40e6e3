"""docs/gpu-roofline.md is what the code of today gives; floors are those of the models' shapes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu-roofline.md"
# From the models' published configurations: layers, hidden, inner, q and kv width, vocabulary.
PUBLISHED = {
    "Llama-3.1-8B": (32, 4096, 14336, 4096, 1024, 128256),
    "Qwen3-8B": (36, 4096, 12288, 4096, 1024, 151936),
}
STEPS = {
    **{f"decode {b} x {c}k": (b, 1024 * c, 0) for b in (1, 8, 64, 256) for c in (1, 8)},
    "prefill 2,048": (0, 0, 2048),
    "mixed 64 x 1k + 448": (64, 1024, 448),
}


def expected_row(model: str, step: str) -> list[float]:
    """GB of weights, GB of KV with queries and results, TFLOP, and the floor in ms: by hand."""
    layers, hidden, inner, q, kv, vocab = PUBLISHED[model]
    batch, context, prefill = STEPS[step]
    tokens, rows = batch + prefill, batch + (prefill > 0)
    weights = layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner)
    head = hidden * vocab
    keys = batch * context + prefill
    pairs = batch * context + prefill * (prefill + 1) // 2
    products = 2 * (weights + head)
    attention = 2 * layers * (2 * kv * keys + 2 * q * tokens)
    others = 2 * layers * tokens * (6 * hidden + 3 * (q + 2 * kv) + 2 * q + 3 * inner)
    others += 12 * rows * vocab
    flops = 2 * (weights * tokens + head * rows) + 4 * layers * q * pairs
    floor = max((products + attention + others) / 4.3e12, flops / 790e12)
    return [products / 1e9, attention / 1e9, flops / 1e12, floor * 1e3]


@pytest.mark.parametrize("model", PUBLISHED)
def test_bytes_flops_and_floors_are_those_of_the_shapes(model: str) -> None:
    section = PAGE.read_text().split(f"## {model}\n")[1].split("\n## ")[0]
    rows = {
        cells[1].strip(): [float(cell) for cell in cells[2:6]]
        for cells in (line.split("|") for line in section.splitlines())
        if len(cells) > 6 and re.match(r" (decode|prefill|mixed)", cells[1])
    }
    assert set(rows) == set(STEPS)
    for step, found in rows.items():
        assert found == pytest.approx(expected_row(model, step), abs=0.0051), step


@pytest.mark.skipif(os.environ.get("KERNEL_TESTS") != "all", reason="`make test-kernels` runs it")
def test_the_page_is_what_the_code_of_today_gives() -> None:
    """Launches too, which are counted."""
    pytest.importorskip("triton", reason="launches of its kernels are counted")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.roofline"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text()
