"""Bad bodies: each gets a 4xx in the envelope that names the field, before any event."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.schemas import ChatRequest, CompletionRequest
from server.unserved import REFUSED
from tests.support import http_server
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    MODEL_VOCAB_SIZE,
    TextEngine,
    events,
    house,
    in_loop,
    texts,
)
from tests.support.refusals import USER, greeter, refused, refused_field
from tests.support.tokenizers import BYTE_VOCAB_SIZE, IM_END, byte_tokenizer

BASES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "greet"}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_body_that_is_no_json_object_is_refused(path: str) -> None:
    """B037."""
    good = json.dumps(BASES[path]).encode()
    bodies = [b"[]", b"[1]", b'"x"', b"1", b"true", b"null", b"", b"{", b'{"a":1}{"b":2}', b"NaN"]
    bodies += [b"\xef\xbb\xbf" + good, good[:-1] + b',"user":"\xff"}', b"\x00", good + b"x"]
    bodies += [good[:-1] + b',"temperature":1e999}', good[:-1] + b",}", good.replace(b'"', b"'")]
    bodies += [good.decode().encode("utf-16"), b"9" * 5000]
    async with house(greeter()) as server:
        for body in bodies:
            await refused(server, path, body)
        assert (await server.client.post(path, content=good)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_of_a_key_given_twice_the_last_wins(path: str) -> None:
    """B037: the stated rule."""
    base = json.dumps(BASES[path])[:-1]
    async with house(greeter()) as server:
        answer = await server.client.post(path, content=base + ',"max_tokens":5,"max_tokens":2}')
        assert answer.json()["usage"]["completion_tokens"] == 2


@in_loop
async def test_deep_nesting_is_refused() -> None:
    """100,000 levels, open or closed, in a known field and in an unknown one."""
    async with house(greeter()) as server:
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"1}")):
            deep = opening * 100_000 + (b"1" if closing == b"]" else b"") + closing * 100_000
            await refused(server, COMPLETIONS, b'{"prompt":' + deep + b"}")
            await refused(server, COMPLETIONS, b'{"prompt":"a","x":' + deep + b"}")
            await refused(server, CHAT, opening * 100_000)


@in_loop
async def test_numbers_that_are_none_are_refused() -> None:
    """B029: NaN and infinities, however they are written, in every number field."""
    numbers = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"]
    numbers += ["repetition_penalty", "top_k", "seed", "max_tokens", "n", "priority"]
    async with house(greeter()) as server:
        for name in numbers:
            for value in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"nan"', "true", "{}"):
                body = f'{{"prompt":"greet","{name}":{value}}}'.encode()
                await refused(server, COMPLETIONS, body)
        for value in ("NaN", "1e400", "true", '"1"', "101", "-100.5"):
            body = f'{{"prompt":"greet","logit_bias":{{"5":{value}}}}}'.encode()
            await refused(server, COMPLETIONS, body)
        assert (await server.complete("greet")).status_code == 200


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@in_loop
async def test_a_message_without_content_is_refused_by_place(role: str) -> None:
    """Only an assistant may say nothing, beside its tool calls."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    async with house(greeter()) as server:
        for message in ({"role": role}, {"role": role, "content": None}):
            body = json.dumps({"messages": [*USER, message]}).encode()
            error = await refused(server, CHAT, body)
            assert error["param"] == "messages[1].content"
            assert error["code"] == "missing_required_parameter"
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        heard = {"role": "tool", "tool_call_id": "a", "content": "greet"}
        answer = await server.client.post(CHAT, json={"messages": [*USER, said, heard]})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": {}}, "a JSON array"),
        ({"messages": [1]}, "a JSON object"),
        ({"messages": [{"role": "user", "content": 5}]}, "be a string"),
        ({"stream_options": 1}, "a JSON object"),
        ({"metadata": []}, "a JSON object"),
        ({"metadata": {str(i): "a" for i in range(20)}}, "The object should have at most 16 items"),
        ({"messages": [{"role": "user", "content": "a", "audio": {}}]}, "be null"),
        ({"stream_options": {"include_obfuscation": True}}, "be false"),
        ({"model": 5}, "be a string"),
    ],
)
@in_loop
async def test_a_wrong_type_is_told_in_the_words_of_json(
    fields: dict[str, Any], words: str
) -> None:
    async with house(greeter()) as server:
        error = await refused(server, CHAT, json.dumps({"messages": USER, **fields}).encode())
        assert words in error["message"]
        for word in ("dictionary", "instance", "List", "None", "True", "False"):
            assert word not in error["message"]


BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", [], 10**400],
    "top_p": [-0.1, 1.0000001, "1"],
    "top_k": [0.01, 1.0, -2, "5", 2**63, 10**30, True],  # B034
    "min_p": [1.5, -0.1],
    "presence_penalty": [2.1, -2.1],
    "frequency_penalty": [2.1, -2.1],
    "repetition_penalty": [0, -1, 1e9],
    "n": [0, -1, 129, 1.5, True, "2", 10**20],
    "seed": [1.5, 2**63, -(2**63) - 1, "1"],
    "max_tokens": [-1, 1.5, "5", True, 2**63],
    "max_completion_tokens": [0, -1, 1.5, True],
    "min_tokens": [-1, 1.5, 10**20],
    "stop": ["", [""], ["a"] * 5, [1], {"a": 1}, 5, ["x" * 5000], [["a"]]],
    "stop_token_ids": [  # B025
        [MODEL_VOCAB_SIZE + 10],
        [BYTE_VOCAB_SIZE],
        [-5],
        [2**40],
        ["a"],
        [1.5],
        [True],
        5,
    ],
    "logit_bias": [
        {"x": True},
        {"-1": 1},
        {"1.5": 1},
        {" 1": 1},
        {"٣": 1},
        {str(BYTE_VOCAB_SIZE): 1},
        {"9" * 30: 1},
        {"5": 101},
        [1],
        {str(i): 1 for i in range(2000)},
    ],
    "stream": [1, "true", []],
    "echo": [1, "true"],
    "timings": [1, "yes"],
    "ignore_eos": [1],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [0],
    "priority": [101, -101, 1.5, True],
    "cache_salt": ["", "x" * 129, 5, ["a"]],
    "user": [5, "x" * 2000],
    "best_of": [0, 129, 1.5],
    "prompt_logprobs": [-1, 21, 10**9, True],
    "thinking_token_budget": [-2, 1.5],
    "reasoning_effort": ["huge", 1],
    "add_generation_prompt": ["yes"],
    "metadata": [{"a": 1}, "x", {str(i): "" for i in range(17)}],
}


@pytest.mark.parametrize("name", sorted(BAD_VALUES))
@in_loop
async def test_bad_value_is_refused_by_name(name: str) -> None:
    """B025, B029, B034, B041."""
    async with house(greeter()) as server:
        for value in BAD_VALUES[name]:
            if name == "stream":
                body = json.dumps({"prompt": "greet", "stream": value}).encode()
                await refused(server, COMPLETIONS, body, param="stream")
            else:
                await refused_field(server, name, value)


NEUTRAL: dict[str, list[Any]] = {
    "temperature": [0, 1e-8, 5e-324, 1e-5, 2],  # B032
    "top_p": [0, 1e-4, 1],
    "top_k": [-1, 0, 1, 9999999, MODEL_VOCAB_SIZE, 2**62],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "stop": ["x", [], ["a", "b", "c", "d"]],
    "logit_bias": [{}, {"5": -100}, {"5": 100.0}],
    "seed": [-(2**63), 2**63 - 1, 0],
    "service_tier": ["auto"],
    "store": [False],
    "metadata": [{"a": "b"}],
    "parallel_tool_calls": [True],
    "max_completion_tokens": [5],
    "priority": [-100, 100],
    "n": [1, 16],
}


@pytest.mark.parametrize("name", sorted(NEUTRAL))
@in_loop
async def test_good_value_is_taken(name: str) -> None:
    async with house(greeter()) as server:
        for value in NEUTRAL[name]:
            answer = await server.chat("greet", **{"max_tokens": 5, name: value})
            assert answer.status_code == 200, (value, answer.text)


@in_loop
async def test_field_that_we_do_not_serve_is_refused_by_name() -> None:
    """Invariant 11: a constraint is never silently dropped."""
    values: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "suffix": "end",
        "modalities": ["text", "audio"],
        "reasoning_effort": "high",
        "store": True,
        "service_tier": "flex",
        "verbosity": "low",
        "continue_final_message": True,
        "use_beam_search": True,
        "guided_json": {},
        "guided_regex": "a+",
        "chat_template": "{{ 'A' * 10**9 }}",  # B154
        "prompt_embeds": "AAAA",  # B157
        "prompt_logprobs": -1,  # B041
    }
    values = dict.fromkeys(REFUSED, "x") | values
    async with house(greeter()) as server:
        for name, value in values.items():
            for path, schema, base in (
                (CHAT, ChatRequest, {"messages": USER}),
                (COMPLETIONS, CompletionRequest, {"prompt": "greet"}),
            ):
                if name in schema.model_fields:
                    continue  # served at this endpoint
                body = json.dumps({**base, name: value, "stream": True}).encode()
                error = await refused(server, path, body, param=name)
                assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adapter_id", "someone/adapter"),  # otherwise the base model would answer
        ("lora_request", {"lora_name": "a", "lora_int_id": 1}),
        ("extra_body", {"guided_json": {"type": "object"}}),
        ("sampling_params", {"max_new_tokens": 5}),
        ("options", {"num_predict": 5}),
        ("n_cmpl", 3),
        ("eos_token_id", [5]),
        ("input_ids", [1, 2]),
        ("thinking_budget", 0),
        ("truncate", 100),
    ],
)
@in_loop
async def test_what_other_servers_would_have_obeyed_is_refused(name: str, value: Any) -> None:
    """B061, B160: an adapter, a bag of constraints, a limit or a prompt by another name."""
    async with house(greeter()) as server:
        await refused_field(server, name, value)
        error = await refused(
            server,
            "/v1/embeddings",
            json.dumps({"input": "greet", name: value}).encode(),
            param=name,
        )
        assert error["code"] == "unsupported_parameter"


