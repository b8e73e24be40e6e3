"""Prompt lengths, and which prompts share what."""

from __future__ import annotations

import asyncio

import pytest

from bench.prompts import PROBES, UNCALIBRATED, WORDS, TokenPrompts, WordPrompts, calibrate
from bench.target import Prompt


async def two_a_word_and_five(prompt: Prompt) -> int | None:
    assert isinstance(prompt, str)
    return 5 + 2 * len(prompt.split())


async def unsaid(prompt: Prompt) -> int | None:
    del prompt
    return None


async def constant(prompt: Prompt) -> int | None:
    del prompt
    return 7


@pytest.mark.parametrize("tokens", [9, 128, 513, 6000])
def test_calibrated_prompts_have_the_wanted_length(tokens: int) -> None:
    line = asyncio.run(calibrate(two_a_word_and_five, 1))
    prompts = WordPrompts(1, line)
    counted = asyncio.run(two_a_word_and_five(prompts.prompt("a", tokens)))
    assert counted is not None
    assert abs(counted - tokens) <= 1


@pytest.mark.parametrize("count", [unsaid, constant])
def test_server_that_does_not_count_is_taken_at_a_token_a_word(count: object) -> None:
    line = asyncio.run(calibrate(count, 1))  # type: ignore[arg-type]
    assert line == UNCALIBRATED
    assert len(str(WordPrompts(1, line).prompt("a", 50)).split()) == 50


def test_words_are_distinct_and_probes_ascend() -> None:
    assert len(set(WORDS)) == len(WORDS) > 120
    assert PROBES[0] < PROBES[1]


def test_prompts_repeat_by_seed_and_key_and_share_nothing_else() -> None:
    first, again, other_seed = (WordPrompts(seed, UNCALIBRATED) for seed in (1, 1, 2))
    assert first.prompt("a", 40) == again.prompt("a", 40)
    assert first.prompt("a", 40) != first.prompt("b", 40)
    assert first.prompt("a", 40) != other_seed.prompt("a", 40)


@pytest.mark.parametrize("prompts", [WordPrompts(1, UNCALIBRATED), TokenPrompts(1, 10, 500)])
def test_shared_prefix_is_shared_and_tails_differ(prompts: WordPrompts | TokenPrompts) -> None:
    def units(key: str) -> list[object]:
        prompt = prompts.prompt_with_prefix(key, prefix_tokens=64, tail_tokens=8)
        return list(prompt.split() if isinstance(prompt, str) else prompt)

    one, two = units("one"), units("two")
    assert len(one) == len(two) == 72
    assert one[:64] == two[:64]
    assert one[64:] != two[64:]


@pytest.mark.parametrize("prompts", [WordPrompts(1, UNCALIBRATED), TokenPrompts(1, 10, 500)])
def test_equal_blocks_are_equal_tokens(prompts: WordPrompts | TokenPrompts) -> None:
    def units(keys: list[str], tokens: int) -> list[object]:
        prompt = prompts.prompt_of_blocks(keys, block_tokens=16, tokens=tokens)
        return list(prompt.split() if isinstance(prompt, str) else prompt)

    one, two = units(["0", "1", "2"], 40), units(["0", "1", "9"], 48)
    assert (len(one), len(two)) == (40, 48)
    assert one[:32] == two[:32]
    assert one[32:40] != two[32:40]


def test_token_prompts_are_exact_and_in_range() -> None:
    prompt = TokenPrompts(3, 100, 200).prompt("a", 333)
    assert len(prompt) == 333
    assert isinstance(prompt, tuple)
    assert all(100 <= token < 200 for token in prompt)
