"""Tokenising, counting and rendering give exactly what generation works with."""

from __future__ import annotations

from typing import Any

from server.config import ServerConfig
from tests.support.http_server import MODEL_VOCAB_SIZE, House, TextEngine, house, in_loop
from tests.support.tokenizers import BYTE_VOCAB_SIZE

USER = [{"role": "user", "content": "greet me, čau"}]


async def post(server: House, path: str, **body: Any) -> dict[str, Any]:
    answer = await server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


@in_loop
async def test_what_is_tokenized_comes_back_by_detokenizing() -> None:
    async with house(TextEngine()) as server:
        text = "one two\n\u2028 čau \U0001f600"
        made = await post(server, "/tokenize", prompt=text, return_token_strs=True)
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["max_model_len"] == server.engine.capacity.max_model_len
        back = await post(server, "/detokenize", tokens=made["tokens"])
        assert back == {"prompt": text}


@in_loop
async def test_counts_are_those_of_a_generated_answer() -> None:
    """Plain and with tools, the template and the counters see the same prompt."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with house(TextEngine({"greet": "Hi"})) as server:
        for extra in ({}, {"tools": [tool]}):
            body = {"messages": USER, **extra}
            used = (await post(server, "/v1/chat/completions", **body))["usage"]["prompt_tokens"]
            path = "/v1/chat/completions/input_tokens"
            assert (await post(server, path, **body))["input_tokens"] == used
            tokens = await post(server, "/tokenize", **body)
            assert tokens["count"] == used
            text = (await post(server, "/apply-template", **body))["prompt"]
            back = await post(server, "/detokenize", tokens=tokens["tokens"])
            assert back["prompt"].endswith(text)
            assert "greet me, čau" in text


@in_loop
async def test_bad_bodies_are_refused_by_name() -> None:
    """Ids above the vocabulary, padding rows among them; two prompts; other models; no field."""
    bad = [
        ("/detokenize", {"tokens": [BYTE_VOCAB_SIZE]}, "tokens", 400),
        ("/detokenize", {"tokens": [MODEL_VOCAB_SIZE + 7]}, "tokens", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": [True]}, "tokens[0]", 400),
        ("/detokenize", {}, "tokens", 400),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt", 400),
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", 404),
        ("/apply-template", {"messages": []}, "messages", 400),
        ("/tokenize", {"prompt": "a", "guided_json": {}}, "guided_json", 400),
    ]
    async with house(TextEngine()) as server:
        for path, body, param, status in bad:
            answer = await server.client.post(path, json=body)
            assert answer.status_code == status, (path, body, answer.text)
            assert answer.json()["error"]["param"] == param
        long = "x" * (server.engine.capacity.max_model_len * 64)
        answer = await server.client.post("/tokenize", json={"prompt": long})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@in_loop
async def test_a_truncated_prompt_keeps_the_end_that_was_asked_for() -> None:
    """The usage tells the length, and the model sees these tokens and no others."""
    async with house(TextEngine({"tail": "T", "head": "H"})) as server:
        prompt = "head" + "." * 40 + "tail"
        whole = (await post(server, "/tokenize", prompt=prompt))["count"]

        async def cut(**fields: Any) -> tuple[str, int]:
            body = {"prompt": prompt, "max_tokens": 4, **fields}
            data = await post(server, "/v1/completions", **body)
            return data["choices"][0]["text"], data["usage"]["prompt_tokens"]

        assert await cut(truncate_prompt_tokens=10) == ("T", 10)
        assert await cut(truncate_prompt_tokens=10, truncation_side="right") == ("H", 10)
        assert (await cut(truncate_prompt_tokens=-1))[1] == whole
        assert (await cut(truncate_prompt_tokens=10_000))[1] == whole
        chat = {"messages": USER, "truncate_prompt_tokens": 5, "max_tokens": 2}
        data = await post(server, "/v1/chat/completions", **chat)
        assert data["usage"]["prompt_tokens"] == 5
        for fields in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 3, "echo": True}):
            answer = await server.client.post("/v1/completions", json={"prompt": prompt, **fields})
            assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


@in_loop
async def test_minus_one_makes_a_long_prompt_fit_with_its_answer() -> None:
    async with house(TextEngine()) as server:
        total = server.engine.capacity.max_model_len
        body: dict[str, Any] = {"prompt": "x" * (total + 50), "max_tokens": 7}
        answer = await server.client.post("/v1/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        data = await post(server, "/v1/completions", **body, truncate_prompt_tokens=-1)
        assert data["usage"]["prompt_tokens"] == total - 7
        assert data["usage"]["completion_tokens"] == 7


@in_loop
async def test_strict_requests_refuse_unknown_names_and_only_these() -> None:
    """Without the flag they are taken and named in a header."""
    body = {"prompt": "greet", "frobnicate": 1, "user": "u"}
    async with house(TextEngine({"greet": "Hi"})) as server:
        for path in ("/v1/completions", "/tokenize"):
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 200
            assert "frobnicate" in answer.headers["x-paceline-ignored-params"]
    async with house(TextEngine({"greet": "Hi"}), ServerConfig(strict_requests=True)) as server:
        for path in ("/v1/completions", "/tokenize"):
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("frobnicate", "unknown_parameter")
        known = {name: value for name, value in body.items() if name != "frobnicate"}
        assert (await server.client.post("/v1/completions", json=known)).status_code == 200


@in_loop
async def test_a_name_inside_an_object_is_told_like_one_outside() -> None:
    """A word misspelled there would else be dropped in silence; null is absent there too."""
    wish = {"scope": "tenant", "data_version": "1", "ttl": 5, "user": None}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/completions",
            {"prompt": "greet", "answer_cache": wish, "seed": 1},
            "answer_cache.ttl",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "stream": True, "stream_options": {"usage": True, "x": None}},
            "stream_options.usage",
        ),
        ("/v1/responses", {"input": "greet", "text": {"form": 1}}, "text.form"),
        (
            "/v1/responses",
            {"input": "greet", "tools": [{"type": "function", "name": "f", "cache": 1}]},
            "tools.cache",
        ),
    ]
    for strict in (False, True):
        config = ServerConfig(strict_requests=strict)
        async with house(TextEngine({"greet": "Hi"}), config) as server:
            for path, body, name in cases:
                answer = await server.client.post(path, json=body)
                if strict:
                    assert answer.json()["error"]["param"] == name
                else:
                    assert answer.headers["x-paceline-ignored-params"] == name
