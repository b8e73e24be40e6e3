"""The EBNF of llama.cpp and xgrammar, read into a tree.

Owns the syntax: rules with `::=`, texts, classes, groups, repetition, comments. A rule goes on to
the next `name ::=`, whatever its lines. Knows nothing of what is made of the tree (ebnf_lark.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Of groups within groups.
MAX_DEPTH = 50
MAX_SIGNS = 4  # behind one another
MAX_TIMES = 100_000
MAX_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)

Ranges = tuple[tuple[int, int], ...]  # of code points, ends included; sorted, apart


@dataclass(frozen=True, slots=True)
class Text:
    value: str  # not empty


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Name:
    rule: str


@dataclass(frozen=True, slots=True)
class Many:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    nodes: tuple[Node, ...]


Node = Text | Chars | Name | Many | Sequence | Choice


class EbnfError(ValueError):
    """A text that is no grammar; one line."""


_SPACE = re.compile(r"(?:\s++|#[^\r\n]*+)*+")
_NAME = re.compile(r"[\w-]++")
_HEAD = re.compile(r"([\w-]++)(?:\s++|#[^\r\n]*+)*+::=")
_TIMES = re.compile(r"\{\s*+([0-9]*+)\s*+(,?)\s*+([0-9]*+)\s*+\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt]|[!-/:-@\[-`{-~]))"
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def read_ebnf(text: str) -> dict[str, Node]:
    """The rules by name, in order. Raises EbnfError."""
    return _Reader(text).rules()


def joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted, and apart."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    found, begin = [], 0
    for low, high in (*ranges, (MAX_CODE + 1, MAX_CODE + 1)):
        # Surrogates are no characters, so no range ends with one.
        last = low - 1 if low - 1 not in _SURROGATES else _SURROGATES[0] - 1
        if begin <= last:
            found.append((begin, last))
        begin = high + 1 if high + 1 not in _SURROGATES else _SURROGATES.stop
    return tuple(found)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                raise self._error("expected a rule, NAME ::=")
            if head[1] in rules:
                raise EbnfError(f"the rule '{head[1]}' is defined twice")
            self._at = head.end()
            rules[head[1]] = self._choice(0)
        return rules

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise EbnfError("the grammar is nested too deeply")
        options = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        nodes: list[Node] = []
        self._skip()
        while (node := self._item(depth)) is not None:
            nodes.append(self._repeated(node))
            self._skip()
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _item(self, depth: int) -> Node | None:
        """None at the end of a sequence."""
        match self._next():
            case "" | "|" | ")":
                return None
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return Chars(_others(()))
            case "(":
                self._at += 1
                node = self._choice(depth + 1)
                if self._next() != ")":
                    raise self._error("expected ')'")
                self._at += 1
                return node
        if _HEAD.match(self._text, self._at):
            return None  # the next rule
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error("this is nothing that a rule may hold")
        self._at = name.end()
        return Name(name[0])

    def _repeated(self, node: Node) -> Node:
        self._skip()
        num_signs = 0
        while (sign := self._next()) and sign in "*+?{":
            num_signs += 1
            if num_signs > MAX_SIGNS:
                raise EbnfError("the grammar is nested too deeply")
            if sign == "{":
                least, most = self._times()
            else:
                self._at += 1
                least, most = _SIGNS[sign]
            node = Many(node, least, most)
            self._skip()
        return node

    def _times(self) -> tuple[int, int | None]:
        found = _TIMES.match(self._text, self._at)
        if found is None or not (found[1] or found[3]) or (found[3] and not found[2]):
            raise self._error("expected {NUMBER}, {NUMBER,} or {NUMBER,NUMBER}")
        if max(len(found[1]), len(found[3])) > 9:
            raise self._error("this repeats too often")
        least = int(found[1] or 0)
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if max(least, most or 0) > MAX_TIMES:
            raise self._error(f"the limit of a repetition is {MAX_TIMES}")
        if most is not None and most < least:
            raise self._error("the range of this repetition is empty")
        self._at = found.end()
        return least, most

    def _literal(self) -> Node:
        self._at += 1
        value = ""
        while self._next() != '"':
            value += self._character()
        self._at += 1
        return Text(value) if value else Sequence(())

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges = []
        while self._next() != "]":
            low = high = ord(self._character())
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = ord(self._character())
            if high < low:
                raise self._error("this range of characters is empty")
            ranges.append((low, high))
        self._at += 1
        if not ranges and not is_negated:
            raise self._error("this class is empty")
        found = joined(ranges)
        return Chars(_others(found) if is_negated else found)

    def _character(self) -> str:
        character = self._next()
        if not character:
            raise self._error("the grammar ends within a text or a class")
        if character != "\\":
            self._at += 1
            return character
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None:
            raise self._error("there is no such escape")
        self._at = escape.end()
        if escape[4]:
            return _LETTERS.get(escape[4], escape[4])
        code = int(escape[1] or escape[2] or escape[3], 16)
        if code > MAX_CODE or code in _SURROGATES:
            raise EbnfError(f"{escape[0]} is no character")
        return chr(code)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None  # it may be empty
        self._at = space.end()

    def _error(self, what: str) -> EbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20].split("\n")[0]
        return EbnfError(
            f"{what} at line {line}, before '{rest}'" if rest else f"{what} at its end"
        )
