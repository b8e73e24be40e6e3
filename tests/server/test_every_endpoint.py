"""The known faults of streaming and of parameters, on every endpoint that takes a body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.config import ServerConfig
from server.schemas import WITHOUT_EFFECT
from tests.server.test_openapi import BASES, NEEDS, SKIPPED, fields_of
from tests.server.test_stream_equals_plain import STREAMING, streamed
from tests.support.http_server import TextEngine, connect, eventually, house, in_loop

PATHS = sorted(set(BASES) - {"/v1/batches"})
GENERATING = sorted(STREAMING)
ODD = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh\ni \U0001f600 čau ภาษา"
# Where the words of a request are, to be replaced.
TEXTS = {
    "messages": lambda text: [{"role": "user", "content": text}],
    "prompt": lambda text: text,
    "input": lambda text: text,
}


def with_text(path: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {**BASES[path], **fields}
    for name, make in TEXTS.items():
        if name in body:
            body[name] = make(text)
    return body


def with_limit(path: str, limit: int, **fields: Any) -> dict[str, Any]:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return with_text(path, fields.pop("text", "greet"), **{name: limit}, **fields)


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/messages":
        return "".join(block["text"] for block in answer["content"])
    if path == "/v1/responses":
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    choice = answer["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_body_that_is_no_object_of_strict_json_is_refused(path: str) -> None:
    """B029, B031, B037."""
    good = json.dumps(BASES[path]).encode()
    bodies = [b"[]", b"[1]", b'"x"', b"1", b"true", b"null", b"", b"{", b'{"a":1}{"b":2}']
    bodies += [b"\xef\xbb\xbf" + good, good[:-1] + b',"x":"\xff"}', good[:-1] + b',"x":1e999}']
    bodies += [good[:-1] + b',"x":' + word + b"}" for word in (b"NaN", b"Infinity", b"-Infinity")]
    bodies += [good.replace(b'"greet"', b'"\\ud800"')] if b'"greet"' in good else []
    async with house(TextEngine()) as server:
        for body in bodies:
            answer = await server.client.post(path, content=body)
            assert answer.status_code == 400, (body[:60], answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert "Traceback" not in answer.text
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", sorted(set(PATHS) - SKIPPED))
@in_loop
async def test_null_equals_absent_for_every_optional_field(path: str) -> None:
    """B038: alone, and for all fields at once."""
    optional = [name for name in fields_of(path) if name not in BASES[path]]
    async with house(TextEngine({"greet": "Hello."})) as server:
        for names in ([name] for name in optional):
            body = {**BASES[path], **dict.fromkeys(names)}
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 200, (names, answer.text)
        answer = await server.client.post(path, json={**BASES[path], **dict.fromkeys(optional)})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_value_of_the_wrong_type_or_out_of_range_is_refused_by_name(path: str) -> None:
    """B022, B023, B025, B029, B034: every field with one value of each wrong kind."""
    wrong: list[Any] = [float(2**70), "nan", {"a": [1]}, [{"b": None}], -(2**70), True, 1.5]
    async with house(TextEngine({"greet": "Hello."})) as server:
        for name in fields_of(path):
            statuses = set()
            for value in wrong:
                body = {**BASES[path], name: value}
                answer = await server.client.post(path, json=body)
                assert answer.status_code in (200, 400, 404), (name, value, answer.text)
                statuses.add(answer.status_code)
                if answer.status_code != 200 and path not in ("/v1/messages",):
                    error = answer.json()["error"]
                    if path != "/v1/messages/count_tokens":
                        assert error["param"] is not None, (name, value, error)
            assert statuses & {400, 404}, f"{name} takes anything"
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_a_field_of_another_endpoint_is_refused_by_name(path: str) -> None:
    """A limit, an end or a form under the name that it has elsewhere must not be dropped."""
    everywhere = {name for other in GENERATING for name in fields_of(other)}
    foreign = {"format", "max_new_tokens", "n_predict", "output_format", "stop_regex"}
    # What is to be cached is a hint: every prefix is.
    names = (everywhere | foreign) - fields_of(path).keys() - WITHOUT_EFFECT - {"cache_control"}
    assert len(names) > 20
    async with house(TextEngine({"greet": "Hello."})) as server:
        for name in sorted(names):
            answer = await server.client.post(path, json={**BASES[path], name: "x"})
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert name in (error.get("param") or error["message"]), answer.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@in_loop
async def test_a_counter_takes_all_fields_of_a_request(path: str) -> None:
    tail = "/count_tokens" if path == "/v1/messages" else "/input_tokens"
    async with house(TextEngine()) as server:
        for name, field in fields_of(path).items():
            for given in field.get("examples", []):
                body = {**BASES[path], **NEEDS.get(name, {}), name: given}
                answer = await server.client.post(path + tail, json=body)
                assert answer.status_code == 200, (name, answer.text)
        for name, value in (("temperature", 9), ("stop", "x"), ("grammar", "x")):
            answer = await server.client.post(path + tail, json={**BASES[path], name: value})
            assert answer.status_code == 400, (name, answer.text)


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_the_error_of_another_media_type_is_the_requests(path: str) -> None:
    async with house(TextEngine()) as server:
        headers = {"content-type": "application/xml"}
        answer = await server.client.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_a_prompt_that_is_too_long_is_refused_before_anything(
    path: str, stream: bool
) -> None:
    """B028: by one token and by far, with a plain status in a stream too."""
    async with house(TextEngine()) as server:
        total = server.engine.capacity.max_model_len
        for length in (total, 3 * total, 100 * total):
            body = with_text(path, "x" * length, stream=stream)
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 400
            assert "maximum context length is" in answer.text


@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_streamed_text_is_whole_ascii_and_one_line_an_event(path: str) -> None:
    """B001, B002, B019: characters of several tokens, and every odd line end."""
    async with house(TextEngine({"greet": ODD})) as server:
        plain = await server.client.post(path, json=with_limit(path, 200))
        assert text_of(path, plain.json()) == ODD
        made = await server.client.post(path, json=with_limit(path, 200, stream=True))
        assert made.content.isascii()
        assert "\\ufffd" not in made.text
        lines = made.text.split("\n")
        assert all(line == "" or line.startswith(("data: ", "event: ", ": ")) for line in lines)
        assert made.text.splitlines() == lines[:-1]
        assert text_of(path, streamed(path, made)) == ODD


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
@in_loop
async def test_nothing_of_a_stop_string_leaks(path: str) -> None:
    """B004, B005, B008: each token is one byte, so the string is cut at every place."""
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    async with house(TextEngine({"greet": "ABC DEFGHIJ KLM"})) as server:
        for stops, text in ((["DEFGHIJ"], "ABC "), (["ZZZZ"], "ABC DEFGHIJ KLM")):
            body = with_limit(path, 100, **{name: stops})
            plain = await server.client.post(path, json=body)
            assert text_of(path, plain.json()) == text
            made = await server.client.post(path, json={**body, "stream": True})
            assert text_of(path, streamed(path, made)) == text


@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_a_failure_before_the_first_token_is_a_plain_status(path: str) -> None:
    """B011."""
    engine = TextEngine()
    engine.fail_step.set()
    async with house(engine) as server:
        answer = await server.client.post(path, json=with_text(path, "x", stream=True))
        assert answer.status_code >= 500
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_a_client_that_hangs_up_ends_its_request(path: str, stream: bool) -> None:
    """B017, B020: while it runs, streaming or not."""
    async with house(TextEngine(step_seconds=0.002), live=True) as server:
        body = json.dumps(with_limit(path, 1000, text="x", stream=stream)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        _, writer = await connect(server)
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: server.core.num_open == 1)
        await asyncio.sleep(0.02)
        writer.close()
        await eventually(lambda: server.core.num_open == 0)


@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_silence_brings_comments_between_events_only(path: str) -> None:
    """B016: they are no part of what clients read. Anthropic's have an event for it."""
    sign = "event: ping\ndata: {" if path == "/v1/messages" else ": keep-alive\n\n"
    engine = TextEngine({"greet": "Hi"}, step_seconds=0.15)
    async with house(engine, ServerConfig(keepalive_seconds=0.05)) as server:
        made = await server.client.post(path, json=with_limit(path, 5, stream=True))
        assert made.text.startswith(sign)
        assert text_of(path, streamed(path, made)) == "Hi"
