"""`make test-clients`, `make test-clients-node`, `make test-fuzz`: clients on a scripted server.

Starts the server, runs one suite in its own environment, and ends with one line that says what it
saw. The exit status is the suite's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-clients" / "bin"
KEY = "sk-conformance"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
# These wait or stream without end by design.
ENDLESS = ("/admin/live", "/admin/trace")
# There are few different requests without a body; so many operations take all that they are given.
NUM_RICH_OPERATIONS = 17
# Of one answer: scripted ones may be endless, and an example is about its form.
FUZZED_TOKENS = 128
CLIENTS = ("openai", "anthropic", "langchain-openai", "litellm", "llama-index-llms-openai")


@contextmanager
def serving(*limits: str) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    command = [sys.executable, "-m", "tests.clients.serving"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, folder, *limits],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        assert server.stdin is not None
        url = server.stdout.readline().strip()
        if not url.startswith("http"):
            raise SystemExit("the server did not start")
        try:
            yield url
        finally:
            server.stdin.close()
            server.wait(30)


def run(command: list[str], url: str, folder: Path) -> tuple[int, str]:
    """The suite's status and all that it printed, which is passed on as it comes."""
    environment = {**os.environ, "PACELINE_URL": url}
    lines = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return suite.returncode, "".join(lines)


def versions() -> str:
    listed = subprocess.run(
        [str(PYTHON / "python"), "-m", "pip", "list", "--format=freeze"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = dict(line.split("==", 1) for line in listed.splitlines() if "==" in line)
    return ", ".join(f"{name} {known.get(name, '?')}" for name in CLIENTS)


def python_clients() -> int:
    suites = sorted(str(path) for path in HERE.glob("conformance_*.py"))
    command = [str(PYTHON / "python"), "-m", "pytest", "-q", "-c", os.devnull]
    command += ["--rootdir", str(HERE), "-p", "no:cacheprovider", "--import-mode=importlib"]
    with serving() as url:
        status, text = run([*command, *suites], url, ROOT)
    passed = re.findall(r"(\d+) passed", text)
    failed = re.findall(r"(\d+) failed", text)
    print(
        f"python clients: {passed[-1] if passed else 0} checks held, "
        f"{failed[-1] if failed else 0} failed ({versions()})"
    )
    return status


def node_clients() -> int:
    with serving() as url:
        status, _ = run(["node", "conformance.mjs"], url, HERE / "node")
    return status


def fuzz(examples: int) -> int:
    each = max(1, -(-examples // NUM_RICH_OPERATIONS))
    command = [str(PYTHON / "schemathesis")]
    with serving(str(FUZZED_TOKENS)) as url:
        command += ["run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {KEY}"]
        command += ["--phases=fuzzing", f"--max-examples={each}", "--no-color"]
        command += [f"--checks={CHECKS},response_schema_conformance", "--continue-on-failure"]
        command += ["--request-timeout=120"]
        for path in ENDLESS:
            command += ["--exclude-path", path]
        status, text = run(command, url, ROOT)
    seen = re.search(r"(\d+) generated", text)
    tested = re.search(r"Tested: (\d+)", text)
    summary = text.rsplit("Test cases:", 1)[-1]
    failures = re.search(r"(\d+) unique failures?", summary)
    errors = re.search(r"(\d+) errored", summary)
    print(
        f"fuzz: {seen[1] if seen else 0} examples over {tested[1] if tested else 0} operations, "
        f"{failures[1] if failures else 0} with a 5xx or against the schema, "
        f"{errors[1] if errors else 0} without an answer"
    )
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("python", "node", "fuzz"))
    parser.add_argument("--examples", type=int, default=10_000)
    given = parser.parse_args()
    if given.suite == "fuzz":
        return fuzz(given.examples)
    return python_clients() if given.suite == "python" else node_clients()


if __name__ == "__main__":
    sys.exit(main())
