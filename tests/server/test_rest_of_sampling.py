"""best_of, prompt_logprobs, suffix and continue_final_message over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.tokenizer import Tokenizer, load_tokenizer
from tests.support.http_server import CHAT, TextEngine, events, fake_logprob, house, in_loop, texts
from tests.support.tokenizers import CHATML, byte_level_backend, byte_tokenizer, write_directory


def mean_logprob(text: str) -> float:
    return sum(fake_logprob(byte) for byte in text.encode()) / len(text)


@in_loop
async def test_best_of_returns_the_most_probable_and_counts_them_all() -> None:
    async with house(TextEngine()) as server:
        body = {"max_tokens": 6, "seed": 5}
        every = (await server.complete("x", n=6, **body)).json()["choices"]
        answer = (await server.complete("x", n=2, best_of=6, **body)).json()
        same = (await server.complete("x", n=6, best_of=6, **body)).json()["choices"]
    ranked = sorted((choice["text"] for choice in every), key=mean_logprob, reverse=True)
    assert len({round(mean_logprob(text), 9) for text in ranked}) > 1
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [mean_logprob(choice["text"]) for choice in answer["choices"]] == pytest.approx(
        [mean_logprob(text) for text in ranked[:2]]
    )
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 36
    assert [choice["text"] for choice in same] == [choice["text"] for choice in every]


@in_loop
async def test_best_of_picks_for_each_prompt_by_itself() -> None:
    async with house(TextEngine({"aa": "one", "bb": "two"})) as server:
        choices = (await server.complete(["aa", "bb"], best_of=3)).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "one"), (1, "two")]


@in_loop
async def test_best_of_with_a_stream_or_below_n_is_refused() -> None:
    async with house(TextEngine()) as server:
        for fields in ({"best_of": 2, "stream": True}, {"best_of": 2, "n": 3}):
            answer = await server.complete("x", **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "best_of"
        assert (await server.complete("x", best_of=1, max_tokens=1, stream=True)).status_code == 200


@in_loop
async def test_prompt_logprobs_have_a_row_for_each_prompt_token() -> None:
    """B041 B077: null for the first, -inf as a number, the same for every choice of n."""
    async with house(TextEngine()) as server:
        body = (await server.complete("abc", max_tokens=1, n=2, prompt_logprobs=2)).json()
        chat = (await server.chat("abc", max_tokens=1, prompt_logprobs=0)).json()
    for choice in body["choices"]:
        first, *rows = choice["prompt_logprobs"]
        assert first is None
        assert [list(row) for row in rows] == [["98", "99"], ["99", "100"]]
        assert rows[0]["98"] == {
            "logprob": fake_logprob(98),
            "rank": 1,
            "decoded_token": "b",
        }
        assert rows[0]["99"]["logprob"] == -9999.0
    rows = chat["prompt_logprobs"]
    assert len(rows) == chat["usage"]["prompt_tokens"]
    assert [len(row) for row in rows[1:]] == [1] * (len(rows) - 1)


@in_loop
async def test_prompt_logprobs_in_a_stream_or_beside_echo_are_refused() -> None:
    async with house(TextEngine()) as server:
        stream = await server.complete("x", prompt_logprobs=1, stream=True)
        chat = await server.chat("x", prompt_logprobs=1, stream=True)
        echo = await server.complete("x", prompt_logprobs=1, echo=True, logprobs=1)
    assert [answer.status_code for answer in (stream, chat, echo)] == [400] * 3


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary with FIM tokens, within the scripted model's."""
    backend = byte_level_backend(259)
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    config: dict[str, Any] = {"tokenizer_config": {"eos_token": "</s>"}}
    path: Path = tmp_path_factory.mktemp("coder")
    return load_tokenizer(write_directory(path, backend, **config))


@in_loop
async def test_suffix_becomes_a_prompt_of_prefix_suffix_middle(coder: Tokenizer) -> None:
    engine = TextEngine()
    async with house(engine, tokenizer=coder) as server:
        answer = await server.complete("def ", suffix="return", max_tokens=1)
    assert answer.status_code == 200, answer.text
    (prompt,) = engine.prompts.values()
    text = coder.decode(prompt, skip_special_tokens=False)
    assert text == "<|fim_prefix|>def <|fim_suffix|>return<|fim_middle|>"


@in_loop
async def test_a_stream_before_a_suffix_adds_up_to_the_plain_answer(coder: Tokenizer) -> None:
    async with house(TextEngine({"def": "Hello."}), tokenizer=coder) as server:
        fields: dict[str, Any] = {"suffix": "return", "max_tokens": 5, "seed": 1}
        plain = (await server.complete("def ", **fields)).json()["choices"][0]["text"]
        stream = await server.complete("def ", **fields, stream=True)
        assert texts(events(stream.text)) == {0: plain}


@in_loop
async def test_suffix_without_fim_tokens_is_refused_and_empty_is_none() -> None:
    async with house(TextEngine()) as server:
        refused = await server.complete("a", suffix="b")
        accepted = await server.complete("a", suffix="", max_tokens=1)
        chat = await server.chat("a", suffix="b")
    assert refused.status_code == chat.status_code == 400
    assert refused.json()["error"]["param"] == "suffix"
    assert accepted.status_code == 200


@in_loop
@pytest.mark.parametrize("trims", [False, True])
async def test_final_message_is_continued_in_place(trims: bool) -> None:
    template = (
        CHATML.replace("message['content']", "message['content'] | trim") if trims else CHATML
    )
    engine = TextEngine()
    turns = [
        {"role": "user", "content": "Sure"},
        {"role": "assistant", "content": "Sure, the answer "},
    ]
    async with house(engine, tokenizer=byte_tokenizer(template)) as server:
        body = {"messages": turns, "max_tokens": 1, "continue_final_message": True}
        answer = await server.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    (prompt,) = engine.prompts.values()
    assert bytes(t for t in prompt if t < 256).endswith(b"assistant\nSure, the answer ")


@in_loop
@pytest.mark.parametrize(
    "said", ["<", "im", "_end|", ">", "assistant", "a<|im_end|>b", " x", "\n{ "]
)
@pytest.mark.parametrize("num_parts", [0, 1, 2])
async def test_a_final_message_is_found_whatever_it_says(said: str, num_parts: int) -> None:
    """Its words may stand in what the template writes behind it."""
    parts = [{"type": "text", "text": text} for text in ("Well:", said)[2 - num_parts :]]
    content: Any = parts if num_parts else said
    async with house(TextEngine()) as server:
        body = {
            "messages": [{"role": "assistant", "content": content}],
            "continue_final_message": True,
        }
        answer = await server.client.post("/apply-template", json=body)
    assert answer.status_code == 200, answer.text
    before = "<|im_start|>assistant\n" + ("Well:\n" if num_parts == 2 else "")
    assert answer.json()["prompt"] == before + said


@in_loop
@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": " "}]},
        {"add_generation_prompt": True},
    ],
    ids=["user last", "nothing to continue", "contradiction"],
)
async def test_what_cannot_be_continued_is_refused(change: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "assistant", "content": "a"}],
        "continue_final_message": True,
        "stream": True,
        **change,
    }
    async with house(TextEngine()) as server:
        answer = await server.client.post(CHAT, content=json.dumps(body))
    assert answer.status_code == 400, events(answer.text)
    assert answer.json()["error"]["param"] == "continue_final_message"
