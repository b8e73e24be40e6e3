"""Greedy answers equal transformers'; `python -m tests.e2e.greedy --full` is the long form."""

from __future__ import annotations

import pytest

from tests.e2e.engines import default_model_path
from tests.e2e.greedy import compare
from tests.e2e.prompts import prompt_ids

pytestmark = pytest.mark.model


def test_greedy_answers_equal_those_of_transformers() -> None:
    result = compare(prompt_ids(default_model_path())[::4], 32)
    assert (result.num_prompts, result.num_tokens) == (8, 32)
    assert result.different == ()
