"""The `paceline` command as a person meets it: help, one-line errors, the chat."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from planner import __main__ as planner_command
from server import chat_cli
from server.__main__ import main
from server.banner import LoadProgress, ServerConsole, print_banner, url_of
from server.chat_cli import Answer, ChatError, chat, find_model, stream_answer
from server.config import ConfigError, ServerConfig
from server.options import OPTIONS
from server.serve import PortError, bind, check_threads, model_name
from server.wire import Loading
from tests.support.scripted_engine import ScriptedEngine, info_for
from tests.support.scripted_server import ROOT, running_server


def paceline(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_tells_every_flag_and_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS.values():
        assert option.name == "model" or option.flag in text
    for words in ("PACELINE_MAX_RUNNING", "--config", "SIGTERM", "Exit codes", "embedded SmolLM2"):
        assert words in text


def test_the_command_names_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("serve", "chat", "bench"))
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("paceline ")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "--concurrency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", ""), (b"GGUF", ""), (b"not a model at all" * 100, ""), (None, "no such file")],
)
def test_a_bad_model_file_is_one_line_and_exit_code_2(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    done = paceline("serve", str(path), "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: ")
    assert done.stderr.count("\n") == 1
    assert "bad.gguf" in done.stderr
    assert reason in done.stderr


def test_a_wrong_setting_is_one_line_and_exit_code_2() -> None:
    done = paceline("serve", PACELINE_PORT="eighty")
    assert done.returncode == 2
    assert done.stderr == "paceline: PACELINE_PORT: 'eighty' is not a whole number\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--bogus"], "--bogus: there is no such flag"),
        (["serve", "--max-run", "3"], "here it may be --max-running"),
        (["serve", "--max-num-seqs", "3"], "here it may be --max-running"),
        (["serve", "-m", "model.gguf"], "serve MODEL"),
        (["serve", "one", "two"], "'two' is one argument too many"),
        (["serve", "--port"], "--port: expected one argument"),
        (["serv"], "invalid choice: 'serv'"),
        ([], "required: COMMAND"),
        (["chat", "--seed", "1"], "there is no flag --seed"),
        (["chat", "--max-tokens", "0"], "not a whole number from 1"),
        (["chat", "--url", "localhost"], "not an address"),
        (["trace", "--url", "http://127.0.0.1:70000"], "not an address"),
        (["chat", "--url", "http://\udcff"], "not an address"),
        (["trace", "--seconds", "nan"], "not a number from 0 to 120"),
        (["chat", "--api-key", "clé"], "a key is ASCII"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:  # from argparse
        code = end.code if isinstance(end.code, int) else -1
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_more_threads_than_cpus_are_refused() -> None:
    """They would spin for each other, and a model load that takes a second takes minutes."""
    check_threads(None)
    check_threads(1)
    with pytest.raises(ConfigError, match="--threads 1000: this process may use"):
        check_threads(1000)


def test_too_few_descriptors_are_one_line() -> None:
    limited = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (12, 12)); "
    program = limited + "from server.__main__ import main; sys.exit(main(['serve', '--port', '0']))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "ulimit -n 12: a server needs 64 at least" in done.stderr


def test_an_interrupt_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner_command, "main", interrupted)
    assert main(["simulate", "trace.csv"]) == 130


def test_a_data_folder_that_can_not_be_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = paceline("serve", "--port", "0", "--data-dir", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: --data-dir ")
    assert done.stderr.count("\n") == 1


def test_a_model_whose_name_is_no_text_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Of a file name in another encoding only bytes are known."""
    path = os.fsencode(tmp_path) + b"/\xff.gguf"
    Path(os.fsdecode(path)).write_bytes(b"GGUF")
    done = paceline("serve", os.fsdecode(path), "--port", "0")
    assert done.returncode == 2
    assert "not a name" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_that_is_no_file_is_said_to_be_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    done = paceline("serve", str(tmp_path / "pipe.gguf"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "neither a directory nor a file" in done.stderr


def test_a_closed_stderr_is_no_ones_socket() -> None:
    """The first socket would become number 2, and the log would be written into it."""
    program = (
        "import os, socket, sys; os.close(2); sys.stderr = None; "
        "from server.__main__ import _open_standard_streams as open_them; open_them(); "
        "assert socket.socket().fileno() > 2; print('lost', file=sys.stderr); print('found')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "found\n")


def test_a_port_in_use_is_one_line() -> None:
    with (
        bind("127.0.0.1", 0) as listener,
        pytest.raises(PortError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already"),
    ):
        bind("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(PortError, match="nowhere"):
        bind("nowhere.invalid", 0)


@pytest.mark.parametrize(
    ("typed", "path", "name"),
    [
        ("", "/x/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("m.gguf", "m-q4_k_m.gguf", "m"),
        ("m.gguf", "llama-3.1-8b.gguf", "llama-3.1-8b"),
        ("Qwen/Qwen3-0.6B", "/cache/snapshots/abc123", "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_name_of_a_model_is_what_a_person_would_call_it(
    typed: str, path: str, name: str
) -> None:
    assert model_name(typed, Path(path)) == name


def test_the_name_of_a_directory_is_its_own(tmp_path: Path) -> None:
    assert model_name(str(tmp_path), tmp_path) == tmp_path.name


# --- what is printed ------------------------------------------------------------------------------


def test_the_banner_has_all_a_person_needs_to_begin() -> None:
    out = io.StringIO()
    config = ServerConfig(max_output_tokens=77)
    print_banner(Console(file=out, width=200), info_for(ScriptedEngine()), config, "http://h:1")
    text = out.getvalue()
    for words in ("scripted", "http://h:1", "4096 tokens", "2048", "77 out", "curl http://h:1/v1"):
        assert words in text
    assert "anyone" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    out.truncate(0)
    config = ServerConfig(api_keys=("secret",))
    print_banner(Console(file=out, width=200), info_for(ScriptedEngine()), config, "http://h:1")
    assert "secret" not in out.getvalue()
    assert "Authorization" in out.getvalue()
    config = ServerConfig(api_keys=("a:1", "a:2", "ops+admin:3"), max_input_tokens=10**6)
    print_banner(Console(file=out, width=200), info_for(ScriptedEngine()), config, "http://h:1")
    assert "3 of 2 tenants, 1 of operators" in out.getvalue()
    assert "1000000" not in out.getvalue()  # more than the whole is no limit


def test_progress_without_a_terminal_is_a_few_lines_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with LoadProgress(Console(file=io.StringIO(), width=80)) as show:
        for done in range(101):
            show(Loading("loading weights", done, 100))
        show(Loading("warming up"))
    assert caplog.messages == [
        *(f"loading weights {percent} %" for percent in (0, 25, 50, 75, 100)),
        "warming up",
    ]


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    out = io.StringIO()
    with LoadProgress(Console(file=out, force_terminal=True, width=80)) as show:
        show(Loading("loading weights", 50, 100))
        show(Loading("warming up"))
    assert "warming up" in out.getvalue()
    assert "\n\n" not in out.getvalue()


class _NobodyReads(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError

    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_reader_of_the_log_who_leaves_ends_no_server() -> None:
    """`paceline serve 2>&1 | head -1`: rich answers a broken pipe with the end of the process."""
    console = ServerConsole(file=_NobodyReads())
    print_banner(console, info_for(ScriptedEngine()), ServerConfig(), "http://h:1")


def test_the_url_is_one_that_works_from_here() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == "http://[::1]:80"
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("example.org", 80) == "http://example.org:80"


# --- chat -----------------------------------------------------------------------------------------


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert chat(url, api_key="", max_tokens=None) == 1
    assert "paceline serve" in capsys.readouterr().out


def test_chat_streams_measures_and_remembers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server("ready", "--api-key", "k") as (_, client):
        url = str(client.base_url)
        with httpx.Client(base_url=url) as stranger, pytest.raises(ChatError, match="401"):
            find_model(stranger)
        with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}) as known:
            answer = Answer()
            pieces: list[str] = []
            messages = [{"role": "user", "content": "hi"}]
            body = {"model": find_model(known), "messages": messages, "max_tokens": 30}
            stream_answer(known, body, answer, pieces.append)
            assert "".join(pieces) == answer.text != ""
            assert answer.num_tokens == 30
            assert 0 < answer.first_seconds < answer.total_seconds
            assert "30 tokens, first after" in answer.summary()
            assert "tokens/s" in answer.summary()
            with pytest.raises(ChatError, match="400"):
                stream_answer(known, {**body, "max_tokens": -1}, Answer(), pieces.append)

        asked: list[int] = []

        def remember(
            client: httpx.Client, body: dict[str, object], answer: Answer, write: object
        ) -> None:
            assert isinstance(body["messages"], list)
            asked.append(len(body["messages"]))
            stream_answer(client, body, answer, write)  # type: ignore[arg-type]

        lines = iter(["one", "", "two", "/new", "three", "/quit"])
        monkeypatch.setattr(chat_cli, "stream_answer", remember)
        monkeypatch.setattr("builtins.input", lambda *_: next(lines))
        assert chat(url, api_key="k", max_tokens=5) == 0
        assert asked == [1, 3, 1]
        assert capsys.readouterr().out.count("5 tokens, first after") == 3


def test_what_a_model_says_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(_client: object, _body: object, answer: Answer, write: Callable[[str], None]) -> None:
        answer.text = "x"
        write("a\x1b[2Jb\x9b1m\r\n\tzw\u200dj é")

    monkeypatch.setattr(chat_cli, "stream_answer", say)
    screen = io.StringIO()
    with httpx.Client() as client:
        chat_cli._ask(Console(file=screen), client, {})
    assert screen.getvalue().startswith("a\ufffd[2Jb\ufffd1m\ufffd\n\tzw\u200dj é")
