"""The core behind its socket: slow and silent readers, ends, and the real engine in a child."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from engine.errors import ModelFileError
from engine.kernels.cpu.library import available_tiers
from scheduler.policy import FirstComeFirstServed
from scheduler.types import Finished, FinishReason, Tokens
from server.config import DEFAULT_LIMITS, EngineConfig
from server.core_build import build_core, pack_early
from server.core_channel import CoreInbox
from server.core_client import CoreClient, CoreState
from server.core_process import EXIT_DONE, EXIT_ENGINE, CoreThread, start_core_thread
from server.early_core import spawn_core
from server.supervisor import Supervisor
from server.wire import (
    Commands,
    Failed,
    FrameBuffer,
    FromCore,
    Group,
    Plan,
    Ready,
    Start,
    Step,
    decode_from_core,
    encode,
)
from tests.support.models import save_tiny_model, write_gguf
from tests.support.models import tiny_model as tiny_random_model
from tests.support.scripted_engine import (
    LIMITS,
    VOCAB_SIZE,
    ScriptedEngine,
    info_for,
    request,
    running_core,
)


def start(engine: ScriptedEngine) -> CoreThread:
    core = start_core_thread(engine, LIMITS, FirstComeFirstServed(), info=info_for(engine))
    core.sock.settimeout(10)
    core.sock.sendall(encode(Start(EngineConfig(), LIMITS, VOCAB_SIZE)))
    return core


def read(core: CoreThread, frames: FrameBuffer) -> list[FromCore]:
    data = core.sock.recv(1 << 16)
    return [decode_from_core(body) for body in frames.feed(data)]


def end(core: CoreThread) -> int:
    core.stop()
    core.sock.close()
    (code,) = core.exit_codes
    return code


def wait_for(condition: object, seconds: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_reader_that_stands_still_costs_no_step_and_loses_nothing() -> None:
    """B020 on the inner side: the socket fills, the loop goes on, the rest arrives merged."""
    engine = ScriptedEngine()
    core = start(engine)
    core.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    group = [replace(request("x", max_tokens=1900), id=f"x{i}") for i in range(16)]
    core.sock.sendall(encode(Commands((Group.pack(group),))))
    wait_for(lambda: engine.num_steps >= 1900)
    frames, tokens = FrameBuffer(), {member.id: [] for member in group}
    ends: list[Finished] = []
    num_messages = 0
    while len(ends) < len(group):
        for message in read(core, frames):
            if isinstance(message, Step):
                num_messages += 1
                for event in message.tokens:
                    tokens[event.request_id] += event.token_ids
                ends += message.finished
    assert all(found == [i % 200 for i in range(1900)] for found in tokens.values())
    assert {finished.reason for finished in ends} == {FinishReason.LENGTH}
    assert num_messages < 1900
    assert end(core) == EXIT_DONE


def test_a_drain_ends_the_core_once_it_owes_nothing() -> None:
    core = start(ScriptedEngine())
    core.sock.sendall(encode(Commands((Group.pack([request("a")]),), drain=True)))
    frames, events = FrameBuffer(), []
    while data := core.sock.recv(1 << 16):
        events += [decode_from_core(body) for body in frames.feed(data)]
    assert isinstance(events[0], Ready)
    tokens = [t for step in events[1:] if isinstance(step, Step) for t in step.tokens]
    assert sum((event.token_ids for event in tokens), ()) == tuple(range(8))
    assert end(core) == EXIT_DONE


def test_a_failed_step_says_so_and_ends_the_core_with_an_error() -> None:
    engine = ScriptedEngine()
    engine.fail_step.set()
    core = start(engine)
    core.sock.sendall(encode(Commands((Group.pack([request("a")]),))))
    frames, messages = FrameBuffer(), []
    while data := core.sock.recv(1 << 16):
        messages += [decode_from_core(body) for body in frames.feed(data)]
    ends = [f for step in messages if isinstance(step, Step) for f in step.finished]
    assert [finished.reason for finished in ends] == [FinishReason.ERROR]
    assert isinstance(messages[-1], Failed)
    assert "scripted" in messages[-1].message
    assert end(core) == EXIT_ENGINE


def test_an_idle_core_waits_without_spinning() -> None:
    """B104, the idle side: no CPU while nothing is to be done."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = CoreInbox(theirs)
        used: list[float] = []

        def wait() -> None:
            begin = time.thread_time()
            inbox.take(block=True)
            used.append(time.thread_time() - begin)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        ours.sendall(encode(Commands(aborts=("a",))))
        thread.join(30)
        assert used[0] < 0.1


