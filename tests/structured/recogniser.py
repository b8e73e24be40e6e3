"""Which texts a grammar of EBNF stands for, by the book: slow, and sharing nothing but the tree."""

from __future__ import annotations

from server.ebnf import Chars, Choice, Many, Name, Node, Sequence, Text


def recognises(rules: dict[str, Node], text: str) -> bool:
    return len(text) in _Recogniser(rules, text).ends("root", 0)


class _Recogniser:
    """Of each rule and beginning the ends, found again until there are no more."""

    def __init__(self, rules: dict[str, Node], text: str) -> None:
        self._rules = rules
        self._text = text
        self._known: dict[tuple[str, int], set[int]] = {}

    def ends(self, rule: str, begin: int) -> set[int]:
        self._known[rule, begin] = set()
        size = 0
        while size != (size := sum(1 + len(ends) for ends in self._known.values())):
            for name, at in list(self._known):
                self._known[name, at] |= self._of(self._rules[name], at)
        return self._known[rule, begin]

    def _of(self, node: Node, at: int) -> set[int]:
        match node:
            case Text(value):
                return {at + len(value)} if self._text.startswith(value, at) else set()
            case Chars(ranges):
                code = ord(self._text[at]) if at < len(self._text) else -1
                return {at + 1} if any(low <= code <= high for low, high in ranges) else set()
            case Name(rule):
                return set(self._known.setdefault((rule, at), set()))
            case Choice(nodes):
                return set().union(*(self._of(option, at) for option in nodes))
            case Sequence(nodes):
                found = {at}
                for part in nodes:
                    found = set().union(*(self._of(part, end) for end in found))
                return found
            case Many(inner, least, most):
                return self._times(inner, least, most, at)

    def _times(self, node: Node, least: int, most: int | None, at: int) -> set[int]:
        ends, found = {at}, {at} if least == 0 else set()
        # More rounds than characters bring nothing new but emptiness.
        for number in range(1, min(most or 99, least + len(self._text) + 1) + 1):
            if most == 0:
                break
            ends = set().union(*(self._of(node, end) for end in ends))
            if number >= least:
                found |= ends
        return found
