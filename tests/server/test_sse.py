"""Streams as bytes on a socket: events, keep-alive, errors inside, hang-ups, slow readers."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from scheduler.limits import SchedulerLimits
from server.config import ServerConfig
from server.sse import EventStream, to_json
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    House,
    TextEngine,
    connect,
    events,
    eventually,
    house,
    in_loop,
    texts,
)

TINY = SchedulerLimits(max_step_tokens=64, max_waiting=4, max_running=1, watermark_blocks=0)
LINE_ENDS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh\ni\r\nj"


def long_answer(stream: bool, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": 1500, "stream": stream, **fields}


def asked_of(path: str, *, stream: bool) -> dict[str, object]:
    """The same of either endpoint."""
    if path == CHAT:
        return long_answer(stream)
    return {"prompt": "x", "max_tokens": 1500, "stream": stream}


async def idle(server: House) -> bool:
    return (
        await server.metric("paceline_requests_running") == 0
        and await server.metric("paceline_requests_waiting") == 0
        and await server.metric("paceline_kv_usage_ratio") == 0
        and server.core.num_unfinished == 0
    )


async def open_request(server: House, path: str, body: object) -> asyncio.StreamWriter:
    """Sends a request on a socket of its own; nothing of the answer is read."""
    _, writer = await send_request(server, path, body)
    return writer


async def send_request(
    server: House, path: str, body: object, *, limit: int = 1 << 16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(server, limit=limit)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@in_loop
async def test_characters_taken_for_line_ends_stay_inside_their_event() -> None:
    """B019: with the official client and with a client that uses splitlines."""
    async with house(TextEngine({"ends": LINE_ENDS}), live=True) as server:
        answer = await server.chat("ends", stream=True)
        plain = (await server.chat("ends")).json()
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "ends"}], stream=True
            )
            joined = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert joined == LINE_ENDS
    assert plain["choices"][0]["message"]["content"] == LINE_ENDS
    answer.text.encode("ascii")
    assert "\r" not in answer.text
    lines = answer.text.splitlines()
    assert all(line.startswith("data: ") or not line for line in lines)
    data = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
    assert texts(data) == {0: LINE_ENDS}


def test_json_of_events_is_ascii() -> None:
    """B019: whatever else is in an event: names of tokens, of the model, error texts."""
    text = to_json({"a": LINE_ENDS, "é": [None, -9999.0]})
    assert text.isascii()
    assert text.splitlines() == [text]
    assert json.loads(text)["a"] == LINE_ENDS


@in_loop
async def test_every_event_is_one_write() -> None:
    async with house(TextEngine({"greet": "Hello"})) as server:
        writes: list[bytes] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
        }
        body = json.dumps(long_answer(stream=True, messages=[{"role": "user", "content": "greet"}]))
        inbox = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive() -> dict[str, object]:
            if inbox:
                return inbox.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                assert isinstance(message["body"], bytes)
                writes.append(message["body"])

        await server.app(scope, receive, send)  # type: ignore[arg-type]
    assert len(writes) > 3
    for write in writes:
        assert write.startswith(b"data: ")
        assert write.endswith(b"\n\n")
        assert write.count(b"\n") == 2


@in_loop
async def test_keep_alive_comments_come_while_nothing_else_does() -> None:
    """B016: a request waits behind another one for several intervals."""
    config = ServerConfig(keepalive_seconds=0.05)
    engine = TextEngine({"greet": "Hello"}, step_seconds=0.005)
    async with house(engine, config, limits=TINY, live=True) as server:
        first = asyncio.create_task(server.chat("block", max_tokens=60))
        await eventually(lambda: server.core.num_unfinished == 1)
        answer = await server.chat("greet", stream=True)
        await first
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    kinds = [block[0] for block in blocks]
    assert kinds.count(":") >= 2
    assert "".join(kinds).rstrip("d").strip(":") == ""  # comments only before the first event
    assert all(block == ": keep-alive" for block in blocks if block.startswith(":"))
    assert texts(events(answer.text)) == {0: "Hello"}


@in_loop
async def test_official_client_skips_keep_alive_comments() -> None:
    """B016."""
    config = ServerConfig(keepalive_seconds=0.05)
    engine = TextEngine({"greet": "Hello"})
    async with house(engine, config, live=True) as server:
        engine.running.clear()

        async def go_on_later() -> None:
            await eventually(lambda: server.core.num_unfinished == 1)
            await asyncio.sleep(0.3)
            engine.running.set()

        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            later = asyncio.create_task(go_on_later())
            stream = await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "greet"}], stream=True
            )
            deltas = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert deltas[0] == ""
            await later
        # Time to first token is that of the text, not of a comment.
        assert await server.metric("paceline_time_to_first_token_seconds_sum") > 0.25


@in_loop
async def test_nothing_is_written_after_the_end() -> None:
    """B016: the ticker ends with the stream, whatever its interval."""
    written: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            assert isinstance(message["body"], bytes)
            written.append(message["body"])

    async with EventStream(send, [], 0.01) as stream:  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        await stream.end()
        count = len(written)
        await asyncio.sleep(0.05)
    assert len(written) == count
    assert written[-2:] == [b"data: [DONE]\n\n", b""]
    assert written[0] == b": keep-alive\n\n"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_failure_before_the_first_token_is_a_plain_http_error(path: str) -> None:
    """B011: never an empty success."""
    async with house() as server:
        server.engine.fail_step.set()
        answer = await server.client.post(path, json=asked_of(path, stream=True))
    assert answer.status_code in (500, 503)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_failure_after_the_first_byte_is_an_error_event_and_the_end(path: str) -> None:
    """B011, B124: an engine that dies in the middle; new requests get 503 at once."""
    engine = TextEngine(step_seconds=0.002)
    async with house(engine, live=True) as server:
        lines = []
        body = asked_of(path, stream=True)
        async with server.client.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == 20:
                    engine.fail_step.set()
        after = await server.client.post(path, json=asked_of(path, stream=True))
        health = await server.client.get("/health")
        ready = await server.client.get("/ready")
    data = [line[6:] for line in lines if line]
    assert data[-1] == "[DONE]"
    error = json.loads(data[-2])["error"]
    assert error["type"]
    assert error["message"]
    assert after.status_code == 503
    assert int(after.headers["retry-after"]) >= 1
    assert (health.status_code, ready.status_code) == (503, 503)


@in_loop
async def test_official_client_raises_on_an_error_event() -> None:
    engine = TextEngine(step_seconds=0.002)

    async def read_until_it_fails(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "x"}], stream=True
            )
            async for _chunk in stream:
                engine.fail_step.set()

    async with house(engine, live=True) as server:
        with pytest.raises(openai.APIError):
            await read_until_it_fails(server.url)


@in_loop
async def test_one_bad_row_fails_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    """B136: the neighbour of a failing row goes on; the log has the reason."""

    class Picky(TextEngine):
        def submit(self, plan):  # type: ignore[no-untyped-def]
            for admission in plan.admissions:
                if b"bad" in bytes(t for t in admission.token_ids if t < 256):
                    self.bad_requests |= set(plan.seq_ids[-1:])
            return super().submit(plan)

    async with house(Picky({"greet": "Hello"})) as server:
        bad = await server.chat("bad")
        good = await server.chat("greet")
    assert bad.status_code == 500
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith(f"request {bad.headers['x-request-id']} failed: ")
    assert bad.json()["error"]["code"] == "generation_failed"
    assert good.status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_hang_up_frees_everything_at_once(path: str, stream: bool) -> None:
    """B017, B115, B116: gauges return to 0 and an abort is counted, without a new request."""
    async with house(TextEngine(step_seconds=0.002), live=True) as server:
        writers = [
            await open_request(server, path, asked_of(path, stream=stream)) for _ in range(5)
        ]
        await eventually(lambda: server.core.num_unfinished == 5)
        for writer in writers:
            writer.close()
        await eventually(lambda: idle(server))
        assert await server.metric("paceline_requests_finished_total", reason="abort") == 5
        assert await server.metric("paceline_requests_accepted_total") == 5
        generated = await server.metric("paceline_generated_tokens_total")
        await asyncio.sleep(0.1)
        assert await server.metric("paceline_generated_tokens_total") == generated
        assert server.core.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_hang_up_while_queued_frees_the_place(stream: bool) -> None:
    """B017."""
    async with house(TextEngine(step_seconds=0.002), limits=TINY, live=True) as server:
        running = await open_request(server, CHAT, long_answer(stream=True))
        await eventually(lambda: server.core.num_unfinished == 1)
        waiting = await open_request(server, CHAT, long_answer(stream))
        await eventually(lambda: server.core.num_unfinished == 2)
        waiting.close()
        await eventually(lambda: server.core.num_unfinished == 1)
        running.close()
        await eventually(lambda: idle(server))


@in_loop
async def test_hang_up_of_one_connection_leaves_others_alone() -> None:
    async with house(TextEngine({"greet": "Hello " * 20}, step_seconds=0.002), live=True) as server:
        leaving = await open_request(server, CHAT, long_answer(stream=True, n=3))
        staying = asyncio.create_task(server.chat("greet", stream=True))
        await eventually(lambda: server.core.num_unfinished == 4)
        leaving.close()
        answer = await staying
        await eventually(lambda: idle(server))
    assert texts(events(answer.text)) == {0: "Hello " * 20}


@in_loop
async def test_slow_reader_holds_no_growing_buffer_and_is_noticed_when_it_leaves() -> None:
    """B020: what a reader does not take is merged in the core's stream, not queued as events."""
    engine = TextEngine()
    config = ServerConfig(api_keys=("k",), cors_origins=("*",), open_metrics=True)
    async with house(engine, config, live=True) as server:
        reader, writer = await connect(server, limit=1024)
        data = json.dumps(
            {**long_answer(stream=True), "logprobs": True, "top_logprobs": 20, "n": 8}
        ).encode()
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
        )
        writer.write(data)
        transport = writer.transport
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        transport.pause_reading()  # type: ignore[attr-defined]
        # The core ends all choices although nobody reads; the answer waits here, merged.
        await eventually(lambda: server.core.num_unfinished == 0, 100.0)
        assert server.core.num_open == 1
        health = await server.client.get("/health")
        assert health.status_code == 200
        writer.close()
        await eventually(lambda: server.core.num_open == 0)


