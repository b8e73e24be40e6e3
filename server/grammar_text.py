"""Grammars as text: the pieces of which a specification for engine/grammar.py is made.

A specification is a frame, in llguidance's Lark dialect, and named parts that it refers to as
`@name`. Knows no fields and no messages; what a client wrote comes in checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.ebnf import EbnfError, read_ebnf
from server.ebnf_lark import ebnf_to_lark
from server.reasoning import CLOSING, OPENING, Thinking
from server.schema_patterns import of_characters

# Between the tokens of JSON: nothing, a space, or a line break with an indent. A model that is in
# doubt must not be able to go on with white space for ever.
WHITESPACE = r"( |\n[ \t]{0,32})?"
ANYTHING = r"/(.|\n)*/"
ANSWER = "answer"
# Of EBNF: the search for borders may look at each of them many times.
MAX_RULES = 500
# Where only one text can follow, the model still chooses how to cut it into tokens.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_LARK = re.compile(r"^[ \t]*start[ \t]*:(?!:=)", re.MULTILINE)  # it may hold ::= in a text
# An attribute of a rule that this server's sampler would not hear of.
_TEMPERATURE = re.compile(r"^[ \t]*[?!]?\w+[ \t]*\[[^\]\n]*\btemperature\b", re.MULTILINE)

Part = dict[str, Any]


class GrammarTextError(ValueError):
    """A text that is no grammar; one line."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """`frame` has the rule `start`; `parts` and `labels` by name."""

    frame: str
    parts: dict[str, Part] = field(default_factory=dict)
    # What the client calls a part, for messages.
    labels: dict[str, str] = field(default_factory=dict)
    # A bound on the thoughts where their closing marker is text; see thoughts_frame.
    thoughts: dict[str, Any] | None = None

    def spec(self) -> bytes:
        named = [{"name": name, **part} for name, part in self.parts.items()]
        spec: dict[str, Any] = {
            "grammars": [{"lark_grammar": _OPTIONS + self.frame}, *named],
        }
        if self.thoughts is not None:
            spec["thoughts"] = self.thoughts
        return json.dumps(spec, ensure_ascii=False).encode()


def literal(text: str) -> str:
    """A text as a terminal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_part(schema: dict[str, Any], whitespace: str = WHITESPACE) -> Part:
    """`schema` has been through schema_check."""
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": whitespace}}}


def regex_part(pattern: str) -> Part:
    r"""The whole answer matches; \d and \w are ASCII, as in JSON Schema."""
    from llguidance import regex_to_lark

    return {"lark_grammar": f"start: /{regex_to_lark(of_characters(pattern), 'dw')}/"}


def choice_part(options: list[str]) -> Part:
    """One terminal: hundreds of them would be too many for a row of the parser."""
    return {"lark_grammar": "start: ONE\nONE: " + " | ".join(map(literal, options))}


def ebnf_part(text: str) -> Part:
    """Lark, with a rule `start`, or the EBNF of llama.cpp and xgrammar, with a rule `root`."""
    if "::=" not in text or _LARK.search(text):
        if _TEMPERATURE.search(text):
            raise GrammarTextError("a rule has no temperature here; the request has")
        return {"lark_grammar": text}
    try:
        rules = read_ebnf(text)
        if len(rules) > MAX_RULES:
            raise EbnfError(f"the grammar has {len(rules)} rules, the limit is {MAX_RULES}")
        return {"lark_grammar": ebnf_to_lark(rules)}
    except EbnfError as error:
        raise GrammarTextError(str(error)) from None


def thoughts_frame(
    thinking: Thinking | None, budget: int | None, answer: str, marker: Callable[[str], str]
) -> tuple[list[str], dict[str, Any] | None]:
    """Rules from `start` on: thoughts, if there may be some, then `answer`, an expression.

    `budget` bounds the thoughts in tokens; then they are closed for the model. `marker` turns a
    marker into a terminal, its id where it is a special token; where it is text the grammar cannot
    count, and what is to be counted beside it is the second value (Grammar.thoughts).
    """
    if thinking is None:
        return [f"start: {answer}"], None
    closing = marker(CLOSING)
    rules = [f"answer_body: {answer}", r"GAP: /[ \t\r\n]{0,4}/"]
    bound = None
    if budget == 0:
        thoughts = closing
    elif closing.startswith("<["):  # never in text
        thoughts = f"thought {closing}"
        rules.append(f"thought{'' if budget is None else f'[max_tokens={budget}]'}: {ANYTHING}")
    else:
        thoughts = "thought"
        rules.append(f"thought[suffix={closing}]: {ANYTHING}")
        if budget is not None:
            opening = "" if thinking.is_open else OPENING
            bound = {"budget": budget, "opening": opening, "closing": CLOSING}
    thoughts += " GAP answer_body"
    if thinking.is_open:
        return [f"start: {thoughts}", *rules], bound
    if answer == ANYTHING:  # must not be a way around the budget
        rules[0] = r'answer_body: "" | /(.|\n)+/'
        rules.append(r'direct: "" | /([^<]|<[^t])(.|\n)*/')
        return [f"start: {marker(OPENING)} {thoughts} | direct", *rules], bound
    return [f"start: {marker(OPENING)} {thoughts} | answer_body", *rules], bound
