"""Nothing of the cuda path is imported, or needed, where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.kernels.cpu.library import available_tiers
from tests.structured.server import real_server

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys
sys.modules["triton"] = None  # any import of it fails
sys.modules["flash_attn_interface"] = None
import torch
import engine.native_cpu, engine.torch_engine, server.core_process
from engine.attention import select_attention
from engine.kv_cache import KVCache
class Shape:
    num_layers, num_kv_heads, head_dim = 1, 1, 16
options = {"dtype": torch.float32, "device": torch.device("cpu")}
cache = KVCache(Shape, num_blocks=1, block_size=8, **options)
print(type(select_attention(cache, num_heads=1, windows=(None,))).__name__)
print([name for name in sys.modules if name.startswith(("engine.cuda", "engine.kernels.triton"))])
"""
# In each process of the server: packages of a GPU are not there, and who imports what is noted.
SITE = """
import os, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flash_attn", "flash_attn_interface", "nvidia"):
            return None
        if name.startswith("engine."):
            with open({log!r}, "a") as log:
                log.write(f"{{os.getpid()}} {{name}}\\n")
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
OF_A_GPU = ("engine.cuda_", "engine.kernels.triton", "engine.attention.triton", "engine.gpu_linear")


def test_a_machine_without_a_gpu_needs_no_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["ReferenceAttention", "[]"]


@pytest.mark.model
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_server_on_a_cpu_neither_has_nor_imports_any_of_it(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one, with the native kernels and with torch: it answers, and loads none of our own."""
    log = tmp_path / "imports"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--device", "cpu", "--cpu-kernels", kernels, "--max-model-len", "256")
    with real_server(*flags) as url:
        body = {"prompt": "The sea is", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
    imports = [line.split() for line in log.read_text().splitlines()]
    names = {name for _, name in imports}
    assert len({pid for pid, _ in imports}) > 1, "the core is a process of its own"
    on_torch = kernels == "reference" or not available_tiers()
    assert ("engine.torch_engine" in names) is on_torch
    assert "engine.step_engine" in names
    assert not [name for name in names if name.startswith(OF_A_GPU)]
