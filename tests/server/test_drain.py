"""The life of the server process: ports before models, drains, signals, no orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.release import version
from tests.support.scripted_server import running_server

BODY: dict[str, Any] = {"prompt": "go", "stream": True, "ignore_eos": True, "temperature": 0}
COMPLETIONS = "/v1/completions"


class Reader(threading.Thread):
    """Reads one stream to its end; each step of the scripted engine takes 5 ms."""

    def __init__(self, client: httpx.Client, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = client.base_url.join(COMPLETIONS)
        self._body = {**BODY, "max_tokens": max_tokens}
        self.started = threading.Event()
        self.text = ""

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            for piece in response.iter_text():
                self.text += piece
                self.started.set()


def start(client: httpx.Client, max_tokens: int) -> Reader:
    reader = Reader(client, max_tokens)
    reader.start()
    assert reader.started.wait(60)
    return reader


def core_of(process: subprocess.Popen[str]) -> int:
    children = psutil.Process(process.pid).children()
    (core,) = [child.pid for child in children if "scripted_core" in " ".join(child.cmdline())]
    return core


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_stop_lets_running_streams_finish_and_refuses_new_ones() -> None:
    """B127: readiness 503 first, liveness 200, streams end with [DONE], exit code 0, no orphan."""
    with running_server("ready") as (process, client):
        core = core_of(process)
        readers = [start(client, 800) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        poll(lambda: client.get("/ready").status_code == 503)
        assert client.get("/health").status_code == 200
        refused = client.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.headers["connection"] == "close"  # the next try may find another server
        for reader in readers:
            reader.join(60)
            assert reader.text.endswith("data: [DONE]\n\n")
            assert "error" not in reader.text
        assert process.wait(30) == 0
        assert is_gone(core)


def test_the_log_tells_a_life_in_json_from_the_version_to_the_end() -> None:
    """The engine's lines too: what reads the log need know one form."""
    flags = ("--log-format", "json", "--max-input-tokens", "999999", "--drain-seconds", "0.2")
    with running_server("ready", *flags) as (process, client):
        assert f'version="{version()}"' in client.get("/metrics").text
        reader = start(client, 1500)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        reader.join(30)
    lines = [json.loads(line) for line in err.splitlines()]
    told = [line["message"] for line in lines if line["logger"] == "paceline"]
    for number, words in enumerate(
        (
            f"Paceline {version()} starts on port",
            "loading weights 50 %",
            "ready",
            "--max-input-tokens 999999 limits nothing",
            "stopping: 1 unfinished",
            "1 unfinished sequences end with an error: their time is over",
            "stopped",
        )
    ):
        assert words in told[number]
    ready = next(line for line in lines if line["message"] == "ready")
    assert (ready["version"], ready["model"]) == (version(), "scripted")


def test_streams_beyond_the_drain_limit_end_with_an_error_event() -> None:
    """B127."""
    with running_server("ready", "--drain-seconds", "0.5") as (process, client):
        reader = start(client, 1500)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        reader.join(30)
        assert '"error"' in reader.text
        assert "shutting down" in reader.text


