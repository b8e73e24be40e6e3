"""`paceline serve`: the life of a server, from the bound port to the last process gone.

Owns the order of start and stop. The port answers before the model is loaded, and at a stop the
running streams come first. Everything else is done by the parts that it connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from engine.default_model import resolve_model
from engine.errors import ModelFileError
from server.app import create_app
from server.banner import LoadProgress, ServerConsole, banner_console, print_banner, url_of
from server.config import ConfigError, Settings
from server.core_client import CoreClient
from server.early_core import EarlyCore, Spawn, spawn_core
from server.grammar_checks import GrammarChecks
from server.heap import give_back
from server.http_limits import limited
from server.logs import configure_logging
from server.process_watch import raise_descriptor_limit
from server.release import version
from server.supervisor import CoreGaveUp, Supervisor
from server.tokenizer import Tokenizer, load_tokenizer
from server.wire import CoreInfo, Start

log = logging.getLogger("paceline")

# After the drain: time for the last events to reach clients that read, and for uvicorn to close.
_FLUSH_SECONDS = 0.5
_CLOSE_SECONDS = 1
_FEWEST_DESCRIPTORS = 64


class PortError(Exception):
    """The address cannot be listened on; one line for people."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: who stops, and when, is decided here.

    At the end it would cancel the tasks of clients that do not read, or send, and log each as an
    error. Here their connections are cut, which every task takes for a hang-up.
    """

    patience_seconds: float = _CLOSE_SECONDS

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(self.patience_seconds, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def serve(settings: Settings, early: EarlyCore | None = None) -> int:
    """Serves until it is told to stop; the exit code. Prints one line for what people cause."""
    try:
        return _serve(settings, early)
    except (ConfigError, ModelFileError, CoreGaveUp, PortError) as error:
        console = ServerConsole(stderr=True)
        with contextlib.suppress(OSError):
            console.print(f"paceline: {error}", markup=False, highlight=False, soft_wrap=True)
        if isinstance(error, CoreGaveUp):
            return error.exit_code
        return 2 if isinstance(error, ConfigError | ModelFileError) else 1


def _serve(settings: Settings, early: EarlyCore | None) -> int:
    if 0 <= (descriptors := raise_descriptor_limit()) < _FEWEST_DESCRIPTORS:  # -1: unlimited
        fewest = f"a server needs {_FEWEST_DESCRIPTORS} at least"
        raise ConfigError(f"ulimit -n {descriptors}: {fewest}, and one for each connection")
    check_threads(settings.engine.threads)
    path = resolve_model(settings.engine.model or None)
    if not str(path).isprintable() and _is_no_text(str(path)):
        raise ModelFileError(f"{path!a}: not a name in the encoding of this locale (LC_ALL)")
    name = settings.engine.served_model_name or model_name(settings.engine.model, path)
    engine = replace(settings.engine, model=str(path), served_model_name=name)
    with bind(settings.server.host, settings.server.port) as listener:
        style = (settings.server.log_level, settings.server.log_format)
        configure_logging(*style)
        spawn = partial(spawn_core, log=style)
        tokenizer = load_tokenizer(path)
        return live(replace(settings, engine=engine), listener, tokenizer, spawn, early)


def live(
    settings: Settings,
    listener: socket.socket,
    tokenizer: Tokenizer,
    spawn: Spawn = spawn_core,
    early: EarlyCore | None = None,
) -> int:
    """Serves on `listener`, which it closes; the exit code. Raises CoreGaveUp."""

    async def run() -> int:
        return await ServerLife(settings, listener, tokenizer, spawn, early).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def check_threads(wanted: int | None) -> None:
    """More would only wait for each other. Raises ConfigError."""
    own = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if own else os.cpu_count() or 1
    if wanted is not None and wanted > cpus:
        raise ConfigError(f"--threads {wanted}: this process may use {cpus} CPUs")


def _is_no_text(path: str) -> bool:
    """Bytes of a file name that are no characters here come as lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return True
    return False


def model_name(typed: str, path: Path) -> str:
    """What clients call it: the hub name, the directory, or the .gguf file without its type."""
    if path.suffix == ".gguf":
        return re.sub(r"[.-](I?Q\d\w*|BF16|F16|F32)$", "", path.stem, flags=re.IGNORECASE)
    return typed if typed and not Path(typed).expanduser().exists() else path.resolve().name


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: whoever connects waits for the server. Raises PortError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise PortError(f"cannot listen on {host}:{port}: {reason} (--host, --port)") from None
    return listener


def _facts(info: CoreInfo, url: str) -> dict[str, object]:
    """Of the banner, for the log."""
    return {
        "version": version(),
        "model": info.model_name,
        "url": url,
        "weights": info.dtype,
        "device": info.device,
        "kernels": info.kernels,
        "kv_tokens": info.capacity.num_blocks * info.capacity.block_size,
        "max_model_len": info.max_model_len,
        "load_seconds": round(info.load_seconds, 3),
    }


