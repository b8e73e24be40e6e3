"""The import rule of the house, read from the syntax tree: who may know whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSE = {"server", "scheduler", "engine", "planner", "bench"}

# What each package may import of the house. A dotted name allows that module and what is in it.
ALLOWED = {
    "scheduler": {"scheduler"},
    "engine": {"engine", "scheduler.types", "scheduler.loop"},
    "server": {"server", "scheduler", "engine"},
    "planner": {"planner", "scheduler", "engine.simulated", "bench.traces", "bench.statistics"},
    "bench": {"bench"},
}
# `paceline bench` and `paceline simulate` hand over: the command is the door of every package.
COMMAND = {
    ("server/__main__.py", "bench.__main__"),
    ("server/__main__.py", "planner.__main__"),
}
# Modules of engine that build or run models; in server only core_build may import them.
ENGINE_WITHOUT_TORCH = {
    "engine.gguf_file",
    "engine.errors",
    "engine.default_model",
    "engine.grammar",
    "engine.kv_memory",
    "engine.model_config",
    "engine.simulated",
    "engine.vocabulary",
}


def sources(package: str) -> Iterator[Path]:
    return (ROOT / package).rglob("*.py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, with whether it is imported at the top of the file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module in HOUSE:
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", id(node) in top
            else:
                yield node.module, id(node) in top


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


@pytest.mark.parametrize("package", sorted(HOUSE))
def test_package_imports_only_what_the_house_allows(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module, _ in imports(path)
        if module.split(".")[0] in HOUSE
        and not within(module, ALLOWED[package])
        and (str(path.relative_to(ROOT)), module) not in COMMAND
    ]
    assert not wrong


def test_scheduler_imports_the_standard_library_only() -> None:
    wrong = [
        f"{path.name} imports {module}"
        for path in sources("scheduler")
        for module, _ in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names | {"scheduler"}
    ]
    assert not wrong


def test_only_core_build_builds_engines() -> None:
    wrong = [
        f"{path.name} imports {module}"
        for path in sources("server")
        if path.name != "core_build.py"
        for module, _ in imports(path)
        if module.startswith("engine") and not within(module, ENGINE_WITHOUT_TORCH)
    ]
    assert not wrong


def test_only_metrics_imports_prometheus() -> None:
    wrong = [
        path.name
        for package in HOUSE
        for path in sources(package)
        if path.name != "metrics.py"
        for module, _ in imports(path)
        if module.startswith("prometheus_client")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import scheduler.loop, engine.simulated", ["torch", "fastapi", "numpy"]),
        ("import server.serve", ["torch", "numpy", "llguidance"]),
        ("import server.__main__", ["torch"]),
        ("import server.core_process", ["asyncio", "ssl", "pydantic"]),
        ("import planner.__main__", ["torch", "fastapi"]),
        ("import bench.__main__", ["torch", "fastapi", "server", "scheduler", "engine"]),
    ],
)
def test_light_imports_stay_light(statement: str, absent: list[str]) -> None:
    probe = f"{statement}\nimport sys\nprint([m for m in {absent} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", sorted(HOUSE))
def test_files_stay_readable(package: str) -> None:
    """A file much over 400 lines has outgrown its idea."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources(package)
        if (count := len(path.read_text().splitlines())) > 450
    }
    assert not long
