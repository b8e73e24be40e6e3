"""The program that renders chat templates, run as a child process and fed through its stdin socket.

A template comes from a model file or a person, and no sandbox bounds its work: nested loops,
huge strings and numbers. So it runs here, where the kernel enforces the limits: a timer of CPU
seconds (which a busy machine does not shorten) kills a render that takes too long, RLIMIT_AS stops
one that wants too much memory. Knows only the standard library, jinja2 and child.py, which carries
the messages, in JSON; the other end is template_process.py.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.child import limit_memory, receive, send

MEMORY_LIMIT_BYTES = 1 << 29  # address space; Python and jinja2 need a tenth of it


class RaisedByTemplate(Exception):
    """The template called raise_exception: the message is meant for the person who asked."""


class OutputTooLong(Exception):
    """The text grew past the limit."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers gives to chat templates, so that they mean the same."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers: jinja2's own escapes HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    """The text of the template; raises OutputTooLong as soon as it has grown too long."""
    parts: list[str] = []
    total = 0
    for part in template.generate(variables):
        total += len(part)
        if total > max_chars:
            raise OutputTooLong
        parts.append(part)
    return "".join(parts)


def answer(action: Callable[[], str]) -> dict[str, str]:
    """{"text"} of the action, or {"error", "kind"} with one line that shows no source."""
    try:
        return {"text": action()}
    except RaisedByTemplate as error:
        return {"kind": "raised", "error": str(error)}
    except SecurityError as error:
        return {"kind": "failed", "error": f"it does what a sandbox forbids: {error}"}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "failed", "error": f"line {error.lineno}: {error.message}"}
    except OutputTooLong:
        return {"kind": "limit", "error": "its text is too long"}
    except MemoryError:
        return {"kind": "limit", "error": "it needs too much memory"}
    except RecursionError:
        return {"kind": "limit", "error": "it recurses too deep"}
    except Exception as error:  # whatever a template does wrong is the template's error
        return {"kind": "failed", "error": str(error) or type(error).__name__}


def serve(channel: socket.socket) -> None:
    """Answer requests until the other end closes.

    {"sources", "seconds"} compiles a set of templates, {"name", "variables", "max_chars",
    "seconds"} renders one of them.
    """
    made = environment()
    compiled: dict[str, jinja2.Template] = {}

    def act(request: dict[str, Any]) -> str:
        if "sources" in request:
            compiled.update({k: made.from_string(v) for k, v in request["sources"].items()})
            return ""
        return render(compiled[request["name"]], request["variables"], request["max_chars"])

    _say(channel, {"text": ""})
    while (message := receive(channel)) is not None:
        request = json.loads(message)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = answer(partial(act, request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(channel, reply)


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    # A template can cut a character of the JSON escapes it is given into a lone surrogate.
    send(channel, json.dumps(message, ensure_ascii=False).encode("utf-8", errors="replace"))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to us too; we end with EOF
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    if sys.platform == "linux":
        limit_memory(MEMORY_LIMIT_BYTES)
    with socket.socket(fileno=0) as channel:
        serve(channel)
