"""Which parts of a grammar of EBNF are read in one go.

The library reads text terminal by terminal, and each takes as much as it can. EBNF has no such
borders: in `[a-z]+ "z"` the last z is left for the text. So a grammar without recursion becomes one
terminal, which is exact. In one with recursion the parts without are terminals, except where what
may follow could go on in them: there they are taken apart, in the end into characters.

Owns that choice. The sets of characters here may hold too much, which costs time in masks and no
more; where too little is found, texts are missing and no other is let in. Writes nothing
(ebnf_lark.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from server.ebnf import Chars, Choice, EbnfError, Many, Name, Node, Ranges, Sequence, Text, joined

# Bounds on the search for borders: what is not found is as greedy as the library is.
MAX_ROUNDS = 50
MAX_VISITS = 200_000
# Characters that a repetition may have, to be taken apart.
MAX_BREADTH = 40


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence() | Choice():
            return node.nodes
        case Many():
            return (node.node,)
    return ()


def _meet(some: Ranges, others: Ranges) -> bool:
    i = j = 0
    while i < len(some) and j < len(others):
        if some[i][1] < others[j][0]:
            i += 1
        elif others[j][1] < some[i][0]:
            j += 1
        else:
            return True
    return False


def _union(*sets: Ranges) -> Ranges:
    found = [ranges for ranges in dict.fromkeys(sets) if ranges]
    return found[0] if len(found) == 1 else joined([pair for ranges in found for pair in ranges])


@dataclass(frozen=True, slots=True)
class _Shape:
    """Characters of the texts that a node stands for: their first ones, the others, and those with
    which a whole one may go on."""

    is_nullable: bool = True
    first: Ranges = ()
    inner: Ranges = ()
    more: Ranges = ()

    def then(self, other: _Shape) -> _Shape:
        inner = _union(self.inner, other.inner, other.first if self.first else ())
        more = other.more
        if other.is_nullable:
            more = _union(more, self.more, other.first)
        if _meet(self.more, other.first):  # cut in two ways, it may go on in either
            more = _union(more, inner)
        first = _union(self.first, other.first) if self.is_nullable else self.first
        return _Shape(self.is_nullable and other.is_nullable, first, inner, more)

    def otherwise(self, other: _Shape) -> _Shape:
        inner = _union(self.inner, other.inner)
        more = _union(self.more, other.more)
        if _meet(self.first, other.first):  # one may be the beginning of the other
            more = _union(more, inner)
        first = _union(self.first, other.first)
        return _Shape(self.is_nullable or other.is_nullable, first, inner, more)

    def times(self, least: int, most: int | None) -> _Shape:
        if most == 0:
            return _Shape()
        is_nullable = self.is_nullable or least == 0
        if most == 1:
            return _Shape(is_nullable, self.first, self.inner, self.more)
        inner = _union(self.inner, self.first)
        more = self.more
        if most != least or self.is_nullable:
            more = _union(more, self.first)
        if _meet(self.more, self.first):
            more = _union(more, inner)
        return _Shape(is_nullable, self.first, inner, more)


def _of_text(value: str) -> _Shape:
    codes = [(ord(character), ord(character)) for character in value]
    return _Shape(False, (codes[0],), joined(codes[1:]))


class Borders:
    """Which nodes are terminals: those without recursion, and not taken apart."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._visits = 0
        self._apart: set[int] = set()  # of nodes, which live as long as the rules
        self._shapes: dict[int, _Shape] = {}
        self._groups: dict[tuple[int, ...], Node] = {}
        self._made: set[int] = set()  # groups of neighbours: taken apart, they are single
        self._plain_nodes: dict[int, bool] = {}
        self._plain = self._without_recursion()
        if "root" not in self._plain:
            for rule in self._plain:  # those that it names come first
                self.shape(rules[rule])
            self._take_apart()

    def is_terminal(self, node: Node) -> bool:
        """In a rule that is read as such. Parts of a sequence, and of a choice, may be those of
        another one too, so they are terminals of their own."""
        if isinstance(node, Sequence | Choice) and id(node) not in self._made:
            return False
        return id(node) not in self._apart and self.is_plain(node)

    def parts(self, node: Node) -> list[Node]:
        """Of a node that is no terminal. Neighbours that only together end clearly are one."""
        if isinstance(node, Text):
            return self._characters(node)
        parts: list[list[Node]] = []
        for child in children(node):
            last = parts[-1][-1] if parts else None
            if (
                last is not None
                and isinstance(node, Sequence)
                and id(node) not in self._made
                and self.is_terminal(last)
                and self.is_terminal(child)
                and _meet(self.shape(last).more, self.shape(child).first)
            ):
                parts[-1].append(child)
            else:
                parts.append([child])
        return [part[0] if len(part) == 1 else self._group(part) for part in parts]

    def _group(self, nodes: list[Node]) -> Node:
        group = self._groups.setdefault(tuple(map(id, nodes)), Sequence(tuple(nodes)))
        self._made.add(id(group))
        return group

    def _characters(self, node: Text) -> list[Node]:
        known = self._groups.setdefault((id(node),), Sequence(tuple(map(Text, node.value))))
        return list(children(known))

    def _without_recursion(self) -> dict[str, None]:
        """In an order in which each stands behind those that it names."""
        names = {rule: _names_in(node) for rule, node in self._rules.items()}
        plain: dict[str, None] = {}
        while ready := [
            rule for rule in names if rule not in plain and names[rule] <= plain.keys()
        ]:
            plain.update(dict.fromkeys(ready))
        return plain

    def is_plain(self, node: Node) -> bool:
        """Without recursion."""
        known = self._plain_nodes.get(id(node))
        if known is None:
            known = node.rule in self._plain if isinstance(node, Name) else True
            known = known and all(map(self.is_plain, children(node)))
            self._plain_nodes[id(node)] = known
        return known

    def shape(self, node: Node) -> _Shape:
        """Of a node without recursion."""
        known = self._shapes.get(id(node))
        if known is None:
            known = self._shapes[id(node)] = self._new_shape(node)
        return known

    def _new_shape(self, node: Node) -> _Shape:
        match node:
            case Text():
                return _of_text(node.value)
            case Chars():
                return _Shape(False, node.ranges)
            case Name():
                return self.shape(self._rules[node.rule])
            case Many():
                return self.shape(node.node).times(node.least, node.most)
        shapes = [self.shape(child) for child in node.nodes]
        if not shapes:
            return _Shape()
        shape = shapes[0]
        for other in shapes[1:]:
            shape = shape.then(other) if isinstance(node, Sequence) else shape.otherwise(other)
        return shape

    def _take_apart(self) -> None:
        for _ in range(MAX_ROUNDS):
            follows = Follows(self, self._rules)
            after = {key: self._firsts(key, follows) for key in follows.terminals}
            unclear = {key for key in after if self._goes_on(follows.terminals[key], after[key])}
            for together in follows.together():
                unclear |= self._begun_by_others(follows, together, after)
            unclear = {key for key in unclear if not self._is_broad(follows.terminals[key])}
            if not unclear:
                return
            self._apart |= unclear

    def _firsts(self, key: int, follows: Follows) -> Ranges:
        """Characters with which what follows a terminal may begin."""
        keys = follows.after[key]
        self.visit(len(keys))
        if self._is_run(follows.terminals[key]):
            keys = keys - {key}  # a run behind a run is one
        return _union(*(self._shapes[key].first for key in keys))

    def _meant(self, node: Node) -> Node:
        while isinstance(node, Name):
            node = self._rules[node.rule]
        return node

    def _is_run(self, node: Node) -> bool:
        node = self._meant(node)
        return isinstance(node, Many) and node.most is None and isinstance(node.node, Chars)

    def _is_broad(self, node: Node) -> bool:
        """Whether it repeats so many characters that their tokens, one character after the other,
        are too many for a mask."""
        if id(node) in self._made:
            return any(map(self._is_broad, children(node)))
        node = self._meant(node)
        return isinstance(node, Many) and self._breadth(node.node) > MAX_BREADTH

    def _breadth(self, node: Node) -> int:
        node = self._meant(node)
        if isinstance(node, Chars):
            return sum(high - low + 1 for low, high in node.ranges)
        if isinstance(node, Many):
            return 0  # read in one go
        return max(map(self._breadth, children(node)), default=1)

    def _goes_on(self, node: Node, after: Ranges) -> bool:
        shape = self.shape(node)
        return bool(shape.inner) and _meet(
            _union(shape.more, shape.first if shape.is_nullable else ()), after
        )

    def _begun_by_others(
        self, follows: Follows, together: frozenset[int], after: dict[int, Ranges]
    ) -> set[int]:
        """Of those that may stand in one place: which may begin with a character that is another
        of them, and go on with what may follow that one."""
        shapes = {key: self.shape(follows.terminals[key]) for key in together}
        singles = [key for key, shape in shapes.items() if not shape.inner]
        found = set()
        for key, shape in shapes.items():
            for single in singles if shape.inner else ():
                self.visit()
                if _meet(shapes[single].first, shape.first) and _meet(after[single], shape.inner):
                    found.add(key)
                    break
        return found

    def visit(self, num_keys: int = 0) -> None:
        """Work on a node, and with so many keys of terminals."""
        self._visits += 1 + num_keys // 64
        if self._visits > MAX_VISITS:
            raise EbnfError("the grammar is too intricate")


