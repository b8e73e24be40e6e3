"""Text completions end to end: forms of a prompt, echo, stop strings, batches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_server import (
    House,
    TextEngine,
    events,
    finish_reasons,
    house,
    in_loop,
    texts,
)
from tests.support.tokenizers import EOS, IM_END

EMOJI = "😀"
MIXED = "a😀 ไทย č “q” z"


async def both(server: House, prompt: Any, **fields: Any) -> tuple[str, str]:
    """(text, finish_reason) of a plain answer; checks that the stream says the same."""
    answer = await server.complete(prompt, **fields)
    assert answer.status_code == 200, answer.text
    plain = answer.json()
    options = {"include_usage": True}
    streamed = await server.complete(prompt, stream=True, stream_options=options, **fields)
    chunks = events(streamed.text)
    expected = {choice["index"]: choice["text"] for choice in plain["choices"]}
    assert texts(chunks) == expected
    reasons = {choice["index"]: [choice["finish_reason"]] for choice in plain["choices"]}
    assert finish_reasons(chunks) == reasons
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == plain["usage"][key]
    empty = [
        chunk
        for chunk in chunks
        for choice in chunk["choices"]
        if not choice["text"] and choice["finish_reason"] is None
    ]
    assert not empty
    return plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]


@in_loop
async def test_all_forms_of_a_prompt_mean_the_same() -> None:
    async with house(TextEngine({"greet": "Hello"})) as server:
        ids = list(b"greet")
        for prompt in ("greet", ["greet"], ids, [ids]):
            body = (await server.complete(prompt)).json()
            assert body["object"] == "text_completion"
            assert body["choices"] == [
                {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
            ]
            assert body["usage"]["prompt_tokens"] == 5


@in_loop
async def test_list_of_prompts_equals_each_alone() -> None:
    """Choices count through prompts times n, in order; seeds do not depend on the neighbours."""
    async with house(TextEngine({"one": "1", "two": "22"})) as server:
        fields = {"n": 2, "seed": 9, "max_tokens": 8}
        prompts = ["one", "free", "two"]
        together = (await server.complete(prompts, **fields)).json()
        alone = [(await server.complete(prompt, **fields)).json() for prompt in prompts]
        await both(server, prompts, **fields)
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == expected
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    total = sum(answer["usage"]["total_tokens"] for answer in alone)
    assert together["usage"]["total_tokens"] == total


@in_loop
async def test_characters_of_several_tokens_are_never_broken() -> None:
    """B001: one byte a token."""
    async with house(TextEngine({"greet": MIXED})) as server:
        assert await both(server, "greet", max_tokens=100) == (MIXED, "stop")
        answer = await server.complete("greet", max_tokens=100, stream=True)
    pieces = [chunk["choices"][0]["text"] for chunk in events(answer.text)]
    assert not any("\ufffd" in piece for piece in pieces)


@in_loop
async def test_answer_that_ends_inside_a_character_ends_in_one_mark() -> None:
    """B001: only where the model really ended in the middle."""
    async with house(TextEngine({"greet": [*b"ok", *EMOJI.encode()[:3]]})) as server:
        assert await both(server, "greet", max_tokens=100) == ("ok\ufffd", "stop")
        assert await both(server, "greet", max_tokens=3) == ("ok\ufffd", "length")


@in_loop
async def test_prompt_that_ends_inside_a_character_does_not_come_back() -> None:
    """B002: the first delta is the completed character, never the prompt."""
    thai = "ท".encode()
    async with house(TextEngine({"Hello": [thai[2], *b"ok"]})) as server:
        prompt = [*b"Hello world ", *thai[:2]]
        assert await both(server, prompt, max_tokens=4) == ("ทok", "stop")


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["no", "DEFGHIJ"]])
@in_loop
async def test_stop_string_never_shows_however_it_is_split(stop: Any) -> None:
    """B004: one byte a token splits it at every border; merged tokens do not matter."""
    async with house(TextEngine({"greet": "ABC DEFGHIJ KLM"})) as server:
        text, reason = await both(server, "greet", stop=stop, max_tokens=50)
        assert (text, reason) == ("ABC ", "stop")
        text, reason = await both(
            server, "greet", stop=stop, max_tokens=50, include_stop_str_in_output=True
        )
        assert (text, reason) == ("ABC DEFGHIJ", "stop")


@in_loop
async def test_held_back_text_comes_out_at_the_end() -> None:
    """B005, B008: a stop string that never comes, nearly comes, or is cut off by the limit."""
    async with house(TextEngine({"greet": "some ZZZZ text ZZZ"})) as server:
        assert await both(server, "greet", stop=["ZZZZZZZZ"], max_tokens=99) == (
            "some ZZZZ text ZZZ",
            "stop",
        )
        assert await both(server, "greet", stop=["ZZZZZZZZ"], max_tokens=7) == ("some ZZ", "length")


@in_loop
async def test_usage_counts_the_tokens_up_to_the_stop_string() -> None:
    """However many the core had made before it heard of it."""
    async with house(TextEngine({"greet": "ab!cdefgh"})) as server:
        plain = (await server.complete("greet", stop="!")).json()
        assert plain["usage"]["completion_tokens"] == 3
        assert await server.metric("paceline_generated_tokens_total") == 3
        assert await server.metric("paceline_requests_finished_total", reason="stop") == 1


@in_loop
async def test_stop_token_cuts_no_text_and_is_counted() -> None:
    """B007: special or plain, shown only on request, the same in stream and plain answer."""
    scripts = {"special": [*b"Hello", IM_END], "plain": b"Hello!more"}
    async with house(TextEngine({k: list(v) for k, v in scripts.items()})) as server:
        fields = {"stop_token_ids": [IM_END, ord("!")], "ignore_eos": True, "max_tokens": 50}
        for prompt in scripts:
            assert await both(server, prompt, **fields) == ("Hello", "stop")
            usage = (await server.complete(prompt, **fields)).json()["usage"]
            assert usage["completion_tokens"] == 6
        shown = {**fields, "include_stop_str_in_output": True}
        assert await both(server, "plain", **shown) == ("Hello!", "stop")
        assert await both(server, "special", **shown) == ("Hello", "stop")
        shown["skip_special_tokens"] = False
        assert await both(server, "special", **shown) == ("Hello<|im_end|>", "stop")


@in_loop
async def test_special_tokens_are_text_only_on_request() -> None:
    async with house(TextEngine({"greet": [*b"a", IM_END, *b"b"]})) as server:
        fields = {"ignore_eos": True, "max_tokens": 3}
        assert await both(server, "greet", **fields) == ("ab", "length")
        fields["skip_special_tokens"] = False
        assert await both(server, "greet", **fields) == ("a<|im_end|>b", "length")


@in_loop
async def test_stop_string_before_min_tokens_is_text() -> None:
    """B086: only what is complete after min_tokens ends the answer."""
    async with house(TextEngine({"greet": "a\nbcd\nefgh\ni"})) as server:
        assert await both(server, "greet", stop=["\n"]) == ("a", "stop")
        assert await both(server, "greet", stop=["\n"], min_tokens=5) == ("a\nbcd", "stop")
        assert await both(server, "greet", stop=["\n"], min_tokens=6) == ("a\nbcd\nefgh", "stop")


@in_loop
async def test_ignored_eos_goes_on_to_the_limit() -> None:
    async with house(TextEngine({"greet": "ab"})) as server:
        assert await both(server, "greet", ignore_eos=True, max_tokens=5) == ("ab", "length")
        body = (await server.complete("greet", ignore_eos=True, max_tokens=5)).json()
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("prompt", ["greet 😀", list("greet 😀".encode()), ["greet a", "greet b"]])
@in_loop
async def test_echo_puts_the_prompt_before_the_text(prompt: Any) -> None:
    async with house(TextEngine({"greet": "Hello"})) as server:
        text, _ = await both(server, prompt, echo=True)
        silent, _ = await both(server, prompt)
    given = prompt if isinstance(prompt, str) else prompt[0]
    assert text == (given if isinstance(given, str) else "greet 😀") + silent


@in_loop
async def test_echo_without_new_tokens_returns_the_prompt() -> None:
    """B080: max_tokens 0."""
    async with house() as server:
        for prompt in ("a prompt", list(b"a prompt")):
            assert await both(server, prompt, echo=True, max_tokens=0) == ("a prompt", "length")
        body = (await server.complete("a prompt", echo=True, max_tokens=0)).json()
    assert body["usage"]["completion_tokens"] == 0


@in_loop
async def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    """The stated rule: cut, not refused; absent means 16 here, as the API has it."""
    async with house() as server:
        limit = server.core.info.max_model_len if server.core.info else 0
        body = (await server.complete("x" * (limit - 3), max_tokens=10**6)).json()
        assert body["usage"]["completion_tokens"] == 3
        assert body["choices"][0]["finish_reason"] == "length"
        whole = await server.complete("x" * limit, max_tokens=0, echo=True)
        assert whole.json()["usage"]["prompt_tokens"] == limit
        assert (await server.complete("x" * limit, max_tokens=1)).status_code == 400
        assert (await server.complete("x")).json()["usage"]["completion_tokens"] == 16
        chat = (await server.chat("x" * (limit - 60))).json()
    assert chat["usage"]["total_tokens"] == limit


@in_loop
async def test_two_eos_tokens_both_end_an_answer() -> None:
    """B085, on the server's side: both ids of the model reach the core, and min_tokens too."""
    async with house(TextEngine({"one": [97, EOS], "two": [97, IM_END]})) as server:
        for prompt in ("one", "two"):
            assert await both(server, prompt) == ("a", "stop")
            text, _ = await both(server, prompt, min_tokens=4, max_tokens=9)
            usage = (await server.complete(prompt, min_tokens=4, max_tokens=9)).json()["usage"]
            assert text == "a"
            assert usage["completion_tokens"] == 5
