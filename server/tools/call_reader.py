"""From a model's text to tool calls, piece by piece and in linear time.

Owns one answer's text after its reasoning. Every character is looked at a bounded number of times,
whatever the model writes; what turns out to be no call is content, exactly as it was written. Knows
no HTTP.

    text --> content | marker --> head of a call --> arguments, passed on as they come --> tail
                                     ^-------------------------------------------------------|
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

from server.tools.formats import ToolFormat
from server.tools.pieces import Piece, Pieces

MAX_NAME_CHARS = 256
MAX_DEPTH = 256
# Of one answer; what comes after so many is content.
MAX_CALLS = 128
MAX_FALSE_STARTS = 1000

_SPACES = re.compile(r"[ \t\r\n]+")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_IN_STRING = re.compile(r'["\\]')
_OUT_OF_STRING = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_CALL_ID = "[CALL_ID]"  # the call's own id may follow its name; clients get one of ours


class _State(Enum):
    START = auto()  # nothing but white space so far
    CONTENT = auto()
    OPENED = auto()  # after a marker: "[" or "{"
    KEY = auto()  # in a call's object: a key or "}"
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    NEXT = auto()  # after a value: "," or "}"
    BETWEEN = auto()  # after a call: another one, or the end of calls
    REST = auto()  # content to the end: no marker is looked for any more


class CallReader:
    """Give all text to `feed` and call `finish` once; both return what is certain by then."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._markers = tuple(marker for marker in (form.opening, form.also) if marker)
        self._state = _State.CONTENT if form.opening else _State.START
        self._text = ""
        self._at = 0  # of `_text`, what is consumed
        self._pieces = Pieces()
        self._raw: list[str] = []  # consumed since the marker, until a call is certain
        self._in_list = False
        self._num_false_starts = 0
        self._begin_object()

    def _begin_object(self) -> None:
        self._name: str | None = None
        self._key = ""
        self._held: list[str] = []  # arguments that came before the name
        self._started = False
        self._has_arguments = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_scalar = False
        self._is_bare = False  # a name and its arguments, with no object around them

    @property
    def num_calls(self) -> int:
        return self._pieces.num_calls

    @property
    def num_undecided(self) -> int:
        """Characters at the end that may still become a call, where there is none so far."""
        self._raw = ["".join(self._raw)]  # asked for with each character, so it must be short
        return len(self._raw[0]) + len(self._text) - self._at

    def feed(self, text: str) -> list[Piece]:
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._at < len(self._text) and self._step():
            pass
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """The text is at its end: what could have become a call and did not is content."""
        if not self._started:
            self._raw.append(self._text[self._at :])
            self._pieces.add_content("".join(self._raw))
            self._pieces.end()
        return self._pieces.take()

    def _step(self) -> bool:
        """Consumes what it can; False if it must see more."""
        match self._state:
            case _State.CONTENT:
                return self._content()
            case _State.REST:
                self._pieces.add_content(self._rest(len(self._text)))
                return True
            case _State.IN_VALUE:
                return self._in_value()
        spaces = _SPACES.match(self._text, self._at)
        if spaces is not None:
            self._consume(spaces.end())
            return True
        if self._state is _State.START:
            return self._start()
        return self._in_head(self._text[self._at])

    # --- around calls -----------------------------------------------------------------------------

    def _start(self) -> bool:
        """A call without a marker can only be the first thing in an answer."""
        also = self._form.also
        ahead = self._text[self._at : self._at + len(also)]
        if ahead[0] in "{[":
            self._state = _State.OPENED
        elif also.startswith(ahead):
            if len(ahead) < len(also):
                return False
            self._consume(self._at + len(also))
            self._state = _State.OPENED
        else:
            self._give_up()
        return True

    def _content(self) -> bool:
        found = [
            (at, marker)
            for marker in self._markers
            if (at := self._text.find(marker, self._at)) >= 0
        ]
        if not found:
            end = len(self._text) - _partial(self._text[self._at :], self._markers)
            self._pieces.add_content(self._rest(end))
            return False
        at, marker = min(found)
        self._pieces.add_content(self._rest(at))
        self._consume(at + len(marker))
        self._state = _State.OPENED
        return True

    def _in_head(self, character: str) -> bool:
        match self._state:
            case _State.OPENED if character == "{":
                self._begin_object()
                self._go(_State.KEY)
            case _State.OPENED if character == "[" and not self._in_list:
                self._in_list = True
                self._go(_State.OPENED)
            case _State.OPENED if character == "]" and self._in_list:
                self._state = _State.BETWEEN
            case _State.OPENED if self._form.separator and not self._in_list:
                return self._read_bare_name()
            case _State.KEY if character == '"':
                return self._read_string(_State.COLON)
            case _State.KEY | _State.NEXT if character == "}":
                self._end_call()
            case _State.COLON if character == ":":
                self._go(_State.VALUE)
            case _State.VALUE:
                return self._begin_value(character)
            case _State.NEXT if character == ",":
                self._go(_State.KEY)
            case _State.BETWEEN:
                return self._between(character)
            case _:
                self._give_up()
        return True

    def _go(self, state: _State) -> None:
        self._consume(self._at + 1)
        self._state = state

    def _between(self, character: str) -> bool:
        """After a call, or after an empty list of them."""
        closing = self._form.closing
        ahead = self._text[self._at : self._at + len(closing)]
        self._raw.clear()  # what stands between calls is nobody's content
        if character in ",;" and self.num_calls < MAX_CALLS:
            self._go(_State.OPENED)
        elif character == "{":
            self._state = _State.OPENED
        elif character == "]" and self._in_list:
            self._in_list = False
            self._at += 1
        elif closing and closing.startswith(ahead):
            if len(ahead) < len(closing):
                return False
            self._consume(self._at + len(closing))
            self._raw.clear()
            self._in_list = False
            self._state = _State.CONTENT if self.num_calls < MAX_CALLS else _State.REST
        else:
            self._give_up()
        return True

    # --- one call ---------------------------------------------------------------------------------

    def _read_string(self, following: _State) -> bool:
        """A key, or the name: short, so waiting for all of it is cheap."""
        match = _STRING.match(self._text, self._at, self._at + MAX_NAME_CHARS + 2)
        if match is None:
            if len(self._text) - self._at > MAX_NAME_CHARS:
                self._give_up()
                return True
            return False
        if following is _State.COLON:
            self._key = match[1]
        else:
            self._name = match[1]
        self._consume(match.end())
        self._state = following
        if following is _State.NEXT:
            self._start_call()
        return True

    def _read_bare_name(self) -> bool:
        """name[ARGS], and then the arguments."""
        separator = self._form.separator
        longest = MAX_NAME_CHARS + len(separator)
        at = self._text.find(separator, self._at, self._at + longest)
        if at < 0 and len(self._text) - self._at < longest:
            return False
        name = self._text[self._at : max(at, self._at)].partition(_CALL_ID)[0].strip()
        if not _NAME.fullmatch(name):
            self._give_up()
            return True
        self._begin_object()
        self._is_bare = True
        self._name, self._key = name, self._form.arguments
        self._consume(at + len(separator))
        self._start_call()
        self._state = _State.VALUE
        return True

    def _begin_value(self, character: str) -> bool:
        if self._key == "name" and not self._started:
            if character == '"':
                return self._read_string(_State.NEXT)
            self._give_up()
            return True
        if self._key == self._form.arguments:
            if self._has_arguments or character not in "{n":  # n: null is no arguments
                self._give_up()
                return True
            self._has_arguments = character == "{"
        self._depth, self._in_string, self._escaped = 0, False, False
        self._is_scalar = character not in '{["'
        self._state = _State.IN_VALUE
        return True

    def _in_value(self) -> bool:
        """Passes over a value; its end is where brackets and quotes say so."""
        end = self._end_of_scalar() if self._is_scalar else self._end_of_value()
        is_whole = end is not None
        text = self._text[self._at : end]
        self._consume(len(self._text) if end is None else end)
        if self._key == self._form.arguments and self._has_arguments:
            if self._started:
                self._pieces.add_arguments(text)
            else:
                self._held.append(text)
        if self._depth > MAX_DEPTH:
            self._give_up()
        elif is_whole and self._is_bare:
            self._close_call()
        elif is_whole:
            self._state = _State.NEXT
        return True

    def _end_of_scalar(self) -> int | None:
        found = _SCALAR_END.search(self._text, self._at)
        return None if found is None else found.start()

    def _end_of_value(self) -> int | None:
        """Where a string, list or object ends; None if it does not end yet. Keeps its depth."""
        at = self._at
        while at < len(self._text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            pattern = _IN_STRING if self._in_string else _OUT_OF_STRING
            found = pattern.search(self._text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                    continue
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if (self._depth <= 0 and not self._in_string) or self._depth > MAX_DEPTH:
                return at
        return None

    def _start_call(self) -> None:
        """The name is known: from here on it is a call, come what may."""
        assert self._name is not None
        if not self._form.opening and self._name not in self._names:
            self._give_up()  # an answer in JSON that happens to have a name
            return
        self._raw.clear()
        self._started = True
        self._pieces.start_call(self._name)
        self._pieces.add_arguments("".join(self._held))
        self._held.clear()

    def _end_call(self) -> None:
        if not self._started:
            self._give_up()
            return
        self._consume(self._at + 1)
        self._close_call()

    def _close_call(self) -> None:
        if not self._has_arguments:
            self._pieces.add_arguments("{}")
        self._state = _State.BETWEEN
        self._started = False

    # --- what goes out ----------------------------------------------------------------------------

    def _rest(self, end: int) -> str:
        """Consumes up to `end` what belongs to no call."""
        text = self._text[self._at : end]
        self._at = end
        return text

    def _consume(self, end: int) -> None:
        if not self._started:
            self._raw.append(self._text[self._at : end])
        self._at = end

    def _give_up(self) -> None:
        """What was taken for a call is content; after a call has begun, only what is left."""
        self._num_false_starts += 1
        self._in_list = False
        is_lost = self._started or not self._form.opening
        is_lost |= self._num_false_starts > MAX_FALSE_STARTS
        self._state = _State.REST if is_lost else _State.CONTENT
        self._started = False
        raw = "".join(self._raw)
        self._raw.clear()
        self._pieces.add_content(raw)


def _partial(text: str, markers: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