@in_loop
async def test_first_bytes_arrive_before_the_last_token_is_made() -> None:
    """B020: no middleware buffers a stream."""
    config = ServerConfig(api_keys=("k",), cors_origins=("*",), open_metrics=True)
    async with house(TextEngine(), config, live=True) as server:
        server.engine.step_seconds = 0.002
        headers = {"authorization": "Bearer k", "origin": "http://a.example"}
        request = server.client.stream("POST", CHAT, json=long_answer(stream=True), headers=headers)
        async with request as answer:
            async for line in answer.aiter_lines():
                if '"content":"' in line:
                    break
            assert server.core.num_unfinished == 1
        await eventually(lambda: idle(server))


@in_loop
async def test_refusal_with_stream_is_json_with_its_status() -> None:
    """B133: the queue is full; every request gets its answer."""
    engine = TextEngine(step_seconds=0.01)
    limits = SchedulerLimits(max_step_tokens=64, max_waiting=1, max_running=1, watermark_blocks=0)
    async with house(engine, limits=limits, live=True) as server:
        tasks = [asyncio.create_task(server.chat("x", stream=True, max_tokens=8)) for _ in range(8)]
        answers: list[httpx.Response] = await asyncio.gather(*tasks)
        refused_total = await server.metric("paceline_requests_refused_total", reason="queue_full")
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 6
    assert refused_total == 6
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert float(answer.headers["retry-after-ms"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"
