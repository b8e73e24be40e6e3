"""The whole of `paceline serve` in a process, with a scripted core and a byte tokenizer.

Run as a module: HOW is what tests.support.scripted_core takes, the rest are flags of serve. The
port is printed as the first line of stdout. `running_server` does it for a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from server.config import parse_settings
from server.logs import configure_logging
from server.serve import bind, live
from server.supervisor import CoreGaveUp
from tests.support.scripted_core import ROOT, spawn
from tests.support.tokenizers import byte_tokenizer


@contextmanager
def running_server(
    how: str, *flags: str, ready: bool = True
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A process of its own and a client; the process is killed if the test leaves it alive."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.scripted_server", how, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process, httpx.Client(timeout=60.0) as client:
        try:
            assert process.stdout is not None
            client.base_url = httpx.URL(f"http://127.0.0.1:{process.stdout.readline().strip()}")
            deadline = time.monotonic() + 60
            while ready and client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            yield process, client
        finally:
            process.kill()


def main(how: str, flags: list[str]) -> int:
    settings = parse_settings(flags, {})
    configure_logging(settings.server.log_level, settings.server.log_format)
    with bind("127.0.0.1", settings.server.port) as listener:
        print(listener.getsockname()[1], flush=True)
        try:
            return live(settings, listener, byte_tokenizer(), spawn(how))
        except CoreGaveUp as error:
            print(f"paceline: {error}", file=sys.stderr)
            return error.exit_code


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1], ["--port", "0", *sys.argv[2:]]))
