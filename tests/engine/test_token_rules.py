"""allowed_token_ids and bad_words in the engine: kept at every depth and after a preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.loading import LoadedModel
from scheduler.types import FinishReason, Request, SamplingParams
from tests.engine.test_torch_engine import GREEDY, load_tiny, make_engine, random_prompt, serve

HOT = SamplingParams(temperature=2.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("rules"))


def requests_for(sampling: SamplingParams, count: int = 6) -> list[Request]:
    return [
        Request(
            id=f"r{index}",
            prompt=random_prompt(12, seed=index),
            max_tokens=40,
            sampling=replace(sampling, seed=index),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [128, 16])
def test_only_allowed_tokens_come(model: LoadedModel, num_blocks: int, depth: int) -> None:
    allowed = (3, 50, 51)
    served = serve(
        make_engine(model, num_blocks=num_blocks),
        requests_for(replace(HOT, allowed_token_ids=allowed)),
        depth=depth,
        watermark_blocks=0,
    )
    assert num_blocks == 128 or any(a.num_preemptions for a in served.answers.values())
    for tokens in served.token_ids.values():
        assert len(tokens) == 40
        assert set(tokens) <= set(allowed)
    assert len({token for tokens in served.token_ids.values() for token in tokens}) == 3


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [128, 16])
def test_bad_words_never_stand_in_the_answer(
    model: LoadedModel, num_blocks: int, depth: int
) -> None:
    """Of three tokens, so that the words would come up all the time."""
    words = ((3, 3), (3, 50, 51), (51, 51, 51), (50,))
    free = replace(HOT, allowed_token_ids=(3, 50, 51))
    for banned in (words[:3], words[3:]):
        served = serve(
            make_engine(model, num_blocks=num_blocks),
            requests_for(replace(free, bad_words=banned)),
            depth=depth,
            watermark_blocks=0,
        )
        for tokens in served.token_ids.values():
            assert len(tokens) == 40
            for word in banned:
                found = [tuple(tokens[i : i + len(word)]) for i in range(len(tokens))]
                assert word not in found


def test_word_that_begins_in_the_prompt_is_not_in_the_answer(model: LoadedModel) -> None:
    """The prompt's end is not the answer's: 7 may follow it although (5, 7) is banned."""
    sampling = replace(GREEDY, allowed_token_ids=(7,), bad_words=((5, 7),))
    request = Request(id="a", prompt=(9, 5), max_tokens=1, sampling=sampling)
    assert serve(make_engine(model), [request]).token_ids == {"a": [7]}


def test_rules_of_one_row_leave_the_others_alone(model: LoadedModel) -> None:
    free = Request(id="free", prompt=random_prompt(9, 1), max_tokens=12, sampling=GREEDY)
    bound = replace(free, id="bound", sampling=replace(GREEDY, allowed_token_ids=(4,)))
    alone = serve(make_engine(model), [free]).token_ids["free"]
    served = serve(make_engine(model), [bound, free])
    assert served.token_ids["free"] == alone
    assert served.token_ids["bound"] == [4] * 12


def test_no_token_left_is_an_error_of_its_row(model: LoadedModel) -> None:
    sampling = replace(GREEDY, allowed_token_ids=(4,), bad_words=((4,),))
    request = Request(id="a", prompt=(9, 5), max_tokens=3, sampling=sampling)
    assert serve(make_engine(model), [request]).answers["a"].reason is FinishReason.ERROR
