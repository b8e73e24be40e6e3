"""The three settings of a server, frozen and parsed once: from flags, environment or a file.

Owns every flag of `paceline serve`, its words and its checks. Knows neither models nor sockets:
whether a path exists or a budget suffices is for those who use the values.

A flag `--max-running` is also the variable PACELINE_MAX_RUNNING and the key `max_running` of a
TOML file given as --config; the command line wins over the environment, that over the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scheduler.limits import SchedulerLimits


class ConfigError(ValueError):
    """One line that names the flag, variable or key that is wrong."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve. The three length limits are in tokens; None is the model's own limit."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    strict_requests: bool = False
    data_dir: str = ""
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 64 << 10
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    keepalive_seconds: float = 15.0
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    ttft_limit_seconds: float = 1.0
    tpot_limit_seconds: float = 0.1
    timelines: int = 1024
    log_level: str = "info"
    log_format: str = "auto"
    log_prompts: bool = False
    otel: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to build. `model` "" is the embedded default; `kv_memory` is in bytes, None is auto."""

    model: str = ""
    served_model_name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    kv_memory: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    cpu_kernels: str = "auto"
    cpu_quantize: str = "none"
    threads: int | None = None
    depth: int = 0
    policy: str = "fcfs"
    profile_steps: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything `paceline serve` was told."""

    server: ServerConfig
    engine: EngineConfig
    limits: SchedulerLimits


# The watermark is chosen by the core, which knows the pool.
DEFAULT_LIMITS = SchedulerLimits(
    max_step_tokens=512, max_waiting=1024, max_running=64, watermark_blocks=0
)

# --- values ---------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `500MB`, `1.5g` or `4096`: powers of 1024 with an i, of 1000 without."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower().removesuffix("b") if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 2GiB or 500MB")
    size = int(float(match[1]) * _UNITS[unit])
    if size <= 0:
        raise ValueError("a size must be above 0")
    return size


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


def _key(text: str) -> str:
    key = _word(text)
    if not key.isascii() or " " in key:
        raise ValueError("a key is ASCII without spaces")
    return key


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
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PACELINE_" + self.name.upper()


