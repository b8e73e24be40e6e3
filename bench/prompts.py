"""Prompts of a wanted length, made without a tokenizer.

It owns the words and how many of them make a token count. It must not know HTTP: the counting
function is handed in. Every prompt is a function of (seed, key), so runs repeat exactly, and two
keys share no prefix unless they are told to.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.target import Prompt

# Frequent words: with a space before them, each is one token of nearly every English BPE.
_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so said what up its about into than them can only other new some could "
    "time these two may then do first any my now such like our over man me even most made after "
    "also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long "
    "get here between both life being under never day same another know while last might us great "
    "old year off come since against go came right used take three"
)
WORDS = tuple(_TEXT.split())
PROBES = (64, 320)


@dataclass(frozen=True, slots=True)
class Calibration:
    """tokens = overhead + tokens_per_word * words, from what the server counted."""

    overhead: float
    tokens_per_word: float
    source: str

    def num_words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


UNCALIBRATED = Calibration(0.0, 1.0, "assumed: the server reports no usage.prompt_tokens")


async def calibrate(count: Callable[[Prompt], Awaitable[int | None]], seed: int) -> Calibration:
    """Ask for the token counts of two prompts and draw the line through them."""
    counts = []
    for words in PROBES:
        tokens = await count(" ".join(_words(random.Random(f"{seed}:calibrate"), words)))
        if tokens is None:
            return UNCALIBRATED
        counts.append(tokens)
    slope = (counts[1] - counts[0]) / (PROBES[1] - PROBES[0])
    if slope <= 0:
        return UNCALIBRATED
    overhead = counts[0] - slope * PROBES[0]
    return Calibration(overhead, slope, "usage.prompt_tokens of two probes")


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Text prompts of about so many tokens, the template's and BOS included."""

    seed: int
    calibration: Calibration

    def prompt(self, key: str, tokens: int) -> Prompt:
        return " ".join(_words(self._rng(key), self.calibration.num_words(tokens)))

    def prompt_with_prefix(self, key: str, *, prefix_tokens: int, tail_tokens: int) -> Prompt:
        """The same first part for every key, then a part of its own."""
        both = self.calibration.num_words(prefix_tokens + tail_tokens)
        tail = max(1, round(tail_tokens / self.calibration.tokens_per_word))
        shared = _words(self._rng("shared prefix"), max(0, both - tail))
        return " ".join([*shared, *_words(self._rng(key), tail)])

    def prompt_of_blocks(
        self, block_keys: Sequence[str], *, block_tokens: int, tokens: int
    ) -> Prompt:
        """Blocks with equal keys have equal words; the last block is cut to fit `tokens`."""
        wanted = self.calibration.num_words(tokens)
        per_block = max(1, round(block_tokens / self.calibration.tokens_per_word))
        words: list[str] = []
        for key in block_keys:
            words += _words(self._rng(f"block {key}"), min(per_block, wanted - len(words)))
        words += _words(
            self._rng("rest of " + (block_keys[-1] if block_keys else "")),
            max(0, wanted - len(words)),
        )
        return " ".join(words)

    def _rng(self, key: str) -> random.Random:
        return random.Random(f"{self.seed}:{key}")


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts as exact lists of random token ids, for /v1/completions of servers that take them."""

    seed: int
    first_id: int
    last_id: int

    def prompt(self, key: str, tokens: int) -> Prompt:
        return self._ids(key, tokens)

    def prompt_with_prefix(self, key: str, *, prefix_tokens: int, tail_tokens: int) -> Prompt:
        return self._ids("shared prefix", prefix_tokens) + self._ids(key, tail_tokens)

    def prompt_of_blocks(
        self, block_keys: Sequence[str], *, block_tokens: int, tokens: int
    ) -> Prompt:
        ids: tuple[int, ...] = ()
        for key in block_keys:
            ids += self._ids(f"block {key}", block_tokens)
        return (ids + self._ids("rest", max(0, tokens - len(ids))))[:tokens]

    def _ids(self, key: str, count: int) -> tuple[int, ...]:
        rng = random.Random(f"{self.seed}:{key}")
        return tuple(rng.choices(range(self.first_id, self.last_id), k=count))


Prompts = WordPrompts | TokenPrompts


def _words(rng: random.Random, count: int) -> list[str]:
    return rng.choices(WORDS, k=max(0, count))