def test_connections_leave_no_descriptor_behind() -> None:
    """B131."""

    async def live_and_die() -> None:
        async with (
            running_core(ScriptedEngine()) as client,
            client.stream([request("a")]) as stream,
        ):
            assert isinstance([event async for event in stream][-1], Finished)

    asyncio.run(live_and_die())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        asyncio.run(live_and_die())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- the real engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_model("llama", path)
    return path


async def live(config: EngineConfig, task: object) -> CoreClient:
    client = CoreClient()
    limits = replace(DEFAULT_LIMITS, max_running=4)
    supervisor = Supervisor(client, Start(config, limits, 100, (9,)), spawn_core)
    running = asyncio.create_task(supervisor.run())
    try:
        while client.state is not CoreState.READY:
            if running.done():
                await running
            await asyncio.sleep(0.02)
        assert callable(task)
        await task(client, supervisor)
        return client
    finally:
        await supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)


def test_a_real_model_in_a_child_answers_and_survives_a_kill(tiny_model: Path) -> None:
    """B124 with the real engine."""
    config = EngineConfig(
        model=str(tiny_model), served_model_name="tiny", kv_memory=1 << 20, threads=1
    )

    async def answer(client: CoreClient) -> tuple[int, ...]:
        async with client.stream([request("a", max_tokens=12)]) as stream:
            events = [event async for event in stream]
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH
        return sum((e.token_ids for e in events if isinstance(e, Tokens)), ())

    async def check(client: CoreClient, supervisor: Supervisor) -> None:
        info = client.info
        assert info is not None
        assert info.model_name == "tiny"
        assert info.max_model_len <= info.context_length
        assert info.max_model_len <= info.capacity.num_blocks * info.capacity.block_size
        assert 9 in info.eos_token_ids
        assert "bytes" in info.notes[0]
        before = await answer(client)
        assert len(before) == 12
        assert max(before) < 100
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        while client.state is CoreState.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while client.state is not CoreState.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await answer(client) == before

    asyncio.run(asyncio.wait_for(live(config, check), 120))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_memory": 100}, "holds no block"),
        ({"kv_memory": 1 << 60}, "are free"),
        ({"max_model_len": 10**6}, "--max-model-len"),
        (
            {"cpu_kernels": "native"},
            "--cpu-kernels native: (head_dim|.*were not built)",
        ),
        (
            {"cpu_quantize": "int8"},
            "--cpu-quantize int8: (head_dim|.*were not built)",
        ),
        (
            {"cpu_quantize": "int8", "cpu_kernels": "reference"},
            "--cpu-quantize int8 needs the native",
        ),
        ({"gpu_quantize": "int4"}, "--gpu-quantize int4 needs a CUDA device"),
        ({"kv_dtype": "fp8"}, "--kv-dtype fp8 needs a CUDA device"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8: (head_dim|.*were not built)"),
        ({"kv_dtype": "int16"}, "--kv-dtype int16: (head_dim|.*were not built)"),
        ({"kv_dtype": "int8", "cpu_kernels": "reference"}, "--kv-dtype int8 needs the native"),
        ({"model": "/nonexistent"}, "/nonexistent"),
        ({"block_size": 1, "kv_memory": 1024}, "holds one token"),
    ],
)
def test_settings_that_can_not_work_end_in_one_line(
    tiny_model: Path, changes: dict[str, int], words: str
) -> None:
    config = replace(EngineConfig(model=str(tiny_model), device="cpu"), **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match=words) as error:
        build_core(Start(config, DEFAULT_LIMITS, 100), lambda *_: None)
    assert "\n" not in str(error.value)


