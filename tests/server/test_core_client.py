"""Streams over the real protocol to a core in a thread: order, back-pressure, aborts, deaths."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from scheduler.limits import SchedulerLimits
from scheduler.types import Finished, FinishReason, StepStats, Tokens
from server.config import EngineConfig
from server.core_client import (
    CoreClient,
    CoreState,
    CoreStream,
    CoreUnavailable,
    NeverFits,
)
from server.door import QueueFull
from server.wire import Failed, FailureKind, Ready, Start, Step, encode
from tests.support.scripted_engine import (
    CAPACITY,
    LIMITS,
    VOCAB_SIZE,
    ScriptedEngine,
    info_for,
    request,
    running_core,
)

SMALL = SchedulerLimits(max_step_tokens=64, max_waiting=2, max_running=2, watermark_blocks=1)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def collect(stream: CoreStream) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    tokens: dict[str, list[int]] = {}
    finished: dict[str, Finished] = {}
    async for event in stream:
        assert event.request_id not in finished, "nothing follows a Finished"
        if isinstance(event, Tokens):
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
        else:
            finished[event.request_id] = event
    return tokens, finished


@pytest.mark.parametrize("depth", [0, 1])
def test_each_request_of_many_groups_gets_its_own_tokens_and_one_end(depth: int) -> None:
    async def test() -> None:
        async with running_core(ScriptedEngine(), depth=depth) as client:

            async def ask(name: str, n: int, max_tokens: int) -> None:
                group = [
                    replace(request(name, max_tokens=max_tokens), id=f"{name}-{i}")
                    for i in range(n)
                ]
                async with client.stream(group) as stream:
                    tokens, finished = await collect(stream)
                assert tokens == {member.id: list(range(max_tokens)) for member in group}
                assert {end.reason for end in finished.values()} == {FinishReason.LENGTH}
                assert set(finished) == set(tokens)

            await asyncio.gather(*(ask(f"r{i}", 1 + i % 3, 1 + i) for i in range(20)))
            assert client.num_open == client.num_unfinished == client.num_waiting == 0

    run(test)


def test_a_slow_reader_gets_few_merged_events_and_the_whole_answer() -> None:
    """B020: what waits for a slow reader is bounded by its answer."""

    async def test() -> None:
        async with running_core(ScriptedEngine()) as client:
            async with client.stream([request("slow", max_tokens=150)]) as stream:
                await until(lambda: client.num_unfinished == 0)
                events = [event async for event in stream]
            assert len(events) == 2
            assert isinstance(events[0], Tokens)
            assert events[0].token_ids == tuple(range(150))
            assert events[0].first is not None
            assert isinstance(events[1], Finished)

    run(test)


def test_leaving_the_context_aborts_what_is_unfinished() -> None:
    async def test() -> None:
        stats: list[StepStats] = []
        async with running_core(ScriptedEngine(step_seconds=0.01)) as client:
            client.on_stats = stats.append
            group = [replace(request("x", max_tokens=1000), id=f"x{i}") for i in range(3)]
            async with client.stream(group) as stream:
                await anext(stream)
                assert client.num_unfinished == 3
            assert client.num_open == 0
            await until(lambda: client.num_unfinished == 0)
            # B115: the gauges return to 0 without another request.
            await until(lambda: stats[-1].num_running == stats[-1].num_blocks_used == 0)

    run(test)


def test_an_abort_that_meets_the_end_is_harmless() -> None:
    """B107: clients leave around the very end; each request ends once and the core goes on."""

    async def test() -> None:
        draw = random.Random(7)
        async with running_core(ScriptedEngine(step_seconds=0.001)) as client:

            async def ask(name: str) -> None:
                async with client.stream([request(name, max_tokens=draw.randint(1, 3))]) as stream:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(collect(stream), draw.random() * 0.01)

            for wave in range(8):
                await asyncio.gather(*(ask(f"{wave}-{i}") for i in range(40)))
            await until(lambda: client.num_unfinished == 0)
            async with client.stream([request("after")]) as stream:
                tokens, _ = await collect(stream)
            assert tokens == {"after": list(range(8))}

    run(test)


def test_a_full_queue_is_refused_at_once_all_or_nothing() -> None:
    """B109, B133: 2 run, 2 wait; a group that exceeds this by one is refused as a whole."""

    async def test() -> None:
        engine = ScriptedEngine()
        async with running_core(engine, limits=SMALL) as client:
            engine.running.clear()
            async with client.stream([request("a")]), client.stream([request("b")]):
                group = [replace(request("c"), id=f"c{i}") for i in range(3)]
                with pytest.raises(QueueFull) as refusal:
                    async with client.stream(group):
                        raise AssertionError
                assert 1 <= refusal.value.retry_after_seconds <= 60
                assert client.num_unfinished == 2
                async with client.stream(group[:2]) as stream:
                    engine.running.set()
                    tokens, _ = await collect(stream)
                assert set(tokens) == {"c0", "c1"}
            await until(lambda: client.num_unfinished == 0)

    run(test)


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    async def test() -> None:
        async with running_core(ScriptedEngine()) as client:
            with pytest.raises(NeverFits, match=str(CAPACITY.max_model_len)):
                async with client.stream([request("long", max_tokens=CAPACITY.max_model_len)]):
                    raise AssertionError
            assert client.num_unfinished == 0

    run(test)


def test_a_bad_row_ends_its_request_alone() -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        engine.bad_requests.add("bad")
        async with (
            running_core(engine) as client,
            client.stream([request("bad")]) as bad,
            client.stream([request("good")]) as good,
        ):
            _, finished = await collect(bad)
            assert finished["bad"].reason is FinishReason.ERROR
            assert "scripted" in finished["bad"].message
            tokens, _ = await collect(good)
            assert len(tokens["good"]) == 8

    run(test)


def test_a_failed_step_ends_every_stream_with_an_error_and_refuses_new_ones() -> None:
    """B124: in the engine thread's case; the process is killed in test_supervisor."""

    async def test() -> None:
        engine = ScriptedEngine(step_seconds=0.005)
        last: list[StepStats] = []
        async with running_core(engine) as client:
            client.on_stats = last.append
            async with (
                client.stream([request("a", max_tokens=500)]) as one,
                client.stream([request("b", max_tokens=500)]) as two,
            ):
                await anext(one)
                engine.fail_step.set()
                for name, stream in (("a", one), ("b", two)):
                    _, finished = await collect(stream)
                    assert finished[name].reason is FinishReason.ERROR
                    assert "scripted" in finished[name].message
                    assert not stream.cut_off
            await until(lambda: client.state is CoreState.FAILED)
            with pytest.raises(CoreUnavailable):
                async with client.stream([request("c")]):
                    raise AssertionError
            assert client.num_unfinished == 0
            # B122: the gauges of a dead core vanish.
            assert (last[-1].num_running, last[-1].num_blocks_used) == (0, 0)

    run(test)


