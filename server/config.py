"""The three settings of a server, frozen and parsed once: from flags, environment or a file.

Owns where a value comes from and how values must agree; the flags themselves are in options.py.
Knows neither models nor sockets: whether a path exists or a budget suffices is for those who use
the values.

A flag `--max-running` is also the variable PACELINE_MAX_RUNNING and the key `max_running` of a
TOML file given as --config; the command line wins over the environment, that over the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scheduler.limits import SchedulerLimits
from server.flag_hints import known_as
from server.keys import tenants
from server.options import GROUPS, OPTIONS, TOGGLES, Option, key


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
    redis_url: str = ""
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 64 << 10
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_queue_seconds: float | None = None
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
    kv_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    cpu_kernels: str = "auto"
    cpu_quantize: str = "none"
    gpu_quantize: str = "none"
    threads: int | None = None
    depth: int | None = None
    deterministic: bool = False
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

OTEL_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def _defaults() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for default in (ServerConfig(), EngineConfig(), DEFAULT_LIMITS):
        found |= {field.name: getattr(default, field.name) for field in fields(default)}
    return found | {"policy": None}  # it depends on the keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag in its group. Parsed values stay text until `read_settings`."""
    defaults = _defaults()
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve; see below")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; flags win over it")
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            default = defaults.get(option.name)
            words = option.help + _shown(default)
            if option.name == "model":
                continue  # the argument without a flag
            if option.name in TOGGLES:
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


def _shown(default: object) -> str:
    if default in (None, "", ()):
        return ""
    words = {True: "on", False: "off"}
    return f" (default: {words[default] if isinstance(default, bool) else default})"


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
    except RecursionError:
        raise ConfigError(f"--config {path}: it is nested too deeply") from None
    unknown = sorted(set(content) - set(OPTIONS))
    if unknown:
        ours = known_as(unknown[0])
        hint = f", here it may be {ours}" if ours else ""
        raise ConfigError(f"--config {path}: unknown key {unknown[0]!r}{hint}")
    return {
        name: _convert(OPTIONS[name], value, f"--config {path}: {name}")
        for name, value in content.items()
    }


# A Kubernetes service named paceline puts such variables into each pod of its namespace.
_SERVICE_LINK = re.compile(r"PACELINE(_\w+)?_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP)\w*)?)")


CONFIG_VARIABLE = "PACELINE_CONFIG"  # of --config, which is no key of the file it names

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
        if variable in (CONFIG_VARIABLE, *_ELSEWHERE):
            continue
        if variable not in variables:
            ours = known_as(variable.removeprefix("PACELINE_"))
            hint = f", here it may be {OPTIONS[ours].variable}" if ours else ""
            raise ConfigError(f"{variable}: there is no such setting{hint}")
        option = variables[variable]
        many = value.replace(",", " ").split() if option.many else value
        found[option.name] = _convert(option, many, variable)
    return found


def _read_keys(path: str) -> tuple[str, ...]:
    """One entry a line, whatever is empty or begins with # left out. A key is never shown."""
    keys = []
    try:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                keys.append(key(line))
            except ValueError as error:
                raise ConfigError(f"--api-key-file {path}: line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path}: it is not UTF-8 text") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path}: there is no key in it")
    return tuple(keys)


def read_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """The settings from parsed flags, variables and the file. Raises ConfigError."""
    file = arguments.config or environment.get(CONFIG_VARIABLE)
    values = _read_file(file) if file else {}
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
    values |= _sharing(keys, values["policy"])
    values["max_step_seconds"] = values["tpot_limit_seconds"]  # steps are paced to it
    settings = Settings(
        ServerConfig(**_pick(ServerConfig, values)),
        EngineConfig(**_pick(EngineConfig, values)),
        SchedulerLimits(**_pick(SchedulerLimits, values)),
    )
    _check(settings)
    return settings


def _sharing(keys: Sequence[str], policy: str | None) -> dict[str, Any]:
    """How tenants share the server."""
    try:
        weights = tenants(keys)
    except ValueError as error:
        raise ConfigError(f"--api-key: {error}") from None
    return {
        "policy": policy or ("fair" if len(weights) > 1 else "fcfs"),
        "num_tenants": max(len(weights), 1),
        "weights": tuple((name, weight) for name, weight in weights.items() if weight != 1),
    }


def _pick(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(cls)}


def _check(settings: Settings) -> None:
    if settings.server.otel and not all(map(_is_installed, OTEL_PACKAGES)):
        raise ConfigError("--otel: its packages are missing: pip install 'paceline[otel]'")
    if settings.server.redis_url and not _is_installed("redis"):
        raise ConfigError("--redis-url: its package is missing: pip install 'paceline[redis]'")
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