@dataclass(frozen=True, slots=True)
class _First:
    """The terminals with which a node may begin."""

    is_nullable: bool
    keys: set[int] = field(default_factory=set)


def _names_in(node: Node) -> set[str]:
    if isinstance(node, Name):
        return {node.rule}
    return set().union(*map(_names_in, children(node)))


class Follows:
    """Of the rules that are read as such: their terminals, by a key, and which may follow each."""

    def __init__(self, borders: Borders, rules: dict[str, Node]) -> None:
        self.terminals: dict[int, Node] = {}
        self.after: dict[int, set[int]] = {}
        self._borders = borders
        self._rules = rules
        self._reached = ["root"]
        self._firsts: dict[str, _First] = {"root": _First(False)}
        self._behind: dict[str, set[int]] = {"root": set()}
        for rule in self._reached:  # grows on the way
            self._reach(rules[rule])
        # Every rule has a turn in each round.
        while sum(map(self._find_first, reversed(self._reached))):
            pass
        while sum(map(self._find_behind, self._reached)):
            pass

    def together(self) -> set[frozenset[int]]:
        """Terminals between which the text decides, of all places."""
        return {frozenset(self._firsts["root"].keys), *map(frozenset, self.after.values())}

    def _reach(self, node: Node) -> None:
        self._borders.visit()
        if self._borders.is_terminal(node):
            self._borders.shape(node)
            self.terminals[id(node)] = node
            self.after[id(node)] = set()
        elif isinstance(node, Name):
            if node.rule not in self._behind:
                self._behind[node.rule] = set()
                self._firsts[node.rule] = _First(False)
                self._reached.append(node.rule)
        else:
            for part in self._borders.parts(node):
                self._reach(part)

    def _find_first(self, rule: str) -> bool:
        known, self._firsts[rule] = self._firsts[rule], self._first(self._rules[rule])
        return known != self._firsts[rule]

    def _first(self, node: Node) -> _First:
        self._borders.visit()
        if self._borders.is_terminal(node):
            return _First(self._borders.shape(node).is_nullable, {id(node)})
        if isinstance(node, Name):
            return self._firsts[node.rule]
        firsts = [self._first(part) for part in self._borders.parts(node)]
        if isinstance(node, Choice):
            keys = set().union(*(first.keys for first in firsts))
            return _First(any(first.is_nullable for first in firsts), keys)
        if isinstance(node, Many):
            return _First(node.least == 0 or firsts[0].is_nullable, firsts[0].keys)
        found: set[int] = set()
        for first in firsts:
            found |= first.keys
            if not first.is_nullable:
                return _First(False, found)
        return _First(True, found)

    def _find_behind(self, rule: str) -> bool:
        self._changed = False
        self._walk(self._rules[rule], self._behind[rule])
        return self._changed

    def _walk(self, node: Node, behind: set[int]) -> None:
        """`behind` is what may follow this node here."""
        self._borders.visit()
        if self._borders.is_terminal(node):
            self._borders.visit(len(behind))
            self.after[id(node)] |= behind
            return
        if isinstance(node, Name):
            known = self._behind[node.rule]
            self._changed |= not behind <= known
            self._behind[node.rule] = known | behind
            return
        if isinstance(node, Many) and node.most != 1:
            behind = behind | self._first(node.node).keys
        for part in reversed(self._borders.parts(node)):
            self._walk(part, behind)
            if isinstance(node, Sequence):
                first = self._first(part)
                behind = first.keys | behind if first.is_nullable else first.keys