@pytest.mark.parametrize("case", ["idle connection", "no reader", "stalled engine"])
def test_nothing_keeps_the_server_from_stopping(case: str) -> None:
    """B128: gone within the drain limit and 2 s."""
    with running_server("ready", "--drain-seconds", "0.5") as (process, client):
        core = core_of(process)
        port = client.base_url.port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)) as connection:
            if case == "idle connection":
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            if case == "no reader":
                body = b'{"prompt":"go","stream":true,"max_tokens":1500,"n":8}'
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                connection.sendall(body)
                time.sleep(0.5)
            if case == "stalled engine":
                start(client, 1500)
                os.kill(core, signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0  # that is: ever
            assert is_gone(core)


def test_a_second_signal_stops_at_once() -> None:
    """B128: SIGINT twice, as Ctrl-C twice in a terminal."""
    with running_server("ready") as (process, client):
        core = core_of(process)
        reader = start(client, 1500)
        process.send_signal(signal.SIGINT)
        poll(lambda: client.get("/ready").status_code == 503)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        reader.join(30)
        assert '"length"' not in reader.text  # it was not waited for
        assert is_gone(core)


@pytest.mark.parametrize("twice", [False, True])
def test_a_stop_cuts_what_hangs_without_a_traceback(twice: bool) -> None:
    """B128: a body that never comes, a client that never reads and a stream beyond the limit."""
    with running_server("ready", "--drain-seconds", "0.3") as (process, client):
        port = client.base_url.port
        assert port is not None
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
        body = b'{"prompt":"go","stream":true,"max_tokens":1500,"n":8}'
        with (
            socket.create_connection(("127.0.0.1", port)) as half_sent,
            socket.create_connection(("127.0.0.1", port)) as not_reading,
        ):
            half_sent.sendall(head + b"100\r\n\r\n{")
            not_reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            not_reading.sendall(head + b"%d\r\n\r\n" % len(body) + body)
            start(client, 1500)
            process.send_signal(signal.SIGTERM)
            if twice:
                time.sleep(0.1)
                process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert " ERROR " not in errors


def test_a_killed_core_shows_at_every_door_and_heals(tmp_path: Path) -> None:
    """B124 over HTTP: error event, 503s, then it serves again."""
    may_start = tmp_path / "start"
    may_start.touch()
    with running_server(f"until {may_start}") as (process, client):
        reader = start(client, 1500)
        may_start.unlink()
        os.kill(core_of(process), signal.SIGKILL)
        reader.join(30)
        assert '"error"' in reader.text
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        assert client.post(COMPLETIONS, json=BODY).status_code == 503
        may_start.touch()
        poll(lambda: client.get("/ready").status_code == 200)
        assert client.get("/health").status_code == 200
        answer = client.post(COMPLETIONS, json={**BODY, "stream": False, "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_frozen_core_turns_health_to_503_until_it_moves_again() -> None:
    """B125: only while work is pending; an idle core that is as silent stays healthy."""
    with running_server("ready", "--stall-seconds", "0.5") as (process, client):
        core = core_of(process)
        time.sleep(0.7)
        assert client.get("/health").status_code == 200
        reader = start(client, 400)
        os.kill(core, signal.SIGSTOP)
        poll(lambda: client.get("/health").status_code == 503)
        assert client.get("/ready").status_code == 503
        os.kill(core, signal.SIGCONT)
        reader.join(60)
        assert reader.text.endswith("data: [DONE]\n\n")
        assert client.get("/health").status_code == 200


def test_the_port_answers_before_the_model_is_loaded(tmp_path: Path) -> None:
    """B134: live at once, not ready, completions refused with a time to come back."""
    loaded = tmp_path / "loaded"
    with running_server(f"until {loaded}", ready=False) as (_, client):
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        assert client.get("/v1/models").status_code == 503
        refused = client.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        loaded.touch()
        poll(lambda: client.get("/ready").status_code == 200)
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [("bad model", 2, "this is no model"), ("broken build", 1, "no kernels")],
)
def test_a_core_that_never_starts_ends_the_server_with_one_line(
    how: str, code: int, line: str
) -> None:
    with running_server(how, ready=False) as (process, _):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert errors.splitlines()[-1].startswith("paceline: ")
        assert line in errors.splitlines()[-1]


def test_a_flood_of_headers_is_refused_and_others_are_served() -> None:
    """B151."""
    with running_server("ready", "--max-header-bytes", "16KiB") as (_, client):
        port = client.base_url.port
        assert port is not None
        floods = [
            b"x-big: " + b"a" * 100_000,
            b"\r\n".join(b"x-%d: 1" % i for i in range(2000)),
        ]
        for flood in floods:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.settimeout(30)
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + flood)
                assert connection.recv(1000).startswith(b"HTTP/1.1 431")
            assert client.get("/health").status_code == 200
        long_path = client.get("/health?" + "a" * 20_000)
        assert long_path.status_code == 431
        assert long_path.json()["error"]["code"] == "headers_too_large"


def test_the_child_for_grammars_starts_with_the_first_grammar_and_ends_with_us() -> None:
    def checkers(process: subprocess.Popen[str]) -> list[int]:
        children = psutil.Process(process.pid).children()
        return [child.pid for child in children if "grammar_worker" in " ".join(child.cmdline())]

    with running_server("ready") as (process, client):
        assert not checkers(process)
        refused = client.post(
            "/v1/completions", json={"prompt": "hi", "structured_outputs": {"regex": "^$"}}
        )
        assert refused.status_code == 400
        (checker,) = checkers(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        poll(lambda: is_gone(checker))