def test_the_last_words_of_a_core_are_heard_though_a_command_met_its_end() -> None:
    """All at once: a request on its way, an end, the reason, and nobody at the other side."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        client = CoreClient()
        serving = asyncio.create_task(client.serve(ours, Start(EngineConfig(), LIMITS, VOCAB_SIZE)))
        theirs.sendall(encode(Ready(info_for(ScriptedEngine()))))
        await until(lambda: client.state is CoreState.READY)
        async with client.stream([request("a"), replace(request("a"), id="b")]) as stream:
            ended = Step(finished=(Finished("a", FinishReason.ERROR, "no more"),))
            theirs.sendall(encode(ended) + encode(Failed(FailureKind.ENGINE, "no more")))
            theirs.close()
            await serving
            first = await anext(stream)
            assert first == ended.finished[0]
            assert client.state is CoreState.FAILED
            assert stream.cut_off == {"b"}
        assert (await serving).message == "no more"

    run(test)


def test_a_connection_that_breaks_ends_streams() -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        async with running_core(engine) as client:
            engine.running.clear()
            async with client.stream([request("a")]) as stream:
                assert client._connection is not None
                client._connection.close()
                async with asyncio.timeout(20.0):
                    _, finished = await collect(stream)
            assert finished["a"].reason is FinishReason.ERROR
            assert stream.cut_off == {"a"}
            engine.running.set()

    run(test)


def test_a_frozen_engine_shows_in_the_age_of_the_last_step_and_recovers() -> None:
    """B125: an idle core has no age, a busy one grows old only while it stands still."""

    async def test() -> None:
        engine = ScriptedEngine(step_seconds=0.005)
        async with running_core(engine) as client:
            await asyncio.sleep(0.3)
            assert client.last_step_age() is None
            async with client.stream([request("a", max_tokens=2000)]) as stream:
                await anext(stream)
                engine.running.clear()
                frozen = 0.0
                while frozen < 0.5:
                    await asyncio.sleep(0.05)
                    age = client.last_step_age()
                    assert age is not None
                    frozen = age
                engine.running.set()
                while (age := client.last_step_age()) is None or age >= frozen:
                    await anext(stream)

    run(test)


def test_a_draining_client_finishes_what_is_open_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with running_core(ScriptedEngine(step_seconds=0.002)) as client:
            async with client.stream([request("a", max_tokens=50)]) as stream:
                client.drain()
                with pytest.raises(CoreUnavailable, match="shutting down"):
                    async with client.stream([request("b")]):
                        raise AssertionError
                tokens, _ = await collect(stream)
                assert len(tokens["a"]) == 50
                assert client.num_open == 1
            await asyncio.wait_for(client.wait_until_none_open(), 20.0)

    run(test)


def test_end_all_ends_open_streams_with_the_message_and_frees_the_core() -> None:
    async def test() -> None:
        async with running_core(ScriptedEngine(step_seconds=0.002)) as client:
            async with client.stream([request("a", max_tokens=1000)]) as stream:
                await anext(stream)
                client.end_all("the server is shutting down")
                _, finished = await collect(stream)
                assert finished["a"].message == "the server is shutting down"
            await until(lambda: client.num_unfinished == 0)

    run(test)


def test_before_ready_requests_are_refused_with_a_time_to_come_back() -> None:
    """B134: no hang while a model loads."""

    async def test() -> None:
        client = CoreClient()
        assert client.state == "loading"
        with pytest.raises(CoreUnavailable, match="loading") as refusal:
            async with client.stream([request("a")]):
                raise AssertionError
        assert refusal.value.retry_after_seconds > 0

    run(test)


def test_many_clients_that_leave_at_random_all_end_once() -> None:
    """200 clients, a third leaves; counts return to 0 and each answer is its own."""

    async def test() -> None:
        draw = random.Random(3)
        limits = replace(LIMITS, max_waiting=400)
        async with running_core(ScriptedEngine(), limits=limits) as client:
            num_ends = 0

            async def ask(i: int) -> None:
                nonlocal num_ends
                max_tokens = draw.randint(1, 60)
                async with client.stream([request(f"r{i}", max_tokens=max_tokens)]) as stream:
                    if i % 3 == 0:
                        await asyncio.sleep(draw.random() * 0.1)
                        return
                    tokens, finished = await collect(stream)
                assert tokens == {f"r{i}": list(range(max_tokens))}
                num_ends += len(finished)

            await asyncio.gather(*(ask(i) for i in range(200)))
            assert num_ends == 133
            await until(lambda: client.num_unfinished == 0)

    run(test)