class ServerLife:
    """One run of the server around one event loop."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        tokenizer: Tokenizer,
        spawn: Spawn = spawn_core,
        early: EarlyCore | None = None,
    ) -> None:
        self._config = settings.server
        self._listener = listener
        self._tokenizer = tokenizer
        self._client = CoreClient()
        self._grammars = GrammarChecks(tokenizer)
        start = Start(
            settings.engine,
            settings.limits,
            tokenizer.vocab_size,
            tuple(sorted(tokenizer.eos_token_ids)),
            tokenizer.all_token_bytes(),
            tuple(sorted(tokenizer.special_ids)),
        )
        self._supervisor = Supervisor(self._client, start, spawn, early)
        self._stop_wanted = asyncio.Event()
        self._force_wanted = asyncio.Event()

    async def run(self) -> int:
        """Until a signal, then 0. Raises CoreGaveUp."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        progress = LoadProgress(ServerConsole(stderr=True))
        core = asyncio.create_task(self._supervisor.run())
        try:
            with progress as show:
                self._client.on_loading = show
                self._client.on_ready = lambda info: self._on_ready(progress, info)
                await self._serve_until_the_end(core)
        finally:
            await self._supervisor.stop()
            # Its error was raised above.
            await asyncio.gather(core, return_exceptions=True)
        log.info("stopped")
        return 0

    def _on_signal(self) -> None:
        if self._stop_wanted.is_set():
            self._force_wanted.set()
        else:
            log.info(
                "stopping: %d unfinished sequences have %g s",
                self._client.num_unfinished,
                self._config.drain_seconds,
            )
            self._client.drain()
            self._stop_wanted.set()

    def _on_ready(self, progress: LoadProgress, info: CoreInfo) -> None:
        # What is loaded stays: a collector that walks it holds up every stream.
        gc.freeze()
        give_back()
        url = url_of(self._config.host, self._listener.getsockname()[1])
        with contextlib.suppress(OSError):  # a full disk must not end what could serve
            progress.close()
            print_banner(banner_console(), info, self._config, url)
        if not progress.on_terminal:
            log.info("ready", extra={"fields": _facts(info, url)})
        self._tell_idle_limits(info)
        # The next core, if this one dies, is a matter for the log.
        self._client.on_loading = lambda _loading: None
        self._client.on_ready = lambda _info: log.warning("the engine is ready again")

    def _tell_idle_limits(self, info: CoreInfo) -> None:
        tokens, running = info.limits.max_step_tokens, info.limits.max_running
        if tokens < running:
            words = "--max-step-tokens %d: of --max-running %d not all get a token in each step"
            log.warning(words, tokens, running)
        for flag, limit in (
            ("--max-input-tokens", self._config.max_input_tokens),
            ("--max-output-tokens", self._config.max_output_tokens),
        ):
            if limit is not None and limit >= info.max_model_len:
                words = "%s %d limits nothing: a request has %d tokens in all"
                log.warning(words, flag, limit, info.max_model_len)

    async def _serve_until_the_end(self, core: asyncio.Task[None]) -> None:
        http = self._http_server()
        log.info("Paceline %s starts on port %d", version(), self._listener.getsockname()[1])
        serving = asyncio.create_task(http.serve([self._listener]))
        stopping = asyncio.create_task(self._stop_wanted.wait())
        try:
            await asyncio.wait({core, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if core.done():
                await core  # raises why
            if self._stop_wanted.is_set():
                await self._drain(core)
        finally:
            stopping.cancel()
            http.should_exit = True
            if self._force_wanted.is_set():
                http.patience_seconds = 0
            await serving

    async def _drain(self, core: asyncio.Task[None]) -> None:
        """Running streams finish, within the limit; then they end with an error event."""
        idle = asyncio.create_task(self._client.wait_until_none_open())
        force = asyncio.create_task(self._force_wanted.wait())
        await asyncio.wait(
            {idle, force, core},
            timeout=self._config.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if left := self._client.num_unfinished:
            why = "told again to stop" if force.done() else "their time is over"
            log.warning("%d unfinished sequences end with an error: %s", left, why)
        self._client.end_all("the server is shutting down")
        await asyncio.wait({idle, force}, timeout=_FLUSH_SECONDS, return_when="FIRST_COMPLETED")
        idle.cancel()
        force.cancel()

    def _http_server(self) -> HttpServer:
        app = create_app(self._client, self._tokenizer, self._config, grammars=self._grammars)
        return HttpServer(
            uvicorn.Config(
                app,
                http=limited(
                    max_header_bytes=self._config.max_header_bytes,
                    count_refusal=app.state.count_refusal,
                ),
                ws="none",
                log_config=None,
                access_log=False,  # ContextMiddleware writes the line of a request
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_SECONDS + 1,
            )
        )
