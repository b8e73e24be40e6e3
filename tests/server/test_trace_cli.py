"""`paceline trace` writes a file that Perfetto opens, or says in one line why not."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from server.__main__ import main
from tests.support.scripted_server import running_server


def test_trace_of_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "trace.json"
    flags = ("--api-key", "k", "--log-level", "warning")
    with running_server("ready", *flags) as (_process, client):
        url = str(client.base_url)
        headers = {"authorization": "Bearer k", "x-request-id": "traced"}
        body = {"prompt": "x", "max_tokens": 20}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        where = ["--url", f"{url}/v1/", "--out", str(out)]
        assert main(["trace", "--seconds", "0", "--api-key", "k", *where]) == 0
        assert main(["trace", "--seconds", "0", *where]) == 1
        monkeypatch.setenv("PACELINE_API_KEY", "team+admin:k, other:l")  # as the server takes it
        assert main(["trace", "--seconds", "0", *where]) == 0
        assert (
            main(["trace", "--seconds", "0.1", "--api-key", "k", "--url", url, "--out", "/"]) == 1
        )
    said = capsys.readouterr()
    assert "perfetto" in said.out
    assert len(said.err.splitlines()) == 2
    events = json.loads(out.read_text())["traceEvents"]
    assert any(event["name"] == "request traced" for event in events)
    assert {event["ph"] for event in events} == {"M", "X", "C"}


def test_trace_without_a_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--seconds", "0", "--url", "http://127.0.0.1:9"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
