"""One choice, without HTTP: however its tokens are cut into events, it shows the same."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.types import Finished, FinishReason, TokenLogprobs, Tokens
from server.choice import Choice, Echo, TextRules
from server.logprobs import Entry
from server.reading import Reading
from server.reasoning import Thinking
from tests.support.http_server import shared_tokenizer
from tests.support.tokenizers import EOS, IM_END

# Bytes that make characters of several tokens, broken ones, stop strings and near misses.
ids = st.lists(st.sampled_from([*b"aab!b", *"😀".encode(), 0xC4, 0x8D, IM_END]), max_size=24)
rules = st.builds(
    TextRules,
    stops=st.sets(st.sampled_from(["ab", "aab", "b!", "😀", "č!", "a", "bbb"]), max_size=3).map(
        lambda found: tuple(sorted(found))
    ),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.sampled_from([frozenset({EOS}), frozenset({EOS, IM_END}), frozenset()]),
    logprobs=st.just(True),
)


@dataclass(frozen=True, slots=True)
class Shown:
    text: str
    entries: tuple[Entry, ...]
    reason: FinishReason
    num_tokens: int


def core_tokens(token_ids: list[int], rule: TextRules) -> tuple[list[int], FinishReason]:
    """What the core would make of the script: it ends at a stop token, else at the limit."""
    for index, token_id in enumerate(token_ids):
        if token_id in rule.stop_token_ids and index + 1 > rule.min_tokens:
            return token_ids[: index + 1], FinishReason.STOP
    return token_ids, FinishReason.LENGTH


def play(
    token_ids: list[int], rule: TextRules, cuts: set[int], echo: Echo | None, skip: bool
) -> Shown:
    made, reason = core_tokens(token_ids, rule)
    detokenizer = shared_tokenizer().detokenizer((), skip_special_tokens=skip)
    choice = Choice(rule, detokenizer, echo)
    deltas = []
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(made)), len(made)]
    for begin, end in pairwise(edges):
        part = made[begin:end]
        if not part:
            continue
        logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in part)
        prompt = ()
        if begin == 0 and echo is not None:
            prompt = tuple(TokenLogprobs(token_id, -2.0) for token_id in echo.token_ids[1:])
        deltas.append(choice.add(Tokens("r", tuple(part), logprobs, prompt)))
    if not made and echo is not None:
        prompt = tuple(TokenLogprobs(token_id, -2.0) for token_id in echo.token_ids[1:])
        deltas.append(choice.add(Tokens("r", (), (), prompt)))
    deltas.append(choice.end(Finished("r", reason)))
    assert choice.finish_reason is not None
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    assert reasons == [choice.finish_reason]  # told once, and nothing after it
    told = [bool(delta.finish_reason) for delta in deltas].index(True)
    assert not any(bool(delta) for delta in deltas[told + 1 :])
    return Shown(
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.entries),
        choice.finish_reason,
        choice.num_tokens,
    )


def expected_text(token_ids: list[int], rule: TextRules, skip: bool) -> str:
    """By definition: decode all, then cut at the stop string that is complete first."""
    made, reason = core_tokens(token_ids, rule)
    tokenizer = shared_tokenizer()
    stopped_by_token = reason is FinishReason.STOP
    shown = made[:-1] if stopped_by_token and not rule.include_stop else made
    for count in range(1, len(shown) + 1):
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip)
        text = "".join(detokenizer.add([token_id]) for token_id in shown[:count])
        before = tokenizer.detokenizer((), skip_special_tokens=skip)
        known = len("".join(before.add([token_id]) for token_id in shown[: count - 1]))
        if count <= rule.min_tokens:
            continue
        ends = [
            (end, -len(stop), stop)
            for stop in rule.stops
            for end in range(known + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, _, stop = min(ends)
            return text[: end if rule.include_stop else end - len(stop)]
    return tokenizer.decode(shown, skip_special_tokens=skip)


@settings(max_examples=600, deadline=None)
@given(ids, rules, st.sets(st.integers(1, 23)), st.sets(st.integers(1, 23)), st.booleans())
def test_cutting_tokens_into_events_changes_nothing(
    token_ids: list[int], rule: TextRules, cuts: set[int], other_cuts: set[int], skip: bool
) -> None:
    """B001, B004, B005, B007: text, entries, reason and count; slow readers get merged events."""
    one = play(token_ids, rule, cuts, None, skip)
    other = play(token_ids, rule, other_cuts, None, skip)
    assert one == other
    assert one.text == expected_text(token_ids, rule, skip)


@settings(max_examples=300, deadline=None)
@given(ids, rules, st.sets(st.integers(1, 23)), st.booleans())
def test_entries_lie_within_the_text_and_spell_it(
    token_ids: list[int], rule: TextRules, cuts: set[int], skip: bool
) -> None:
    """B074, B079: offsets rise; without a cut the bytes of the entries are the text's."""
    echo = Echo("Pq", (80, 113), (0, 1), logprobs=True)
    shown = play(token_ids, rule, cuts, echo, skip)
    assert shown.text.startswith("Pq")
    assert [entry.token_id for entry in shown.entries[:2]] == [80, 113]
    assert shown.entries[0].logprobs is None
    assert [entry.offset for entry in shown.entries[:2]] == [0, 1]
    offsets = [entry.offset for entry in shown.entries]
    assert offsets == sorted(offsets)
    assert all(offset <= len(shown.text) for offset in offsets)
    assert len(shown.entries) - 2 <= shown.num_tokens
    if not rule.stops and not skip:
        data = b"".join(shared_tokenizer().token_bytes(e.token_id) for e in shown.entries)
        assert data.decode(errors="replace") == shown.text


