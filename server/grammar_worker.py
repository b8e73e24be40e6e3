"""The program that tries out grammars, run as a child process and fed through its stdin socket.

No fuel bounds all that a compiler does with what a client wrote, so it runs here, where the kernel
enforces the limits: a timer of CPU seconds (which a busy machine does not shorten) kills a
compilation that takes too long, RLIMIT_AS stops one that wants too much memory. It steps back
behind the engine for the processor. The other end is grammar_process.py.

The first messages hold the vocabulary and have one answer; every other one holds a grammar and has
an answer. child.py carries them, in JSON but for the tokens.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sys
from array import array
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler
from engine.vocabulary import Vocabulary
from server.child import limit_memory, receive, send
from server.heap import give_back

NICENESS = 5
# Beyond what the process holds with the tables of its vocabulary.
MEMORY_LIMIT_BYTES = 256 << 20
# What one grammar may leave behind: the core will hold as much.
MAX_GROWTH_BYTES = 32 << 20
# What is only found out on the way: rows of too many items, masks that cost too much.
WALK_TOKENS = 48


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to us too; we end with EOF
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    with socket.socket(fileno=0) as channel:
        ids, lengths, tokens = (receive(channel) for _ in range(3))
        if ids is not None and lengths is not None and tokens is not None:
            serve(channel, _vocabulary(json.loads(ids), lengths, tokens))


def serve(channel: socket.socket, vocabulary: Vocabulary) -> None:
    """Answer grammars until the other end closes."""
    compiler = GrammarCompiler(vocabulary, max_cache_bytes=0)
    compiler.prepare()
    give_back()
    os.nice(NICENESS)  # the tables are a client's wait, and the same work each time
    if sys.platform == "linux":
        limit_memory(_pages(0) + MEMORY_LIMIT_BYTES)
    _say(channel, {})
    while (message := receive(channel)) is not None:
        request = json.loads(message)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = _try_out(compiler, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(channel, answer)


def _say(channel: socket.socket, answer: dict[str, str]) -> None:
    send(channel, json.dumps(answer).encode())


def _vocabulary(ids: dict[str, list[int]], lengths: bytes, text: bytes) -> Vocabulary:
    ends = list(accumulate(array("I", lengths), initial=0))
    tokens = tuple(text[start:end] for start, end in pairwise(ends))
    return Vocabulary(tokens, tuple(ids["special_ids"]), tuple(ids["eos_token_ids"]))


def _pages(column: int) -> int:
    """Bytes of address space (0) or of memory (1) of this process."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


def _try_out(compiler: GrammarCompiler, request: dict[str, Any]) -> dict[str, str]:
    """{} for a grammar that serves, else {"error"}: one line, that names a part if one is bad."""
    before = _pages(1)
    try:
        _walk(compiler, request["spec"].encode())
    except GrammarError as error:
        return {"error": _blame(compiler, request["parts"]) or str(error)}
    except MemoryError:
        return {"error": "it needs too much memory", "is_spent": "yes"}
    if _pages(1) - before > MAX_GROWTH_BYTES:
        return {"error": "it needs too much memory", "is_spent": "yes"}
    return {}


def _blame(compiler: GrammarCompiler, parts: list[list[str]]) -> str:
    for label, spec in parts:
        try:
            _walk(compiler, spec.encode())
        except GrammarError as error:
            return f"{label}: {error}"
    return ""


def _walk(compiler: GrammarCompiler, spec: bytes) -> None:
    """Some way into the grammar, the same one each time. Raises GrammarError."""
    draw = random.Random(1)
    state = compiler.start(spec)
    for _ in range(WALK_TOKENS):
        if state.ended:
            break
        state.accept([int(draw.choice(np.flatnonzero(state.allowed())))])
