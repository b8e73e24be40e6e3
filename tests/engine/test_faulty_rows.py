"""What cannot be served fails alone: a request with a fault, a number that is not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.loading import LoadedModel
from scheduler.types import FinishReason, Request, SamplingParams
from tests.engine.test_torch_engine import (
    GREEDY,
    Answer,
    ObservedRunner,
    alone,
    load_tiny,
    make_engine,
    mixed_requests,
    random_prompt,
    serve,
)
from tests.support.models import VOCAB_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def answers_alone(model: LoadedModel) -> dict[str, Answer]:
    return alone(model, mixed_requests())


FAULTY = {
    "token id": {"prompt": (1, VOCAB_SIZE)},
    "negative token id": {"prompt": (-1,)},
    "huge token id": {"prompt": (2**63,)},
    "stop id": {"stop_token_ids": (VOCAB_SIZE + 10,), "sampling": replace(GREEDY, min_tokens=1)},
    "negative stop id": {"stop_token_ids": (-5,), "sampling": replace(GREEDY, min_tokens=1)},
    "huge stop id": {"stop_token_ids": (2**40,), "sampling": replace(GREEDY, min_tokens=1)},
    "bias id": {"sampling": replace(GREEDY, logit_bias=((VOCAB_SIZE, 1.0),))},
    "temperature": {"sampling": SamplingParams(temperature=float("nan"))},
    "top_p": {"sampling": SamplingParams(top_p=float("nan"))},
    "bias value": {"sampling": replace(GREEDY, logit_bias=((1, float("inf")),))},
    "repetition_penalty": {"sampling": replace(GREEDY, repetition_penalty=0.0)},
}


@pytest.mark.parametrize("changes", FAULTY.values(), ids=FAULTY.keys())
@pytest.mark.parametrize("depth", [0, 1])
def test_request_that_slipped_through_fails_alone(
    model: LoadedModel,
    changes: dict[str, object],
    depth: int,
    answers_alone: dict[str, Answer],
) -> None:
    """B023 B025 B029: the server refuses these; should one come, its neighbours do not notice."""
    bad = Request(id="bad", prompt=(1, 2), max_tokens=4, sampling=GREEDY)
    requests = [*mixed_requests()[:3], replace(bad, **changes), *mixed_requests()[3:6]]
    served = serve(make_engine(model), requests, depth=depth)
    assert served.answers["bad"].reason is FinishReason.ERROR
    assert served.answers["bad"].token_ids == []
    for request in requests:
        if request is not requests[3]:
            expected = answers_alone[request.id].token_ids
            assert served.answers[request.id].token_ids == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_who_shares_the_prompt_of_a_faulty_request_has_its_own_answer(
    model: LoadedModel, depth: int
) -> None:
    good = Request(id="good", prompt=random_prompt(40, 3), max_tokens=5, sampling=GREEDY)
    bad = replace(good, id="bad", sampling=replace(GREEDY, top_p=float("nan")))
    longer = replace(good, id="longer", prompt=(*good.prompt, VOCAB_SIZE, *random_prompt(9, 4)))
    served = serve(make_engine(model), [bad, longer, good], depth=depth)
    assert served.prefix_hits > 0
    assert served.answers["bad"].reason is served.answers["longer"].reason is FinishReason.ERROR
    assert served.answers["good"].token_ids == alone(model, [good])["good"].token_ids


def test_row_that_turns_to_nan_fails_alone(
    model: LoadedModel, answers_alone: dict[str, Answer]
) -> None:
    poison = 77
    healthy = [
        request
        for request in mixed_requests()
        if poison not in request.prompt + tuple(answers_alone[request.id].token_ids)
    ]
    assert len(healthy) > 3
    engine = make_engine(model, runner=ObservedRunner(model, poison=poison))
    bad = Request(id="bad", prompt=(5, *random_prompt(9, 1), poison), max_tokens=3)
    served = serve(engine, [healthy[0], bad, *healthy[1:]], max_step_tokens=32)
    assert served.answers["bad"].reason is FinishReason.ERROR
    assert "not finite" in served.answers["bad"].message
    for request in healthy:
        assert served.answers[request.id].token_ids == answers_alone[request.id].token_ids


@pytest.mark.parametrize("place", [0, 20, 38, 39])
@pytest.mark.parametrize("max_step_tokens", [8, 256])
def test_a_broken_token_anywhere_in_a_prompt_fails_its_request(
    tmp_path: Path, place: int, max_step_tokens: int
) -> None:
    """Stored KV has zeros for it, so only its own hidden state tells."""
    broken = load_tiny("llama", tmp_path)
    token = VOCAB_SIZE - 1
    prompt = tuple(t % token for t in random_prompt(40, 1))
    good = Request(id="good", prompt=prompt, max_tokens=3, sampling=GREEDY)
    expected = alone(broken, [good])["good"].token_ids
    assert token not in expected
    broken.decoder.embedding[token] = torch.nan
    bad = replace(good, id="bad", prompt=(*prompt[:place], token, *prompt[place + 1 :]))
    served = serve(make_engine(broken), [good, bad], max_step_tokens=max_step_tokens)
    assert served.answers["bad"].reason is FinishReason.ERROR
    assert "not finite" in served.answers["bad"].message
    assert served.answers["bad"].token_ids == []
    assert served.answers["good"].token_ids == expected
