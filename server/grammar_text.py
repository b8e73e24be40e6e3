"""Grammars as text: the pieces of which a specification for engine/grammar.py is made.

A specification is a frame, in llguidance's Lark dialect, and named parts that it refers to as
`@name`. Knows no fields and no messages; what a client wrote comes in checked.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

# Between the tokens of JSON: nothing, a space, or a line break with an indent. A model that is in
# doubt must not be able to go on with white space for ever.
WHITESPACE = r"( |\n[ \t]{0,32})?"
ANYTHING = r"/(.|\n)*/"
ANSWER = "answer"
_RULE = re.compile(r"^[ \t]*([A-Za-z_][A-Za-z0-9_-]*)[ \t]*::=", re.MULTILINE)

Part = dict[str, Any]


class GrammarTextError(ValueError):
    """A text that is no grammar; one line."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """`frame` has the rule `start`; `parts` by name."""

    frame: str
    parts: dict[str, Part] = field(default_factory=dict)

    def spec(self) -> bytes:
        named = [{"name": name, **part} for name, part in self.parts.items()]
        return json.dumps(
            {"grammars": [{"lark_grammar": self.frame}, *named]}, ensure_ascii=False
        ).encode()


def literal(text: str) -> str:
    """A text as a terminal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_part(schema: dict[str, Any], whitespace: str = WHITESPACE) -> Part:
    """`schema` has been through schema_check."""
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": whitespace}}}


def regex_part(pattern: str) -> Part:
    r"""The whole answer matches; \d and \w are ASCII, as in JSON Schema."""
    return {"lark_grammar": f"start: /{regex_to_lark(pattern, 'dw')}/"}


def choice_part(options: list[str]) -> Part:
    return {"lark_grammar": "start: " + " | ".join(literal(option) for option in options)}


def ebnf_part(text: str) -> Part:
    """Lark, with a rule `start`, or the EBNF of llama.cpp and xgrammar, with a rule `root`."""
    if "::=" not in text:
        return {"lark_grammar": text}
    names = _RULE.findall(text)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise GrammarTextError(f"the rule '{min(twice)}' is defined twice")
    try:
        return {"lark_grammar": gbnf_to_lark(text)}
    except RecursionError:
        raise GrammarTextError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises bare Exceptions
        raise GrammarTextError(" ".join(str(error).split())[:300]) from None
