"""Invariant 10 on the default model; `python -m tests.e2e.same_answer` is the long form."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler.types import Request
from tests.e2e.engines import default_model_path
from tests.e2e.prompts import prompt_ids
from tests.e2e.same_answer import differences, make_requests

pytestmark = pytest.mark.model


def assert_the_same_in_every_way(kind: str, requests: Sequence[Request]) -> None:
    """B082: alone, in a batch, in chunks, preempted, from the cache, at depth 0 and 1."""
    found = differences(kind, requests)
    assert len(found) == 9
    assert not any(found.values()), found


@pytest.mark.parametrize(("kind", "count"), [("native", 16), ("native, int16 KV", 16)])
def test_the_way_of_serving_changes_no_token_of_the_native_engine(kind: str, count: int) -> None:
    """Answers of up to 12 tokens take every chat beyond a border of blocks."""
    requests = make_requests(prompt_ids(default_model_path())[:count], 12)
    assert_the_same_in_every_way(kind, requests)


def test_the_way_of_serving_changes_no_token_of_the_reference() -> None:
    """Three short requests, since float32 in torch is slow; each needs a second block."""
    prompts = [ids[:15] for ids in prompt_ids(default_model_path())[10:] if len(ids) > 20]
    assert_the_same_in_every_way("reference", make_requests(prompts[:3], 6))
