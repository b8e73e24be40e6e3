"""Log-probabilities over HTTP: true bytes, finite numbers, offsets, echo."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.http_server import (
    House,
    TextEngine,
    events,
    fake_logprob,
    house,
    in_loop,
)

MIXED = "a😀“q” ไ"


def engine() -> TextEngine:
    return TextEngine({"greet": MIXED, "abc": "Hello", "stop": "ab!cd!ef"})


def strict(text: str) -> Any:
    """JSON without NaN or Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


async def chat_entries(server: House, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    """Entries of the plain answer; checks that those of the stream are the same."""
    plain = strict((await server.chat(prompt, logprobs=True, **fields)).text)
    entries: list[dict[str, Any]] = plain["choices"][0]["logprobs"]["content"]
    answer = await server.chat(prompt, logprobs=True, stream=True, **fields)
    streamed = []
    for chunk in events(answer.text):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert streamed == entries
    return entries


@in_loop
async def test_bytes_of_the_entries_are_those_of_the_text() -> None:
    """B074: emoji, quotes and Thai, one byte a token; alternatives are decoded on their own."""
    async with house(engine()) as server:
        entries = await chat_entries(server, "greet", top_logprobs=5)
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    assert data.decode() == MIXED
    for entry in entries:
        (byte,) = entry["bytes"]
        assert entry["token"] == (chr(byte) if byte < 128 else f"\\x{byte:02x}")
        assert entry["logprob"] == fake_logprob(byte)
        assert len(entry["top_logprobs"]) == 5
        for other in entry["top_logprobs"]:
            assert other["token"] != "\ufffd"
            assert bytes(other["bytes"])


@in_loop
async def test_masked_alternatives_are_finite_json() -> None:
    """B077: in plain answers and streams, on both endpoints."""
    async with house(engine()) as server:
        entries = await chat_entries(server, "greet", top_logprobs=2, top_k=1, temperature=1)
        assert all(entry["top_logprobs"][1]["logprob"] == -9999.0 for entry in entries)
        answer = await server.complete(
            "abc", echo=True, logprobs=2, top_k=1, logit_bias={"5": -100}
        )
        body = strict(answer.text)
    for value in body["choices"][0]["logprobs"]["top_logprobs"][1:]:
        assert -9999.0 in value.values()
        assert all(math.isfinite(number) for number in value.values())


@in_loop
async def test_which_wishes_for_logprobs_are_taken() -> None:
    """B076, B041."""
    async with house(engine()) as server:
        for wish in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
            body = (await server.chat("greet", **wish)).json()
            content = body["choices"][0]["logprobs"]["content"]
            assert content
            assert all(entry["top_logprobs"] == [] for entry in content)
        none = (await server.chat("greet", logprobs=False)).json()
        assert none["choices"][0]["logprobs"] is None
        most = (await server.chat("greet", logprobs=True, top_logprobs=20)).json()
        assert len(most["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
        bad: list[dict[str, Any]] = [{"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3}]
        bad += [{"logprobs": True, "top_logprobs": value} for value in (21, -1, 10**9, 1.5, True)]
        bad += [{"logprobs": 1}, {"logprobs": 5}]
        for wish in bad:
            answer = await server.chat("greet", **wish)
            assert answer.status_code == 400, wish
            assert answer.json()["error"]["param"] in wish
        for value in (0, 5):
            assert (await server.complete("greet", logprobs=value)).status_code == 200
        for value in (6, -1, True, 10**9, 1.0, "1"):
            assert (await server.complete("greet", logprobs=value)).status_code == 400


@in_loop
async def test_completion_logprobs_0_gives_the_sampled_token_only() -> None:
    """B076."""
    async with house(engine()) as server:
        body = (await server.complete("abc", logprobs=0)).json()
    columns = body["choices"][0]["logprobs"]
    assert columns["tokens"] == list("Hello")
    assert columns["text_offset"] == [0, 1, 2, 3, 4]
    expected = [fake_logprob(ord(character)) for character in "Hello"]
    assert columns["token_logprobs"] == expected
    assert columns["top_logprobs"] == [
        {c: value} for c, value in zip("Hello", expected, strict=True)
    ]


async def completion_columns(
    server: House, prompt: Any, **fields: Any
) -> tuple[str, dict[str, Any]]:
    """(text, logprobs) of the plain answer; checks that those of the stream are the same."""
    plain = strict((await server.complete(prompt, **fields)).text)["choices"][0]
    answer = await server.complete(prompt, stream=True, **fields)
    joined: dict[str, list[Any]] = {}
    for chunk in events(answer.text):
        for choice in chunk["choices"]:
            if choice["index"] == 0:
                for name, column in (choice["logprobs"] or {}).items():
                    joined.setdefault(name, []).extend(column)
    assert joined == plain["logprobs"]
    return plain["text"], plain["logprobs"]


@pytest.mark.parametrize("stop", [None, "llo", "zzz"])
@pytest.mark.parametrize("echo", [True, False])
@in_loop
async def test_text_offsets_point_at_their_tokens(echo: bool, stop: str | None) -> None:
    """B079: streamed and plain, with a prompt of 20 characters, with and without a stop."""
    prompt = "abc and 16 more char"
    async with house(engine()) as server:
        text, columns = await completion_columns(
            server, prompt, echo=echo, logprobs=1, stop=stop, max_tokens=5
        )
    offsets = columns["text_offset"]
    assert offsets == sorted(offsets)
    assert len(text) == len(offsets)
    for token, offset in zip(columns["tokens"], offsets, strict=True):
        assert text[offset] == token


@in_loop
async def test_entries_behind_a_stop_string_are_cut_with_the_text() -> None:
    async with house(engine()) as server:
        text, columns = await completion_columns(server, "stop", logprobs=0, stop="!c")
        assert (text, columns["tokens"]) == ("ab", ["a", "b"])
        text, columns = await completion_columns(
            server, "stop", logprobs=0, stop="!c", include_stop_str_in_output=True
        )
        assert (text, columns["tokens"]) == ("ab!c", ["a", "b", "!", "c"])
        entries = await chat_entries(server, "stop", stop=["!c"])
        assert [entry["token"] for entry in entries] == ["a", "b"]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["abc prompt", list(b"abc prompt")])
@in_loop
async def test_echo_scores_the_whole_prompt(prompt: Any, max_tokens: int) -> None:
    """B080: first entry null; the same on the second identical call (prefix cache)."""
    async with house(engine()) as server:
        fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
        for _ in range(2):
            text, columns = await completion_columns(server, prompt, **fields)
            assert text == "abc prompt" + "H" * max_tokens
            assert columns["tokens"] == list(text)
            expected = [None, *(fake_logprob(ord(c)) for c in text[1:])]
            assert columns["token_logprobs"] == expected
            assert columns["top_logprobs"][0] is None
        both = (await server.complete([prompt, prompt], **fields)).json()
        for choice in both["choices"]:
            assert choice["logprobs"]["token_logprobs"] == expected


@in_loop
async def test_prompt_scored_in_many_chunks_is_complete() -> None:
    """B080: 600 tokens with a step budget of 256."""
    async with house(engine()) as server:
        prompt = "abc " * 150
        _, columns = await completion_columns(
            server, prompt, echo=True, logprobs=0, max_tokens=2, n=2
        )
    assert len(columns["tokens"]) == 602
    assert columns["token_logprobs"].count(None) == 1
    assert "".join(columns["tokens"][:600]) == prompt