def test_delta_of_nothing_is_empty() -> None:
    choice = Choice(TextRules(), shared_tokenizer().detokenizer((), skip_special_tokens=True))
    assert not choice.add(Tokens("r", (0xF0,)))
    assert not choice.add(Tokens("r", (0x9F, 0x98)))
    delta: Any = choice.add(Tokens("r", (0x80, 97)))
    assert delta.text == "😀a"


thoughtful = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "\n", "a", "b", "ab", "</", "!"]),
    max_size=14,
)


def by_definition(text: str, ends: list[int], rule: TextRules, thinking: Thinking) -> str:
    """Where the answer begins, and then the stop string that is complete first in it."""
    rest, begin = text.lstrip(), 0
    if thinking.is_open or rest.startswith("<think>"):
        opened = 0 if thinking.is_open else text.index("<think>") + len("<think>")
        closed = text.find("</think>", opened)
        if closed < 0:
            return text
        begin = closed + len("</think>")
        begin += len(text[begin:]) - len(text[begin:].lstrip())
    for end in range(begin + 1, len(text) + 1):
        number = next(index for index, last in enumerate(ends, 1) if end <= last)
        stops = [stop for stop in rule.stops if text[begin:end].endswith(stop)]
        if stops and number > rule.min_tokens:
            return text[: end - max(map(len, stops))]
    return text


@settings(max_examples=600, deadline=None)
@given(
    thoughtful,
    st.sets(st.sampled_from(["\n", "ab", "<th", "b!", "</think>", "\na"]), min_size=1, max_size=3),
    st.integers(0, 20),
    st.booleans(),
)
def test_stop_strings_are_those_of_the_answer_and_not_of_the_thoughts(
    pieces: list[str], stops: set[str], min_tokens: int, is_open: bool
) -> None:
    """vllm-project/vllm#38499, sgl-project/sglang#40529: cut thoughts leave no answer at all."""
    thinking = Thinking(is_open)
    rule = TextRules(tuple(sorted(stops)), min_tokens=min_tokens, reading=Reading(thinking))
    text = "".join(pieces)
    ends = list(range(1, len(text) + 1))  # a token is a byte here
    shown = play(list(text.encode()), rule, set(), None, skip=True)
    assert shown.text == by_definition(text, ends, rule, thinking)
