"""What people read names what there is: flags both ways, targets of make, linked chapters."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bench.long_prompt import build_parser as long_prompt_parser
from bench.options import build_parser as bench_parser
from planner.__main__ import _parser as simulate_parser
from server.options import OPTIONS, TOGGLES

ROOT = Path(__file__).resolve().parents[2]
HANDBOOK = ("README.md", "docs/operations.md", "docs/api.md", "docs/observability.md")
# Flags of docker, helm and of `paceline trace`.
OTHERS = {"--build", "--set", "--index-url", "--seconds", "--version"}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def flags_in(words: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", words))


def test_every_flag_is_in_the_handbook_and_every_flag_there_exists() -> None:
    serve = {option.flag for name, option in OPTIONS.items() if name != "model"} | {"--config"}
    switches = {f"--no-{name.replace('_', '-')}" for name in TOGGLES}
    parsers = (bench_parser(), long_prompt_parser(), simulate_parser())
    beside = {flag for parser in parsers for act in parser._actions for flag in act.option_strings}
    named = set().union(*(flags_in(text(name)) for name in HANDBOOK))
    assert serve - named == set()
    assert named - serve - switches - beside - OTHERS == set()


def test_make_tells_of_each_target_and_the_handbook_of_none_besides() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    # inside of `make test` a make would tell that it enters a directory
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in said.stdout.splitlines()} == targets
    assert all(len(line.split(maxsplit=2)) == 3 for line in said.stdout.splitlines())
    for name in HANDBOOK:
        assert set(re.findall(r"`make ([a-z-]+)", text(name))) <= targets, name


def test_every_link_between_chapters_leads_somewhere() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    pages[ROOT / "README.md"] = text("README.md")
    checked = 0
    for path, words in pages.items():
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", words):
            name, _, chapter = target.partition("#")
            page = (path.parent / name).resolve() if name else path
            assert page.exists(), f"{path.name}: {target}"
            if chapter:
                assert chapter in _chapters(pages[page]), f"{path.name}: {target}"
            checked += 1
    assert checked > 20


def _chapters(words: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", words, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}
