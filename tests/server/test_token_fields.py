"""allowed_token_ids, bad_words and logit_bias over HTTP: how texts become ids, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.types import SamplingParams
from tests.support.http_server import TextEngine, house, in_loop
from tests.support.tokenizers import BYTE_VOCAB_SIZE


async def sampling_of(**fields: Any) -> SamplingParams:
    engine = TextEngine()
    async with house(engine) as server:
        answer = await server.complete("x", max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    (sampling,) = engine.by_request.values()
    return sampling


@in_loop
async def test_bad_words_come_at_the_beginning_and_inside_a_text() -> None:
    sampling = await sampling_of(bad_words=["ab", "é"])
    assert sampling.bad_words == (
        tuple(b"ab"),
        tuple(b" ab"),
        tuple("é".encode()),
        tuple(" é".encode()),
    )


@in_loop
async def test_logit_bias_takes_ids_and_texts_in_both_forms() -> None:
    """False is never, also where a constraint leaves nothing else: it is no bias, but a ban."""
    sampling = await sampling_of(logit_bias={"0000000000005": 1.5, "a": False}, bad_words=["b"])
    assert sampling.logit_bias == ((5, 1.5),)
    assert sampling.bad_words == ((98,), tuple(b" b"), (97,))
    given = [[5, False], ["ab", -2.5], [7, 1], [7, False], [5, 3], ["-", 2]]
    sampling = await sampling_of(logit_bias=given)
    assert sampling.logit_bias == ((5, 3), (45, 2), (97, -2.5), (98, -2.5))
    assert sampling.bad_words == ((7,),)


@in_loop
async def test_allowed_token_ids_reach_the_engine() -> None:
    assert (await sampling_of(allowed_token_ids=[9, 4, 9])).allowed_token_ids == (4, 9)
    assert (await sampling_of()).allowed_token_ids == ()


@in_loop
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [BYTE_VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1], "structured_outputs": {"regex": "a"}}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 101}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": [[1, 2, 3]]}, "logit_bias"),
        ({"logit_bias": [[-1, 2]]}, "logit_bias"),
        ({"logit_bias": [[1.5, 2]]}, "logit_bias"),
        ({"logit_bias": [[1, "x"]]}, "logit_bias"),
        ({"logit_bias": [[1, 200]]}, "logit_bias"),
    ],
    ids=str,
)
async def test_what_makes_no_sense_is_refused_by_name(fields: Any, param: str) -> None:
    async with house(TextEngine()) as server:
        answer = await server.client.post(
            "/v1/completions",
            content=json.dumps({"prompt": "x", "max_tokens": 1, **fields}),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
