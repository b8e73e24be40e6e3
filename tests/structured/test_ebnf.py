"""The EBNF of llama.cpp and xgrammar: what a grammar of it lets out, byte by byte."""

from __future__ import annotations

import pytest

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler
from engine.vocabulary import Vocabulary
from server.grammar_text import Grammar, GrammarTextError, ebnf_part

EOS = 256
PIECES = (*(bytes([byte]) for byte in range(256)), b"<eos>")
VOCABULARY = Vocabulary(PIECES, special_ids=(EOS,), eos_token_ids=(EOS,))


def takes(rule: str, text: str) -> bool:
    spec = Grammar("start: @answer", {"answer": ebnf_part(f"root ::= {rule}")}).spec()
    state = GrammarCompiler(VOCABULARY).start(spec)
    for byte in text.encode():
        if state.ended or not state.allowed()[byte]:
            return False
        state.accept([byte])
    return bool(state.ended or state.allowed()[EOS])


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (r'"\u00e9"', "é", "e9"),
        (r'"\u4e2d\U0001F600"', "中😀", "中"),
        (r"[\u4e00-\u9fa5]", "名", "a"),
        (r"[^\u0000-\u001f]", "a", "\n"),
        (r'"\u0022"', '"', "u"),
        (r"[\u005d]", "]", "u"),
        (r'"\\u00e9"', r"\u00e9", "é"),
        (r'"\x41\n"', "A\n", "A"),
    ],
)
def test_characters_may_be_written_as_numbers(rule: str, inside: str, outside: str) -> None:
    """B070: of any script, in texts and in classes, a quote or a bracket too."""
    assert takes(rule, inside)
    assert not takes(rule, outside)


@pytest.mark.parametrize("rule", [r'"\ud800"', r'"\U00110000"', r'"\u12"', r'"\q"'])
def test_what_is_no_character_is_refused(rule: str) -> None:
    with pytest.raises((GrammarTextError, GrammarError)):
        takes(rule, "a")
