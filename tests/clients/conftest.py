"""The server that clients talk to: PACELINE_URL, or one that is started for these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = os.environ.get("PACELINE_URL")
    if given:
        yield given
        return
    data = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-m", "tests.clients.serving", str(data)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        line = server.stdout.readline().strip()
        assert line.startswith("http"), "the server did not start"
        try:
            yield line
        finally:
            server.stdin.close()
            server.wait(20)