@in_loop
async def test_stored_zero_is_not_false() -> None:
    async with house(greeter()) as server:
        await refused_field(server, "store", 0)


def example(name: str) -> Any:
    values: dict[str, Any] = {"messages": USER, "prompt": "greet"}
    return values.get(name)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path, schema in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest))
        for name in (*schema.model_fields, *REFUSED)
        if name not in ("messages", "prompt")
    ],
)
@in_loop
async def test_null_equals_absent(path: str, name: str) -> None:
    """B038: for every field, known or refused."""
    base = {"seed": 1, **BASES[path]}
    base.pop(name, None)
    async with house(greeter()) as server:
        absent = await server.client.post(path, json=base)
        null = await server.client.post(path, json={**base, name: None})
    assert absent.status_code == null.status_code == 200, null.text
    assert absent.json()["choices"] == null.json()["choices"]
    used = [answer.json()["usage"]["total_tokens"] for answer in (absent, null)]
    assert used[0] == used[1]
    assert absent.headers.get("x-paceline-ignored-params") == null.headers.get(
        "x-paceline-ignored-params"
    )


@in_loop
async def test_null_inside_stream_options_equals_absent() -> None:
    async with house(greeter()) as server:
        options = {"include_usage": None, "continuous_usage_stats": None}
        answer = await server.chat("greet", stream=True, stream_options=options)
    assert texts(events(answer.text)) == {0: "Hello"}


@in_loop
async def test_what_was_refused_is_said_again() -> None:
    said = [{"type": "text", "text": "No:"}, {"type": "refusal", "refusal": "greet"}]
    engine = greeter()
    async with house(engine) as server:
        turns = [*USER, {"role": "assistant", "content": said}, *USER]
        answer = await server.client.post(CHAT, json={"messages": turns})
        assert answer.status_code == 200, answer.text
        wrong = {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}
        await refused(server, CHAT, json.dumps(wrong).encode(), param="messages")
    (prompt,) = engine.prompts.values()
    assert b"No:\ngreet" in bytes(token for token in prompt if token < 256)


