"""The share of client conformance that `make test` runs: openai, and anthropic if installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_client_does_not_notice(client: str, url: str) -> None:
    """In a process of its own: what a client warns of is not ours to fail by."""
    pytest.importorskip(client, reason=f"{client} is not installed here; see make test-clients")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    suite = subprocess.run(
        [*command, str(HERE / f"conformance_{client}.py")],
        env={"PACELINE_URL": url, "PATH": "/usr/bin:/bin"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert suite.returncode == 0, suite.stdout[-3000:]
