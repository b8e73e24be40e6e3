"""Regular expressions of clients: a class means to the compiler what it means to Python."""

from __future__ import annotations

import json
import random
import re
import warnings

import pytest

from server.grammar_text import regex_part
from server.structured import schema_part
from tests.structured.test_ebnf import lets_in

MEMBERS = (
    *("a", "b", "-", "--", "[", "&&", "&", "~~", "~", "^", ".", "/", "+", ",", "é", ":", '"', "|"),
    *("(", "{", "a-z", "0-9", "+-/", r"\d", r"\w", r"\]", r"\-", r"\\", r"\n"),
)
CHARACTERS = 'ab-[]&~^5./+,zZé:"\\\n*|({'


CLASSES = (
    *("[a&&b]", "[+--]", "[--/]", "[a~~b]", "[[]", "[a[b]", "[[ab]]", r"[^[\]]+", "a[]b]c"),
    *(r"\[a[&&]\]", "[^-a]", r"[\x2b--]", "[+---/]", r"[\w.-]"),
)


@pytest.mark.parametrize("text", CLASSES)
def test_a_class_holds_characters_only(text: str) -> None:
    """B070: `[`, `&&`, `--` and `~~` are no signs in a class, in answers and between quotes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        meant = re.compile(text, re.ASCII)
    part, quoted = regex_part(text), schema_part({"type": "string", "pattern": f"^({text})$"}, "")
    for said in (*CHARACTERS, "abc", "a]c", "[a&]", "a]", "ab", "[]"):
        assert lets_in(part, said) == bool(meant.fullmatch(said)), said
        assert lets_in(quoted, json.dumps(said)) <= bool(meant.fullmatch(said)), said
    assert any(lets_in(quoted, json.dumps(said)) for said in (*CHARACTERS, "a]c", "[a&]", "a]"))


@pytest.mark.parametrize("seed", range(25))
def test_classes_are_pythons(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        inside = "".join(chance.choice(MEMBERS) for _ in range(chance.randint(1, 5)))
        text = f"[{chance.choice(['', '^'])}{inside}]"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                meant = re.compile(text, re.ASCII)
            except re.error:
                continue  # "b-a", which is no range
        part = regex_part(text)
        for character in CHARACTERS:
            assert lets_in(part, character) == bool(meant.fullmatch(character)), (text, character)