@in_loop
async def test_null_equals_absent_inside_messages_too() -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None, "x": None}}
    turns = [
        {"role": "user", "name": None, "content": [{"type": "text", "text": "greet", "z": None}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "audio": None},
    ]
    async with house(greeter()) as server:
        answer = await server.client.post(CHAT, json={"messages": turns})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"


@in_loop
async def test_stream_options_without_stream_are_refused() -> None:
    """B038."""
    async with house(greeter()) as server:
        for options in ({}, {"include_usage": True}):
            body = json.dumps({"prompt": "greet", "stream_options": options}).encode()
            await refused(server, COMPLETIONS, body, param="stream_options")


@in_loop
async def test_unknown_field_is_taken_and_reported() -> None:
    """B038, B164: the stated rule; names come back harmless and cut."""
    async with house(greeter()) as server:
        answer = await server.chat("greet", foo=1, user="me", **{"x\r\ny: z": 2, "é" * 500: 3})
        many = await server.chat("greet", stream=True, **{f"field{i}": i for i in range(500)})
        plain = await server.chat("greet")
    assert answer.status_code == 200
    reported = answer.headers["x-paceline-ignored-params"]
    assert reported.startswith("user, foo, x??y??z, ????")
    assert len(reported) < 200
    assert len(many.headers["x-paceline-ignored-params"]) < 1000
    assert "x-paceline-ignored-params" not in plain.headers


@in_loop
async def test_empty_prompt_is_refused() -> None:
    """B022: in all its forms, while another request goes on."""
    async with house(TextEngine({"greet": "Hello" * 20}, step_seconds=0.002)) as server:
        other = asyncio.create_task(server.complete("greet", max_tokens=200))
        for prompt in ("", [""], [], [[]], ["ok", ""], [[1], []], None, {}, 5, True):
            body = json.dumps({"prompt": prompt}).encode()
            await refused(server, COMPLETIONS, body, param="prompt")
        await refused(server, COMPLETIONS, b"{}", param="prompt")
        await refused(server, CHAT, b'{"messages":[]}', param="messages")
        await refused(server, CHAT, b"{}", param="messages")
        assert (await server.client.get("/health")).status_code == 200
        assert (await other).json()["choices"][0]["text"] == "Hello" * 20


@in_loop
async def test_template_that_renders_nothing_is_refused() -> None:
    """B022."""
    tokenizer = byte_tokenizer("{{ '' }}")
    assert tokenizer.chat_template is not None
    try:
        async with house(tokenizer=tokenizer) as server:
            await refused(server, CHAT, json.dumps({"messages": USER}).encode(), param="messages")
    finally:
        tokenizer.chat_template.close()


@in_loop
async def test_a_text_with_a_token_that_the_model_has_no_row_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B148: a tokenizer with more tokens than the model; its longest ids are those of markers."""
    monkeypatch.setattr(http_server, "MODEL_VOCAB_SIZE", IM_END)
    async with house() as server:
        for response in (await server.complete("a<|im_end|>"), await server.chat("hi")):
            assert response.status_code == 400
            assert "'<|im_end|>'" in response.json()["error"]["message"]
        assert (await server.complete("a", max_tokens=2)).status_code == 200


@in_loop
async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    """B023, B026: ids of padding rows too."""
    async with house(greeter()) as server:
        bad: list[Any] = [[BYTE_VOCAB_SIZE], [MODEL_VOCAB_SIZE], [-1], [2**31], [2**63]]
        bad += [[5279552648203111001], [1.5], [True], ["a", 1], [[1], 2], [[1], "a"], [[[1]]]]
        bad += [[[1], [BYTE_VOCAB_SIZE]], [None], [10**40]]
        for prompt in bad:
            body = json.dumps({"prompt": prompt}).encode()
            await refused(server, COMPLETIONS, body, param="prompt")


@in_loop
async def test_bad_messages_are_refused_by_index() -> None:
    async with house(greeter()) as server:
        for message in (
            "x",
            {"role": "user", "content": 5},
            {"role": "wizard", "content": "x"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            {"role": "user", "content": [{"type": "text"}]},
            {"role": "user", "content": ["x"]},
            {"content": "x"},
            {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
            {"role": "assistant", "content": "x", "prefix": True},
            {"role": "assistant", "content": "x", "partial": True},
            {"role": "assistant", "audio": {"id": "a"}},
            None,
        ):
            body = json.dumps({"messages": [*USER, message]}).encode()
            error = await refused(server, CHAT, body, param="messages")
            assert error["param"].startswith("messages[1]")


@in_loop
async def test_lone_surrogate_is_refused_wherever_it_stands() -> None:
    """B031: the pair is one emoji."""
    places = [
        '"messages":[{"role":"user","content":"@"}]',
        '"messages":[{"role":"user","content":[{"type":"text","text":"@"}]}]',
        '"messages":[{"role":"user","content":"a","name":"@"}]',
        '"messages":[{"role":"user","content":"a"}],"stop":"@"',
        '"messages":[{"role":"user","content":"a"}],"user":"@"',
        '"messages":[{"role":"user","content":"a"}],"@":1',
    ]
    async with house(greeter()) as server:
        for place in places:
            for stream in ("", ',"stream":true'):
                for lone in (r"\ud800", r"\udc00", r"x\udfffx", r"\ud800\ud800", r"\ud83dx"):
                    body = f"{{{place.replace('@', lone)}{stream}}}".encode()
                    await refused(server, CHAT, body)
        await refused(server, COMPLETIONS, rb'{"prompt":"\ud800"}')
        emoji = await server.client.post(COMPLETIONS, content=rb'{"prompt":"\ud83d\ude00"}')
    assert emoji.json()["usage"]["prompt_tokens"] == 4


@in_loop
async def test_a_field_is_called_what_it_is_called_in_the_body() -> None:
    """B046: not by the names that a validator gives to the forms of a value."""
    cases: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x" * 2000]}, "stop[0]"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            CHAT,
            {"messages": USER, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
    ]
    async with house(greeter()) as server:
        for path, body, param in cases:
            error = await refused(server, path, json.dumps(body).encode())
            assert error["param"] == param
            assert "constrained" not in error["message"]
