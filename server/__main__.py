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
from importlib.metadata import version

_SERVE_EPILOG = """\
MODEL is a Hugging Face directory, a .gguf file, or a hub name where there is a network; without
one, the embedded SmolLM2-135M-Instruct is served.

Each flag is also a variable (--max-running is PACELINE_MAX_RUNNING) and a key of the --config
file (max_running = 64). Flags win over variables, variables over the file.

Signals: SIGTERM or Ctrl-C lets running streams finish, for --drain-seconds; a second one stops at
once. Exit codes: 0 stopped, 1 engine or port failed, 2 a wrong setting or model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `paceline ARGV`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        # Its flags are its own, so it parses them itself.
        from bench.__main__ import main as bench_main

        return bench_main(arguments[1:])
    if arguments[:1] == ["simulate"]:
        from planner.__main__ import main as simulate_main

        return simulate_main(arguments[1:])
    parsed = _parser().parse_args(arguments)
    if parsed.command == "chat":
        from server.chat_cli import chat

        return chat(parsed.url, api_key=parsed.api_key, max_tokens=parsed.max_tokens)
    if parsed.command == "trace":
        from server.trace_cli import record

        return record(parsed.url, api_key=parsed.api_key, seconds=parsed.seconds, out=parsed.out)
    return _serve(parsed)


def _parser() -> argparse.ArgumentParser:
    from server.config import add_arguments

    parser = argparse.ArgumentParser(
        prog="paceline", description="An LLM server that keeps a pace it can promise."
    )
    parser.add_argument("--version", action="version", version=f"paceline {version('paceline')}")
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
        "--seconds", type=float, default=10.0, metavar="S", help="how long; 0 is the past minute"
    )
    trace.add_argument("--out", default="trace.json", metavar="FILE", help="default: %(default)s")
    for client in (chat, trace):
        client.add_argument(
            "--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)"
        )
        client.add_argument(
            "--api-key",
            metavar="KEY",
            default=os.environ.get("PACELINE_API_KEY", ""),
            help="default: the variable PACELINE_API_KEY",
        )
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
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
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    from server.early_core import EarlyCore, spawn_core

    plan = json.dumps({"config": asdict(settings.engine), "limits": asdict(settings.limits)})
    with EarlyCore(lambda descriptor: spawn_core(descriptor, plan)) as core:
        from server.serve import serve

        return serve(settings, core)


if __name__ == "__main__":
    sys.exit(main())