def test_the_pool_limits_what_is_promised_to_one_request(tiny_model: Path) -> None:
    """A model whose context the memory can not hold says so at start, not in the middle."""
    config = EngineConfig(model=str(tiny_model), device="cpu", kv_memory=40_000)
    core = build_core(Start(config, DEFAULT_LIMITS, 100), lambda *_: None)
    gc.unfreeze()
    tokens = core.info.capacity.num_blocks * core.info.capacity.block_size
    assert core.info.max_model_len == tokens < core.info.context_length
    assert core.engine.capacity == core.info.capacity


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not available_tiers():
        pytest.skip("the native kernels are not built here")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_random_model("llama", hidden_size=128, head_dim=32), path)
    return path


def test_a_model_that_was_packed_early_is_the_one_that_runs(tiny_gguf: Path) -> None:
    config = EngineConfig(model=str(tiny_gguf), device="cpu", kv_memory=10_000_000)
    packed = pack_early(Plan(config, DEFAULT_LIMITS))
    assert packed is not None
    start = Start(replace(config, served_model_name="tiny"), DEFAULT_LIMITS, 100)
    core, fresh = (build_core(start, lambda *_: None, early) for early in (packed, None))
    assert core.engine._runner is packed.runner  # type: ignore[attr-defined]
    assert replace(core.info, load_seconds=0) == replace(fresh.info, load_seconds=0)


@pytest.mark.parametrize("max_step_tokens", [1, 3, 8])
def test_steps_may_be_smaller_than_the_first_ones_of_all(
    tiny_gguf: Path, max_step_tokens: int
) -> None:
    """The smallest `--max-step-tokens` that is taken is one that can start."""
    config = EngineConfig(model=str(tiny_gguf), device="cpu", kv_memory=10_000_000)
    limits = replace(DEFAULT_LIMITS, max_step_tokens=max_step_tokens)
    assert pack_early(Plan(config, limits)) is not None
    assert build_core(Start(config, limits, 100), lambda *_: None).info.limits == limits


def test_what_was_packed_early_for_other_settings_is_not_used(tiny_gguf: Path) -> None:
    config = EngineConfig(model=str(tiny_gguf), device="cpu", kv_memory=10_000_000)
    packed = pack_early(Plan(config, DEFAULT_LIMITS))
    other = Start(replace(config, kv_dtype="int8"), DEFAULT_LIMITS, 100)
    core = build_core(other, lambda *_: None, packed)
    assert "x 1 byte + 4 of scale" in core.info.notes[0]


@pytest.mark.skipif(not available_tiers(), reason="the native kernels are not built here")
@pytest.mark.parametrize(
    ("kind", "words"), [("Q8_0", "x 1 byte + 4 of scale"), ("F32", "x 2 bytes + 4 of scale")]
)
def test_kv_has_8_bits_beside_quantised_weights_and_16_beside_floats(
    kind: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    model = tiny_random_model("llama", hidden_size=128, head_dim=32)
    write_gguf(model, path, kind=gguf.GGMLQuantizationType[kind])
    core = build_core(
        Start(EngineConfig(model=str(path), device="cpu"), DEFAULT_LIMITS, 100), lambda *_: None
    )
    gc.unfreeze()
    assert words in core.info.notes[0]


@pytest.mark.parametrize(
    "changes",
    [{"model": "some/hub-name"}, {"kv_memory": 100}, {"cpu_kernels": "reference"}],
)
def test_what_can_not_be_packed_early_is_left_to_the_start(
    tiny_gguf: Path, changes: dict[str, object]
) -> None:
    config = replace(EngineConfig(model=str(tiny_gguf), device="cpu"), **changes)  # type: ignore[arg-type]
    assert pack_early(Plan(config, DEFAULT_LIMITS)) is None


def test_an_end_that_the_model_has_no_row_for_ends_nothing(tiny_model: Path) -> None:
    """B025, B148: as a stop token it would fail each request, were it asked for."""
    config = EngineConfig(model=str(tiny_model), device="cpu", kv_memory=40_000)
    start = Start(config, DEFAULT_LIMITS, 1000, eos_token_ids=(7, 999))
    core = build_core(start, lambda *_: None)
    gc.unfreeze()
    assert core.info.eos_token_ids == (2, 7)
