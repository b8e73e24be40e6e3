"""Every flag of `paceline serve`: its name, how to read it and what to tell people.

Owns words and ranges only. Where a value comes from, and what it is for, is server/config.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.keys import parse_entry
from server.tools.formats import TOOL_PARSERS

# --- values ---------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\\\s?#@,]+")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str, least: int = 1) -> int:
    """Bytes of `2GiB`, `500MB`, `1.5g` or `4096`: powers of 1024 with an i, of 1000 without."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower().removesuffix("b") if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 2GiB or 500MB")
    size = int(float(match[1]) * _UNITS[unit])
    if size < least:
        raise ValueError(f"{text.strip()} is a size below {least} bytes")
    return size


def _room(text: str) -> int:
    """For what must hold a request at least."""
    return parse_size(text, 1024)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"{value} is not between {low} and {high}")
        return value

    return parse


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number of seconds") from None
        if not low <= value <= high:
            raise ValueError(f"{text} is not between {low:g} and {high:g} seconds")
        return value

    return parse


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    if any(ord(char) < 32 for char in text):
        raise ValueError("it holds a control character")
    return text.strip()


def _text(text: str) -> str:
    """A word for others' eyes. A file may be named in bytes that are no text here, this may not."""
    word = _word(text)
    if not word.isprintable():
        raise ValueError("it is no text in the encoding of this locale (LC_ALL)")
    if len(word) > 1024:  # as much as a request may name
        raise ValueError("it is longer than 1024 characters")
    return word


def key(text: str) -> str:
    word = _word(text)
    if not word.isascii() or " " in word:
        raise ValueError("a key is ASCII without spaces")
    parse_entry(word)
    return word


def _origin(text: str) -> str:
    word = _text(text).lower()  # as browsers write it
    if word not in ("*", "null") and not _ORIGIN.fullmatch(word):
        raise ValueError(f"{text!r} is not an origin such as https://chat.example, or *")
    return word


def _host(text: str) -> str:
    """An IPv6 address may stand in brackets, as in a URL."""
    word = _text(text)
    return word[1:-1] if word.startswith("[") and word.endswith("]") else word


def _redis_url(text: str) -> str:
    if not text.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("it begins with redis://, rediss:// or unix://")
    return _word(text)


def _yes_or_no(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.lower()]


# --- the options ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its name in all three places, how to read it, and what to tell people."""

    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str = "N"
    many: bool = False

    @property
    def flag(self) -> str:
        """As it is written on the command line; the model is the one that stands without a flag."""
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PACELINE_" + self.name.upper()


