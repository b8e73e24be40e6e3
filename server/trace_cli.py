"""`paceline trace`: records a running server for some seconds into a file for Perfetto.

Speaks HTTP to any Paceline server; all the work is done there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

_PATIENCE_SECONDS = 30.0


def record(url: str, *, api_key: str, seconds: float, out: str) -> int:
    """The exit code; 0 once the file is written."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers) as client:
            answer = client.get(
                "/admin/trace", params={"seconds": seconds}, timeout=seconds + _PATIENCE_SECONDS
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _fail(f"{url}: {error or type(error).__name__}")
    if answer.status_code != 200:
        return _fail(f"{url}: {_reason(answer)}")
    try:
        num_events = len(answer.json()["traceEvents"])
        Path(out).write_bytes(answer.content)
    except OSError as error:
        return _fail(f"{out}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        return _fail(f"{url}: the answer is no trace")
    print(f"{out}: {num_events} events; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _reason(answer: httpx.Response) -> str:
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"


def _fail(message: str) -> int:
    print(f"paceline: {message}", file=sys.stderr)
    return 1
