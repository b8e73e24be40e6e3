"""The `paceline` command: serve, chat, trace, bench, simulate.

Owns the top of the command line only. What a subcommand needs is imported when it runs, so that
`--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn
from urllib.parse import urlsplit

from server.keys import secret_of
from server.plain_number import plain_number
from server.release import version

_SERVE_EPILOG = """\
MODEL is a Hugging Face directory, a .gguf file, or a hub name where there is a network; without
one, the embedded SmolLM2-135M-Instruct is served.

Each flag is also a variable (--max-running is PACELINE_MAX_RUNNING, MODEL is PACELINE_MODEL) and a
key of the --config file (max_running = 64). Flags win over variables, variables over the file.

Signals: SIGTERM or Ctrl-C lets running streams finish, for --drain-seconds; a second one stops at
once. Exit codes: 0 stopped, 1 engine or port failed, 2 a wrong setting or model.
"""


INTERRUPTED = 130  # as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `paceline ARGV`."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # what has something to finish, as serve and bench, catches it itself
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        # Its flags are its own, so it parses them itself.
        from bench.__main__ import main as bench_main

        return bench_main(arguments[1:])
    if arguments[:1] == ["simulate"]:
        from planner.__main__ import main as simulate_main

        return simulate_main(arguments[1:])
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest:
        return _fail(_left_over(parsed.command, rest))
    if parsed.command == "chat":
        from server.chat_cli import chat

        return chat(parsed.url, api_key=parsed.api_key, max_tokens=parsed.max_tokens)
    if parsed.command == "trace":
        from server.trace_cli import record

        return record(parsed.url, api_key=parsed.api_key, seconds=parsed.seconds, out=parsed.out)
    return _serve(parsed)


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, not a list of all flags; no flag has a second, shorter name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _url(text: str) -> str:
    """Clients' base addresses end in /v1, which our paths begin with."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_one = is_one and text.isascii() and text.isprintable()
    except ValueError:  # a port above 65535, half of an IPv6 address
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):  # it goes into a header
        raise argparse.ArgumentTypeError("a key is ASCII")
    return text


def _first_key(variable: str) -> str:
    """For the server it is a list, with names: what is set for both must do for both."""
    entries = variable.replace(",", " ").split()
    return secret_of(entries[0]) if entries else ""


def _trace_seconds(text: str) -> float:
    seconds = plain_number(text)
    if seconds is None or not 0 <= seconds <= 120:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 120")
    return seconds


def _at_least_one(text: str) -> int:
    number = plain_number(text)
    if number is None or number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(number)


def _left_over(command: str, rest: Sequence[str]) -> str:
    flag = next((word for word in rest if word.startswith("-")), None)
    if flag is None:
        return f"{command}: {rest[0]!r} is one argument too many"
    if command == "serve":
        from server.flag_hints import unknown_flag

        return unknown_flag(flag)
    return f"{command}: there is no flag {flag.partition('=')[0]} (--help lists all)"


def _fail(message: str) -> int:
    """Of a wrong setting."""
    print(f"paceline: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    from server.config import add_arguments

    parser = _Parser(prog="paceline", description="An LLM server that keeps a pace it can promise.")
    parser.add_argument("--version", action="version", version=f"paceline {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="paceline serve [MODEL] [FLAGS]",
        description="Serve a model over an OpenAI-style HTTP API.",
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(serve)
    chat = commands.add_parser("chat", help="talk to a running server in this terminal")
    trace = commands.add_parser("trace", help="record a running server into a file for Perfetto")
    trace.add_argument(
        "--seconds",
        type=_trace_seconds,
        default=10.0,
        metavar="S",
        help="how long, up to 120; 0 is the past minute",
    )
    trace.add_argument("--out", default="trace.json", metavar="FILE", help="default: %(default)s")
    for client in (chat, trace):
        client.add_argument(
            "--url",
            type=_url,
            default="http://127.0.0.1:8000",
            help="of the server, with or without /v1 (default: %(default)s)",
        )
        client.add_argument(
            "--api-key",
            type=_key,
            metavar="KEY",
            default=_first_key(os.environ.get("PACELINE_API_KEY", "")),
            help="default: the first of the variable PACELINE_API_KEY",
        )
    chat.add_argument("--max-tokens", type=_at_least_one, metavar="N", help="longest answer")
    commands.add_parser(
        "bench", help="drive any OpenAI-style server and report its latencies", add_help=False
    )
    commands.add_parser(
        "simulate", help="replay a trace through the scheduler on a cost model", add_help=False
    )
    return parser


def _open_standard_streams() -> None:
    """Where one was closed (`2>&-`), the next socket would take its number, and get the log."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _serve(parsed: argparse.Namespace) -> int:
    from server.config import ConfigError, read_settings

    _open_standard_streams()
    try:
        settings = read_settings(parsed, os.environ)
    except ConfigError as error:
        return _fail(str(error))
    from server.early_core import EarlyCore, spawn_core

    log = (settings.server.log_level, settings.server.log_format)
    plan = json.dumps({"config": asdict(settings.engine), "limits": asdict(settings.limits)})
    with EarlyCore(lambda descriptor: spawn_core(descriptor, plan, log=log)) as core:
        from server.serve import serve

        return serve(settings, core)


if __name__ == "__main__":
    sys.exit(main())
