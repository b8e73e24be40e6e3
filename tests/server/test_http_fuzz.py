"""Random bodies and random pairs of features: 200 or a written 4xx, never a 500, core alive."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.schemas import ChatRequest, CompletionRequest
from server.unserved import REFUSED
from tests.support.http_server import CHAT, COMPLETIONS, TextEngine, house, in_loop, run
from tests.support.tokenizers import IM_END

NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, "unknown"})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 30),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "text", "json_object", "auto", "required", "\x00", "<|im_end|>"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(bodies, min_size=12, max_size=12))
def test_random_fields_never_cause_a_server_error(many: list[dict[str, Any]]) -> None:
    """B031, B037, B038: with and without the fields that a request needs."""

    async def send() -> None:
        async with house(TextEngine({"greet": "Hello"})) as server:
            for path, base in itertools.product(
                (CHAT, COMPLETIONS),
                ({}, {"prompt": "greet", "messages": [{"role": "user", "content": "greet"}]}),
            ):
                for body in many:
                    # NaN and Infinity go out as such: Python writes what JSON forbids.
                    answer = await server.client.post(path, content=json.dumps({**base, **body}))
                    assert answer.status_code in (200, 400, 404), answer.text
                    if answer.status_code != 200:
                        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert (await server.chat("greet")).status_code == 200

    run(send)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=20, max_size=20))
def test_random_bytes_never_cause_a_server_error(many: list[bytes]) -> None:
    """B037."""

    async def send() -> None:
        async with house() as server:
            for data in many:
                for path in (CHAT, COMPLETIONS):
                    answer = await server.client.post(path, content=data)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["type"] == "invalid_request_error"

    run(send)


FEATURES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True},
    "echo_only": {"echo": True, "max_tokens": 0},
    "n": {"n": 3},
    "penalties": {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 4},
    "stop": {"stop": ["l", "zz"]},
    "include_stop": {"include_stop_str_in_output": True},
    "stop_ids": {"stop_token_ids": [IM_END, 0]},
    "bias": {"logit_bias": {"5": -100, "7": 3}},
    "seed": {"seed": -5},
    "greedy": {"temperature": 0},
    "narrow": {"top_k": 1, "top_p": 0.1, "min_p": 0.9},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "timings": {"timings": True},
    "ignore_eos": {"ignore_eos": True},
    "special": {"skip_special_tokens": False},
    "salt": {"cache_salt": "s"},
    "priority": {"priority": 5},
    "best_of": {"best_of": 4},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "never": {"logit_bias": {"9": False}, "bad_words": ["zz"]},
    "allowed": {"allowed_token_ids": list(range(250))},
    "cut": {"truncate_prompt_tokens": 5},
    "regex": {"structured_outputs": {"regex": "[a-z]{2,5}"}},
    "ids": {"prompt": list(b"greet me")},
    "batch": {"prompt": ["greet me", "other"]},
    "long": {"prompt": "greet me " * 60},
}
# These say in words why they cannot be together.
REFUSED_PAIRS = {
    frozenset(pair)
    for pair in (
        ("best_of", "stream"),
        ("prompt_logprobs", "stream"),
        ("prompt_logprobs", "echo"),
        ("prompt_logprobs", "echo_only"),
        ("cut", "echo"),
        ("cut", "echo_only"),
        ("allowed", "regex"),
        ("echo_only", "min_tokens"),
    )
}


@in_loop
async def test_every_pair_of_features_works() -> None:
    """B163: two by two, half of them at each pipeline depth; the engine lives after all of them."""
    pairs = list(itertools.combinations(FEATURES, 2))
    random.Random(3).shuffle(pairs)
    half = len(pairs) // 2
    for depth, part in ((0, pairs[:half]), (1, pairs[half:])):
        async with house(TextEngine({"greet": "Hello, all"}), depth=depth) as server:
            for first, second in part:
                body = {"prompt": "greet me", **FEATURES[first], **FEATURES[second]}
                answer = await server.client.post(COMPLETIONS, json=body)
                if {first, second} in REFUSED_PAIRS:
                    assert answer.status_code == 400, (first, second, answer.text)
                    continue
                assert answer.status_code == 200, (first, second, answer.text)
                assert "error" not in answer.text
            assert server.core.num_unfinished == 0
