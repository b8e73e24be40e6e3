"""Nothing of the cuda path is imported, or needed, where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_machine_without_a_gpu_needs_no_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["ReferenceAttention", "[]"]
