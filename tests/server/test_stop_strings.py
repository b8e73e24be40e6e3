"""Stop strings end an answer at the same character however its text is cut, and leak nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    """(all the text shown, the stop string met)."""
    watch = StopStrings(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        text, stop = watch.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + watch.flush(), None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The stated rule, in the plainest way."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


texts = st.text("ab", max_size=24)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    text=texts,
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_result_depends_on_the_text_and_not_on_its_pieces(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    """B004, B005."""
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert run(stops, pieces) == reference(stops, text)


def test_nothing_of_the_stop_string_leaks_at_any_split() -> None:
    """B004."""
    text = "ABC DEFGHIJ KLM"
    for first in range(len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            assert run(["DEFGHIJ"], pieces) == ("ABC ", "DEFGHIJ")


def test_stop_string_may_begin_and_end_inside_tokens() -> None:
    """B005 (a)."""
    assert run(["r!"], ["foo", "bar!x"]) == ("fooba", "r!")


@pytest.mark.parametrize("text", ["ends with ZZZZZZZ", "plain", ""])
def test_answer_that_ends_without_a_stop_string_is_complete(text: str) -> None:
    """B005 (b)."""
    assert run(["ZZZZZZZZ"], list(text)) == (text, None)


@given(text=st.text("abc", max_size=30))
def test_only_what_may_become_a_stop_string_is_held_back(text: str) -> None:
    """B008: a long stop string does not hold back text that cannot begin it."""
    stop = "ab" * 10
    watch = StopStrings([stop])
    shown = ""
    for length, character in enumerate(text, start=1):
        piece, met = watch.feed(character)
        if met is not None:
            return
        shown += piece
        held = text[len(shown) : length]
        assert stop.startswith(held)
        longer = (text[start:length] for start in range(len(shown)))
        assert not any(stop.startswith(each) for each in longer)


def test_stop_string_is_included_on_request() -> None:
    assert run(["bc"], ["a", "b", "cd"], include_stop=True) == ("abc", "bc")
    assert run(["bc"], ["a", "b", "cd"]) == ("a", "bc")


def test_first_complete_wins_and_of_equals_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_stop_string_before_min_tokens_is_ordinary_text() -> None:
    """B086."""
    watch = StopStrings(["\n"])
    assert watch.feed("a\nb", may_stop=False) == ("a\nb", None)
    assert watch.feed("c\nd") == ("c", "\n")


def test_stop_string_that_spans_min_tokens_is_cut_exactly() -> None:
    """B086: it is complete only after the limit, so it counts, and its beginning was held."""
    watch = StopStrings(["END"])
    assert watch.feed("xEN", may_stop=False) == ("x", None)
    assert watch.feed("Dy") == ("", "END")


def test_ignored_stop_string_can_begin_the_next_one() -> None:
    watch = StopStrings(["aa"])
    assert watch.feed("aa", may_stop=False) == ("a", None)
    assert watch.feed("a") == ("", "aa")


def test_no_stop_strings_let_everything_pass() -> None:
    watch = StopStrings([])
    assert watch.feed("anything") == ("anything", None)
    assert watch.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
