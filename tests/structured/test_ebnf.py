"""The EBNF of llama.cpp and xgrammar: what a grammar of it lets out, byte by byte."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler
from engine.vocabulary import Vocabulary
from server.ebnf import read_ebnf
from server.grammar_text import Grammar, GrammarTextError, Part, choice_part, ebnf_part
from tests.structured.recogniser import recognises

EOS = 256
PIECES = (*(bytes([byte]) for byte in range(256)), b"<eos>")
VOCABULARY = Vocabulary(PIECES, special_ids=(EOS,), eos_token_ids=(EOS,))
COMPILER = GrammarCompiler(VOCABULARY)

ARITHMETIC = r"""(expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*"""


def takes(rule: str, text: str) -> bool:
    return lets_in(ebnf_part(f"root ::= {rule}"), text)


def lets_in(part: Part, text: str) -> bool:
    state = COMPILER.start(Grammar("start: @answer", {"answer": part}).spec())
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


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ('[a-z]+ x\nx ::= "z"', "abz", "ab"),
        ('word " " word\nword ::= [a-z ]+', "a b c", "ab"),
        ('x y\nx ::= "a" | "ab"\ny ::= "bc" | "d"', "abc", "abb"),
        ('int "0"\nint ::= [0-9]{1,3}', "10", "1"),
        (ARITHMETIC, "a=1\n", "a=1"),
        (ARITHMETIC, "(a +b)*2 = 3\n\nc=d\n", "a=\n"),
        ('"(" root ")" | [a-z]+ "z"', "((az))", "((a))"),
        ('x\nx ::= "ab" | "a" "bc" | "(" x ")"', "(abc)", "(a)"),
        ('e\ne ::= k "z" | "if" e | "(" e ")"\nk ::= [a-z]+', "iz", "if"),
        ('v\nv ::= .* "END" | "(" v ")"', "a ENDEND", "a EN"),
        ('t*\nt ::= "<" n ">" t* "</" n ">" | x\nn ::= [a-z]+\nx ::= [^<]+', "a<b>c</b>", "<b>"),
        ('l\nl ::= "- " [^\\n]+ "\\n" l | "- " [^\\n]+ "\\n"', "- a\n- b\n", "- a\n- "),
    ],
)
def test_a_part_leaves_what_the_next_one_needs(rule: str, inside: str, outside: str) -> None:
    """B061: an answer that the grammar has can be given, and comes to its end."""
    assert takes(rule, inside)
    assert not takes(rule, outside)


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ('("a"{2}){2}', "aaaa", "aaa"),
        ('("a"*){2} "b"', "aab", "aa"),
        ('"b" ("a"?)+', "baa", "ab"),
        ('"b" "a"{0} "c"{0,0}', "b", "ba"),
        ('"a"\n  | "b"', "b", "c"),
        ('\n  "a" | # one\n  "b"', "b", "c"),
        ("start\nstart ::= [x]", "x", "y"),
        ('fooBar foo_bar foo-bar\nfooBar ::= "a"\nfoo_bar ::= "b"\nfoo-bar ::= "c"', "abc", "aaa"),
        ('A a\nA ::= "a"\na ::= "b"', "ab", "aa"),
        (".", "\n", ""),
        ("[a&&b]", "&", "c"),
        ("[+--]", ",", "."),
        ("[a~~b]", "~", "c"),
        (r"[a\-z]", "-", "b"),
        ('"a\tb"', "a\tb", "a b"),
        (r"[^\x00-\ud7ff]", "\ue000", "a"),
    ],
)
def test_what_may_be_written(rule: str, inside: str, outside: str) -> None:
    """B061, B070: classes hold characters only; names and lines are the writer's own."""
    assert takes(rule, inside)
    assert not takes(rule, outside)


@pytest.mark.parametrize(
    "rule",
    [
        "[]",
        "[b-a]",
        '"a"{2,1}',
        '"a"{}',
        '"a"{1000000}',
        '"a',
        "(x",
        "x)",
        "x",
        "%",
        '"a"' + "*" * 99,
    ],
)
def test_what_is_no_grammar_is_refused_in_a_line(rule: str) -> None:
    with pytest.raises(GrammarTextError) as refused:
        ebnf_part(f"root ::= {rule}")
    assert "\n" not in str(refused.value)


def some_expression(chance: random.Random, depth: int, names: list[str]) -> str:
    kind = chance.random()
    if depth == 0 or kind < 0.35:
        return chance.choice(['"a"', '"b"', '"ab"', '"ba"', '"aab"', "[ab]", '"("', '")"', *names])
    parts = [some_expression(chance, depth - 1, names) for _ in range(chance.randint(2, 3))]
    if kind < 0.65:
        return " ".join(parts)
    if kind < 0.85:
        return "(" + " | ".join(parts) + ")"
    return f"({parts[0]})" + chance.choice(["*", "+", "?", "{2}", "{1,2}"])


TEXTS = ["".join(text) for length in range(1, 5) for text in itertools.product("ab", repeat=length)]
TEXTS += ["(", "()", "(a)", "((a))", "(ab)b", "(b)(a)", "a(b)", ")ab(", "(aab)"]


@pytest.mark.parametrize("seed", range(40))
def test_without_recursion_exactly_the_texts_of_the_grammar_are_let_in(seed: int) -> None:
    chance = random.Random(seed)
    x, y = some_expression(chance, 2, ["y"]), some_expression(chance, 2, [])
    grammar = f"root ::= {some_expression(chance, 3, ['x', 'y'])}\nx ::= {x}\ny ::= {y}"
    rules, part = read_ebnf(grammar), ebnf_part(grammar)
    for text in TEXTS:
        assert lets_in(part, text) == recognises(rules, text), (grammar, text)


@pytest.mark.parametrize("seed", range(40))
def test_with_recursion_no_other_text_is_let_in(seed: int) -> None:
    chance = random.Random(seed)
    x, y = (some_expression(chance, 2, ["root", "x", "y"]) for _ in range(2))
    grammar = f"root ::= {some_expression(chance, 3, ['root', 'x', 'y'])}\nx ::= {x}\ny ::= {y}"
    rules = read_ebnf(grammar)
    try:
        let_in = {text for text in TEXTS if lets_in(ebnf_part(grammar), text)}
    except GrammarError:  # nothing can satisfy it, or only the empty text
        let_in = set()
    wanted = {text for text in TEXTS if recognises(rules, text)}
    assert let_in <= wanted, grammar
    # The library's borders may cost some texts, but not all of them.
    assert bool(let_in) == bool(wanted), grammar


def test_a_thousand_choices_are_one_terminal() -> None:
    """B061: the limit that the handbook names can be reached."""
    options = [f"{number} apples" for number in range(1000)]
    assert lets_in(choice_part(options), "777 apples")
    assert not lets_in(choice_part(options), "777 pears")


def test_lark_may_hold_the_sign_of_ebnf_in_a_text() -> None:
    assert lets_in(ebnf_part('start: "a ::= b"'), "a ::= b")
    assert lets_in(ebnf_part("root ::= start\nstart ::= [:]"), ":")


def test_a_temperature_of_a_rule_is_refused_as_nobody_would_keep_it() -> None:
    with pytest.raises(GrammarTextError, match="temperature"):
        ebnf_part('start: a\na[capture, temperature=0.5]: "b"')
    assert lets_in(ebnf_part('start: a\na[capture]: "[temperature]"'), "[temperature]")
