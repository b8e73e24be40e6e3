"""A grammar of EBNF, written in llguidance's Lark.

Owns the names and the writing; what is a terminal is ebnf_borders.py's to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from server.ebnf import Chars, Choice, EbnfError, Many, Name, Node, Ranges, Text
from server.ebnf_borders import Borders, children


def ebnf_to_lark(rules: dict[str, Node]) -> str:
    """A grammar in Lark whose rule `start` is `root`. Raises EbnfError."""
    if "root" not in rules:
        raise EbnfError("there is no rule 'root'")
    for node in rules.values():
        _check_names(node, rules)
    return _Writer(rules, Borders(rules)).text()


def _check_names(node: Node, rules: dict[str, Node]) -> None:
    if isinstance(node, Name) and node.rule not in rules:
        raise EbnfError(f"there is no rule '{node.rule[:60]}'")
    for child in children(node):
        _check_names(child, rules)


class _Writer:
    def __init__(self, rules: dict[str, Node], borders: Borders) -> None:
        self._rules = rules
        self._borders = borders
        self._numbers = {rule: number for number, rule in enumerate(rules)}
        self._lines: dict[str, str] = {}
        self._waiting: list[tuple[str, Node, Callable[[Node], str]]] = []
        self._pieces: dict[str, str] = {}

    def text(self) -> str:
        root = self._rules["root"]
        if self._borders.is_plain(root):
            self._lines["start"] = self._terminal(root)
        else:
            self._lines["start"] = self._named(Name("root"), self._rule)
        while self._waiting:
            name, node, write = self._waiting.pop()
            self._lines[name] = write(node)
        return "".join(f"{name}: {body}\n" for name, body in self._lines.items())

    def _named(self, node: Name, write: Callable[[Node], str]) -> str:
        """The name of a rule that is written so, once."""
        name = self._name(node.rule)
        if write != self._rule:
            name = name.upper()
        if name not in self._lines:
            self._lines[name] = ""
            self._waiting.append((name, self._rules[node.rule], write))
        return name

    def _name(self, rule: str) -> str:
        plain = re.sub(r"[^a-z0-9]", "_", rule.lower())
        return f"r_{plain}_{self._numbers[rule]}"

    def _rule(self, node: Node) -> str:
        if self._borders.is_terminal(node):
            return self._terminal(node)
        if isinstance(node, Name):
            return self._named(node, self._rule)
        return _written(node, [self._rule(part) for part in self._borders.parts(node)])

    def _terminal(self, node: Node) -> str:
        body = self._body(node)
        if isinstance(node, Text | Chars | Name) or not children(node):
            return body
        name = self._pieces.setdefault(body, f"PIECE_{len(self._pieces)}")
        self._lines[name] = body
        return name

    def _body(self, node: Node) -> str:
        """Within a terminal."""
        if isinstance(node, Text):
            return json.dumps(node.value, ensure_ascii=False)
        if isinstance(node, Chars):
            return _class(node.ranges)
        if isinstance(node, Name):
            return self._named(node, self._body)
        return _written(node, [self._body(child) for child in children(node)])


def _written(node: Node, parts: list[str]) -> str:
    if isinstance(node, Choice):
        return "(" + " | ".join(parts) + ")"
    if not isinstance(node, Many):
        return "(" + " ".join(parts) + ")" if parts else '""'
    match node.least, node.most:
        case _, 0:
            return '""'
        case 1, 1:
            return f"({parts[0]})"
        case 0, 1:
            sign = "?"
        case 0, None:
            sign = "*"
        case 1, None:
            sign = "+"
        case least, most:
            sign = f"{{{least},{'' if most is None else most}}}"
    return f"({parts[0]}){sign}"


def _class(ranges: Ranges) -> str:
    return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]/"