_BILLION = 10**9
GROUPS: dict[str, tuple[Option, ...]] = {
    "Model": (
        Option("model", _word, "directory, .gguf file or hub name", "MODEL"),
        Option("served_model_name", _word, "name that clients use; default: the file's", "NAME"),
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
            "native C++ kernels or the torch reference",
            "WHICH",
        ),
        Option(
            "cpu_quantize",
            _choice("none", "int8"),
            "int8 rounds float weights to 8 bits for the native kernels",
            "FORM",
        ),
        Option("threads", _whole(1, 1024), "CPU threads of the engine; default: one a core"),
    ),
    "Chat": (
        Option(
            "tool_parser",
            _choice("auto", "hermes", "smollm", "mistral", "llama"),
            "how the model writes tool calls; auto: as its chat template shows them",
            "FORMAT",
        ),
        Option(
            "reasoning_parser",
            _choice("auto", "think", "none"),
            "think: <think> marks reasoning; auto: if the chat template has it",
            "FORMAT",
        ),
    ),
    "Limits of a request, in tokens": (
        Option("max_model_len", _whole(1, _BILLION), "input and output; default: the model's"),
        Option("max_input_tokens", _whole(1, _BILLION), "longest prompt"),
        Option("max_output_tokens", _whole(1, _BILLION), "longest answer"),
    ),
    "Memory and scheduling": (
        Option(
            "kv_memory", parse_size, "memory of the KV cache; default: from free memory", "SIZE"
        ),
        Option("block_size", _whole(1, 1024), "tokens of one KV block"),
        Option("max_running", _whole(1, 65536), "requests in the running batch"),
        Option("max_waiting", _whole(0, 10**6), "requests that may wait; more get 429"),
        Option("max_step_tokens", _whole(1, 10**6), "tokens of one step, prefill and decode"),
        Option(
            "policy", _choice("fcfs", "priority"), "order of the waiting: fcfs or priority", "P"
        ),
        Option("max_chunk_tokens", _whole(1, 10**6), "prefill of one request in one step"),
        Option("prefix_caching", _yes_or_no, "reuse the KV of equal prefixes"),
        Option("depth", _whole(0, 1), "1 plans the next step while one runs"),
    ),
    "HTTP": (
        Option("host", _word, "address to listen on", "HOST"),
        Option("port", _whole(0, 65535), "port to listen on; 0 takes a free one"),
        Option("api_key", _key, "a key that clients must send; may be repeated", "KEY", many=True),
        Option("api_key_file", _word, "file with one key a line", "FILE"),
        Option("open_metrics", _yes_or_no, "let /metrics be read without a key"),
        Option("cors_origin", _word, "allow this browser origin; repeatable", "ORIGIN", many=True),
        Option("data_dir", _word, "folder for files and batches; without it there are none", "DIR"),
        Option("strict_requests", _yes_or_no, "refuse unknown fields of requests"),
        Option("max_body_bytes", parse_size, "largest request body", "SIZE"),
        Option("max_header_bytes", parse_size, "largest request head", "SIZE"),
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
        Option("log_level", _choice("debug", "info", "warning", "error"), "what to log", "LEVEL"),
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
OTEL_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_TOGGLES = (
    *("prefix_caching", "open_metrics", "log_prompts", "profile_steps", "strict_requests"),
    "otel",
)


def _defaults() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for default in (ServerConfig(), EngineConfig(), DEFAULT_LIMITS):
        found |= {field.name: getattr(default, field.name) for field in fields(default)}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag in its group. Parsed values stay text until `read_settings`."""
    defaults = _defaults()
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve; see below")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; flags win over it")
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            default = defaults.get(option.name)
            words = option.help + ("" if default in (None, "", ()) else f" (default: {default})")
            if option.name == "model":
                continue
            if option.name in _TOGGLES:
                group.add_argument(
                    option.flag, action=argparse.BooleanOptionalAction, default=None, help=words
                )
            else:
                group.add_argument(
                    option.flag,
                    metavar=option.metavar,
                    help=words,
                    action="append" if option.many else "store",
                )


# --- reading --------------------------------------------------------------------------------------


def _convert(option: Option, value: object, where: str) -> Any:
    if option.many:
        entries = value if isinstance(value, list) else [value]
        return tuple(_convert_one(option, entry, where) for entry in entries)
    return _convert_one(option, value, where)


def _convert_one(option: Option, value: object, where: str) -> Any:
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{where}: {type(value).__name__} is not a value for it")
    try:
        return option.parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_file(path: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    unknown = sorted(set(content) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"--config {path}: unknown key {unknown[0]!r}")
    return {
        name: _convert(OPTIONS[name], value, f"--config {path}: {name}")
        for name, value in content.items()
    }


# A Kubernetes service named paceline puts such variables into each pod of its namespace.
_SERVICE_LINK = re.compile(r"PACELINE(_\w+)?_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP)\w*)?)")


# Read by engine/kernels/cpu/library.py, for tests of an instruction set.
_ELSEWHERE = ("PACELINE_CPU_TIER",)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    variables = {option.variable: option for option in OPTIONS.values()}
    found: dict[str, Any] = {}
    for variable, value in sorted(environment.items()):
        if not variable.startswith("PACELINE_"):
            continue
        if _SERVICE_LINK.fullmatch(variable) and (
            variable not in variables or value.startswith(("tcp://", "udp://"))
        ):
            continue
        if variable in _ELSEWHERE:
            continue
        if variable not in variables:
            raise ConfigError(f"{variable}: there is no such setting")
        option = variables[variable]
        many = value.replace(",", " ").split() if option.many else value
        found[option.name] = _convert(option, many, variable)
    return found


def _read_keys(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        keys = tuple(_key(line) for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path}: there is no key in it")
    return keys


def read_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """The settings from parsed flags, variables and the file. Raises ConfigError."""
    values = _read_file(arguments.config) if arguments.config else {}
    values |= _read_environment(environment)
    for option in OPTIONS.values():
        given = getattr(arguments, option.name)
        if given is not None:
            values[option.name] = _convert(option, given, option.flag)
    keys = values.pop("api_key", ())
    if "api_key_file" in values:
        keys += _read_keys(values.pop("api_key_file"))
    values |= {"api_keys": keys, "cors_origins": values.pop("cors_origin", ())}
    values = _defaults() | values
    values["max_step_seconds"] = values["tpot_limit_seconds"]  # steps are paced to it
    settings = Settings(
        ServerConfig(**_pick(ServerConfig, values)),
        EngineConfig(**_pick(EngineConfig, values)),
        SchedulerLimits(**_pick(SchedulerLimits, values)),
    )
    _check(settings)
    return settings


def _pick(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(cls)}


def _check(settings: Settings) -> None:
    if settings.server.otel and not all(map(_is_installed, OTEL_PACKAGES)):
        raise ConfigError("--otel: its packages are missing: pip install 'paceline[otel]'")
    total = settings.engine.max_model_len
    for flag, part in (
        ("--max-input-tokens", settings.server.max_input_tokens),
        ("--max-output-tokens", settings.server.max_output_tokens),
    ):
        if total is not None and part is not None and part > total:
            raise ConfigError(f"{flag}: {part} is above --max-model-len {total}")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it is in
        return False


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """For tests and embedding: the settings of these flags. Raises ConfigError or SystemExit."""
    parser = argparse.ArgumentParser(prog="paceline serve")
    add_arguments(parser)
    return read_settings(parser.parse_args(argv), environment)