_BILLION = 10**9
GROUPS: dict[str, tuple[Option, ...]] = {
    "Model": (
        Option("model", _word, "directory, .gguf file or hub name", "MODEL"),
        Option("served_model_name", _text, "name that clients use; default: the file's", "NAME"),
        Option("device", _choice("auto", "cpu", "cuda"), "auto, cpu or cuda", "DEVICE"),
        Option(
            "dtype",
            _choice("auto", "float32", "bfloat16", "float16"),
            "auto, float32, bfloat16 or float16",
            "TYPE",
        ),
        Option(
            "cpu_kernels",
            _choice("auto", "native", "reference"),
            "native: the C++ kernels; reference: torch; auto: native where they can be",
            "WHICH",
        ),
        Option(
            "cpu_quantize",
            _choice("none", "int8"),
            "int8 rounds float weights to 8 bits for the native kernels",
            "FORM",
        ),
        Option(
            "gpu_quantize",
            _choice("none", "int8", "int4", "fp8"),
            "keep the weights of a GPU's products in int8, int4 (groups of up to 128) or fp8",
            "FORM",
        ),
        Option("threads", _whole(1, 1024), "CPU threads of the engine; default: one a core"),
    ),
    "Chat": (
        Option(
            "tool_parser",
            _choice(*TOOL_PARSERS),
            f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}; "
            "auto: as its chat template shows them",
            "FORMAT",
        ),
        Option(
            "reasoning_parser",
            _choice("auto", "think", "none"),
            "think: <think> marks reasoning; none; auto: if the chat template has it",
            "FORMAT",
        ),
    ),
    "Limits of a request, in tokens": (
        Option("max_model_len", _whole(2, _BILLION), "input and output; default: the model's"),
        Option("max_input_tokens", _whole(1, _BILLION), "longest prompt"),
        Option("max_output_tokens", _whole(1, _BILLION), "longest answer"),
    ),
    "Memory and scheduling": (
        Option(
            "kv_memory", parse_size, "memory of the KV cache; default: from free memory", "SIZE"
        ),
        Option(
            "kv_dtype",
            _choice("auto", "int8", "int16", "fp8"),
            "integers of the native CPU kernels, or fp8 on a GPU; auto: as --dtype, on those "
            "kernels int8 with quantised weights and else int16, unless --dtype is float32",
            "TYPE",
        ),
        Option(
            "block_size",
            _whole(1, 1024),
            "tokens of one KV block; a multiple of 16 for the native CPU kernels",
        ),
        Option("max_running", _whole(1, 65536), "requests in the running batch"),
        Option("max_waiting", _whole(0, 10**6), "requests that may wait; more get 429"),
        Option(
            "max_queue_seconds",
            _seconds(0.1, 86_400),
            "longest wait to be begun; what would wait longer gets 429, what did 503; default: any",
            "S",
        ),
        Option("max_step_tokens", _whole(1, 10**6), "tokens of one step, prefill and decode"),
        Option(
            "policy",
            _choice("fair", "fcfs", "priority"),
            "order of the waiting: fair (each tenant its share of the work), fcfs or priority; "
            "default: fair if the keys are of several tenants, else fcfs",
            "P",
        ),
        Option("max_chunk_tokens", _whole(1, 10**6), "prefill of one request in one step"),
        Option("prefix_caching", _yes_or_no, "reuse the KV of equal prefixes"),
        Option(
            "depth",
            _whole(0, 1),
            "1 plans the next step while one runs; default: 1 on a GPU, else 0",
        ),
        Option(
            "deterministic",
            _yes_or_no,
            "the same bits alone and in any batch on a GPU too, at some cost; a CPU always does",
        ),
    ),
    "HTTP": (
        Option("host", _host, "address to listen on", "HOST"),
        Option("port", _whole(0, 65535), "port to listen on; 0 takes a free one"),
        Option("api_key", key, "a key that clients must send; repeatable", "KEY", many=True),
        Option(
            "api_key_file",
            _word,
            "file with KEY, NAME:KEY, NAME+weight=W:KEY or NAME+admin:KEY a line; remarks after #",
            "FILE",
        ),
        Option("open_metrics", _yes_or_no, "let /metrics be read without a key"),
        Option(
            "cors_origin",
            _origin,
            "allow this browser origin (https://chat.example), or * for all; repeatable",
            "ORIGIN",
            many=True,
        ),
        Option("data_dir", _word, "folder for files and batches; without it there are none", "DIR"),
        Option(
            "redis_url",
            _redis_url,
            "keep cached answers and stored responses in this Redis, for all servers on it",
            "URL",
        ),
        Option("strict_requests", _yes_or_no, "refuse unknown fields of requests"),
        Option("max_body_bytes", _room, "largest request body", "SIZE"),
        Option("max_header_bytes", _room, "largest request head", "SIZE"),
        Option("keepalive_seconds", _seconds(0.05, 3600), "silence before an SSE comment", "S"),
        Option("drain_seconds", _seconds(0, 3600), "time for running streams at a stop", "S"),
        Option("stall_seconds", _seconds(0.1, 3600), "silence of a busy engine before 503", "S"),
    ),
    "Observability": (
        Option("ttft_limit_seconds", _seconds(0.001, 3600), "time to first token to stay in", "S"),
        Option(
            "tpot_limit_seconds", _seconds(0.0001, 60), "target of TPOT, which steps keep to", "S"
        ),
        Option("timelines", _whole(0, 10**6), "finished requests to keep timelines of; 0 is none"),
        Option(
            "log_level",
            _choice("debug", "info", "warning", "error"),
            "debug, info, warning or error",
            "LEVEL",
        ),
        Option(
            "log_format",
            _choice("auto", "json", "text"),
            "json, text, or auto: text on a terminal",
            "FORMAT",
        ),
        Option("log_prompts", _yes_or_no, "write prompts into the log"),
        Option("profile_steps", _yes_or_no, "print where the time of steps goes, by kind of step"),
        Option("otel", _yes_or_no, "send OpenTelemetry traces where the OTEL_* variables say"),
    ),
}
OPTIONS: dict[str, Option] = {option.name: option for group in GROUPS.values() for option in group}
TOGGLES = (
    *("prefix_caching", "open_metrics", "log_prompts", "profile_steps", "strict_requests"),
    *("otel", "deterministic"),
)
