"""Every schema of the corpus, by random walks through its grammar, judged by `jsonschema`.

A walk picks any allowed token, so it goes where no model would; the corpus with the real model is
`make test-schemas`.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema.validators import validator_for

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler
from engine.vocabulary import Vocabulary
from server.grammar_text import Grammar, json_part
from server.schema_check import SchemaError, checked
from tests.structured.corpus import ACCEPTED, REFUSED

EOS = 256
WORDS = [b'"', b'":', b"{", b"}", b"[", b"]", b'","', b"null", b"true", b"12", b"\\n", b"\\u00"]
PIECES = (*(bytes([byte]) for byte in range(256)), b"<eos>", *WORDS, "é".encode(), "开".encode())
VOCABULARY = Vocabulary(PIECES, special_ids=(EOS,), eos_token_ids=(EOS,))
MAX_TOKENS = 600
# Tokens that bring an end nearer; a walk prefers them more and more.
ENDERS = (b'"', b"}", b"]", b",", b":", b"@", b".")
ENDING = [index for index, piece in enumerate(PIECES) if piece in ENDERS]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY)


def spec_of(schema: Any) -> bytes:
    return Grammar("start: @answer", {"answer": json_part(checked(schema))}).spec()


def walk(schema: Any, seed: int) -> str | None:
    """A text of the grammar; None if it did not end in time."""
    draw = random.Random(seed)
    state = compiler().start(spec_of(schema))
    chosen: list[int] = []
    while not state.ended and len(chosen) < MAX_TOKENS:
        allowed = state.allowed()
        if allowed[EOS] and draw.random() < 0.3:
            break
        near = [index for index in ENDING if allowed[index]]
        if near and draw.random() < len(chosen) / 60:
            token = draw.choice(near)
        else:
            token = int(draw.choice(np.flatnonzero(allowed).tolist()))
            if token == EOS:
                break
        chosen.append(token)
        state.accept([token])
    if len(chosen) == MAX_TOKENS:
        return None
    return b"".join(PIECES[token] for token in chosen).decode()


@pytest.mark.parametrize("name", ACCEPTED)
def test_whatever_the_grammar_lets_out_validates(name: str) -> None:
    """B064 B067 B068 B070 B071: valid JSON by a strict parser, valid by the schema."""
    schema = ACCEPTED[name]
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator.check_schema(schema)
    judge = validator(schema, format_checker=validator.FORMAT_CHECKER)
    num_ended = 0
    for seed in range(4):
        output = walk(schema, seed)
        if output is None:
            continue
        num_ended += 1
        judge.validate(json.loads(output))
    assert num_ended > 0


def test_corpus_is_as_large_as_it_is_said_to_be() -> None:
    assert len(ACCEPTED) >= 200


@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=lambda value: str(value)[:50])
def test_refusal_names_what_it_is_about(schema: Any, word: str) -> None:
    """B059 B068: before anything runs, in one line."""
    with pytest.raises((SchemaError, GrammarError)) as caught:
        compiler().start(spec_of(schema))
    message = str(caught.value)
    assert word in message
    assert "\n" not in message
    assert len(message) < 500


CHARACTERS = ('"', "\\", "/", "\n", "\t", "\x00", "\x1f", "a", "é", "😀")
CLASSES = (
    *(r"[^\\]", '[^"]', r"[^\"\\]", "[^a]", r"[^\n]", r"[^\\\n]", r"[^\\n]", r"[^\x5c]", "[^ -~]"),
    *(r"([^\\]|a)", r"[^]\\]", r"[\]\\]", r"[^\s\\]", ".", r"\W", r"[\W\w]", "[!-#]"),
)


@pytest.mark.parametrize("pattern", CLASSES)
def test_no_escape_is_a_way_around_a_class_of_characters(pattern: str) -> None:
    """B070 B071: every way of writing every character that JSON has."""
    spec = spec_of({"type": "string", "pattern": f"^{pattern}$"})
    num_accepted = 0
    for character in CHARACTERS:
        units = character.encode("utf-16-be").hex()
        escape = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        written = json.dumps(character)
        for text in (written, json.dumps(character, ensure_ascii=False), f'"{escape}"'):
            state = compiler().start(spec)
            try:
                state.accept(list(text.encode()))
            except GrammarError:
                continue
            assert re.fullmatch(pattern, character, re.ASCII), text
            num_accepted += 1
    assert num_accepted
