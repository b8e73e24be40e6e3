"""What `paceline serve` shows a person: progress while a model loads, then one screen of facts.

Owns words and layout only. Progress goes to stderr, as a bar on a terminal and into the log
elsewhere; the banner goes to stdout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from server.config import ServerConfig
from server.keys import parse_entry
from server.wire import CoreInfo, Loading

log = logging.getLogger("paceline")


class ServerConsole(Console):
    """A console whose reader may leave, where rich would end a process that can serve."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LoadProgress:
    """Shows Loading messages until it is closed; elsewhere the log has a stage and quarter each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = ("", -1)

    @property
    def on_terminal(self) -> bool:
        return self._console.is_terminal

    def __enter__(self) -> Callable[[Loading], None]:
        if self.on_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self.show

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, loading: Loading) -> None:
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(loading.stage)
            self._bar.update(
                self._task,
                description=loading.stage,
                completed=loading.done,
                total=loading.total or None,
            )
            return
        quarter = 4 * loading.done // loading.total if loading.total else 0
        if (loading.stage, quarter) != self._last:
            self._last = (loading.stage, quarter)
            done = f" {25 * quarter} %" if loading.total else ""
            log.info("%s%s", loading.stage, done)


def banner_console() -> Console:
    """stdout; lines of a log file are not wrapped at a terminal's width."""
    console = ServerConsole()
    return console if console.is_terminal else ServerConsole(width=200)


def url_of(host: str, port: int) -> str:
    """Where a person on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host and "[" not in host else f"http://{host}:{port}"


def print_banner(console: Console, info: CoreInfo, config: ServerConfig, url: str) -> None:
    """Model, memory, limits, and how to ask the first question."""
    facts = _facts(info, config)
    width = max(len(name) for name, _ in facts) + 2
    console.print()
    console.print(f"[bold]Paceline[/] serves {info.model_name} at [bold]{url}[/]", soft_wrap=True)
    for name, value in facts:
        line = Text.assemble((name.ljust(width), "dim"), value)
        console.print(line, highlight=True, soft_wrap=True)
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    console.print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d "
        f'\'{{"model":"{info.model_name}","messages":[{{"role":"user","content":"Hello!"}}]}}\'',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print()


def _facts(info: CoreInfo, config: ServerConfig) -> list[tuple[str, str]]:
    capacity = info.capacity
    tokens = capacity.num_blocks * capacity.block_size
    limits = [f"{info.max_model_len} tokens in all"]
    if info.max_model_len < info.context_length:
        limits[0] += f" (the model's context is {info.context_length})"
    # What is not below the whole is no limit.
    if config.max_input_tokens is not None and config.max_input_tokens < info.max_model_len:
        limits.append(f"{config.max_input_tokens} in")
    if config.max_output_tokens is not None and config.max_output_tokens < info.max_model_len:
        limits.append(f"{config.max_output_tokens} out")
    facts = [
        ("weights", f"{info.dtype} on {info.device}, {info.kernels} kernels"),
        ("loaded in", f"{info.load_seconds:.1f} s"),
        ("KV budget", f"{tokens} tokens ({capacity.num_blocks} blocks of {capacity.block_size})"),
        *(("", note) for note in info.notes),
        ("a request", ", ".join(limits)),
        (
            "batch",
            f"{info.limits.max_running} running, {info.limits.max_waiting} waiting, "
            f"{info.limits.max_step_tokens} tokens a step{_pace(info.limits.max_step_seconds)}",
        ),
    ]
    facts.append(("keys", _keys(config)))
    return facts


def _keys(config: ServerConfig) -> str:
    if not config.api_keys:
        return "none: anyone who reaches the port may ask"
    entries = [parse_entry(key) for key in config.api_keys]
    admins, names = sum(e.is_admin for e in entries), len({e.tenant for e in entries})
    return f"{len(entries)} of {names} tenant{'s' if names > 1 else ''}, {admins} of operators"


def _pace(seconds: float | None) -> str:
    return "" if seconds is None else f", paced to {seconds * 1e3:g} ms where requests decode"
