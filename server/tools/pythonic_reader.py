"""Calls written as in Python, `[f(a="x"), g()]`, from a model's text to names and JSON arguments.

Owns one answer's text after its reasoning, like CallReader, and gives the same pieces: a call is
certain with the first name of an argument, each argument goes out when its value is whole. An
answer that begins with an object instead is CallReader's. Every character is looked at a bounded
number of times. Knows no HTTP.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from enum import Enum, auto
from typing import Any

from server.tools.call_reader import MAX_CALLS, MAX_NAME_CHARS, CallReader
from server.tools.formats import ToolFormat
from server.tools.pieces import Piece, Pieces

# Python's own parser refuses a little more.
MAX_DEPTH = 64
MAX_VALUE_CHARS = 1 << 20
_CLOSING = "<|python_end|>"
_SPACES = re.compile(r"[ \t\r\n]+")
_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)\s*\(")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)")
_SPECIAL = re.compile(r"""['"(){}\[\],]""")
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}


class _State(Enum):
    START = auto()
    CALL = auto()  # a name and its parenthesis
    ARGUMENT = auto()  # a name and "=", or the end of the call
    VALUE = auto()
    BETWEEN = auto()  # after a call: "," or "]"
    CLOSING = auto()  # after the list: its marker, or content
    REST = auto()  # content to the end


class PythonicReader:
    """Give all text to `feed` and call `finish` once; both return what is certain by then."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._objects = CallReader(form, names)
        self._is_object = False
        self._state = _State.START
        self._text = ""
        self._at = 0
        self._pieces = Pieces()
        self._raw: list[str] = []  # consumed, until a call is certain
        self._name = ""
        self._started = False
        self._num_arguments = 0
        self._begin_value("")

    def _begin_value(self, key: str) -> None:
        self._key = key
        self._value: list[str] = []
        self._size = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def num_calls(self) -> int:
        return (self._objects if self._is_object else self._pieces).num_calls

    @property
    def num_undecided(self) -> int:
        """Characters at the end that may still become a call, where there is none so far."""
        if self._is_object:
            return self._objects.num_undecided
        self._raw = ["".join(self._raw)]  # asked for with each character, so it must be short
        return len(self._raw[0]) + len(self._text) - self._at

    def feed(self, text: str) -> list[Piece]:
        if self._is_object:
            return self._objects.feed(text)
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._at < len(self._text) and not self._is_object and self._step():
            pass
        if self._is_object:
            return self._objects.feed("".join(self._raw) + self._text[self._at :])
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """The text is at its end: what could have become a call and did not is content."""
        if self._is_object:
            return self._objects.finish()
        if not self._started:
            self._pieces.add_content("".join([*self._raw, self._text[self._at :]]))
            self._pieces.end()
        return self._pieces.take()

    def _step(self) -> bool:
        """Consumes what it can; False if it must see more."""
        if self._state is _State.REST:
            self._pieces.add_content(self._text[self._at :])
            self._at = len(self._text)
            return True
        if self._state is _State.VALUE:
            return self._in_value()
        spaces = _SPACES.match(self._text, self._at)
        if spaces is not None:
            self._consume(spaces.end())
            return True
        match self._state:
            case _State.START:
                return self._start()
            case _State.CALL:
                return self._begin_call()
            case _State.ARGUMENT:
                return self._argument()
            case _State.CLOSING:
                return self._pass_over(_CLOSING, _State.REST)
        return self._between()

    def _start(self) -> bool:
        if self._text[self._at] == "{":
            self._is_object = True
        elif self._text[self._at] == "[":
            self._go(_State.CALL)
        else:
            return self._pass_over(self._form.also, _State.START)
        return True

    def _pass_over(self, marker: str, following: _State) -> bool:
        ahead = self._text[self._at : self._at + len(marker)]
        if not marker.startswith(ahead):
            self._give_up()
        elif len(ahead) < len(marker):
            return False
        else:
            self._consume(self._at + len(marker))
            self._state = following
            if following is _State.REST:
                self._raw.clear()
        return True

    def _begin_call(self) -> bool:
        found = _CALL.match(self._text, self._at, self._at + MAX_NAME_CHARS)
        if found is None:
            return self._wait_or_give_up(r"[A-Za-z_][A-Za-z0-9_.-]*\s*")
        if found[1] not in self._names or self._pieces.num_calls >= MAX_CALLS:
            self._give_up()
            return True
        self._name, self._num_arguments = found[1], 0
        self._consume(found.end())
        self._state = _State.ARGUMENT
        return True

    def _argument(self) -> bool:
        if self._text[self._at] == ")":
            self._start_call()
            self._pieces.add_arguments("}" if self._num_arguments else "{}")
            self._go(_State.BETWEEN)
            self._started = False
            self._raw.clear()
            return True
        found = _KEY.match(self._text, self._at, self._at + MAX_NAME_CHARS)
        # The character after "=" must be known: "==" is no argument.
        if found is not None and found.end() == len(self._text):
            return False
        if found is None:
            return self._wait_or_give_up(r"[A-Za-z_][A-Za-z0-9_]*\s*=?")
        self._start_call()
        self._begin_value(found[1])
        self._consume(found.end())
        self._state = _State.VALUE
        return True

    def _in_value(self) -> bool:
        end = self._end_of_value()
        text = self._text[self._at : end]
        self._size += len(text)
        self._value.append(text)
        self._consume(len(self._text) if end is None else end)
        if self._depth > MAX_DEPTH or self._size > MAX_VALUE_CHARS:
            self._give_up()
        elif end is not None:
            comma = ", " if self._num_arguments else "{"
            value = as_json("".join(self._value).strip())
            self._pieces.add_arguments(f"{comma}{json.dumps(self._key)}: {value}")
            self._num_arguments += 1
            if self._text[self._at] == ",":
                self._consume(self._at + 1)
            self._state = _State.ARGUMENT
        return True

    def _end_of_value(self) -> int | None:
        """Where the "," or ")" after a value is; None if it is not there yet. Keeps its depth."""
        at = self._at
        while at < len(self._text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            pattern = _IN_STRING[self._quote] if self._quote else _SPECIAL
            found = pattern.search(self._text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case "'" | '"':
                    self._quote = "" if self._quote else found[0]
                case "(" | "[" | "{":
                    self._depth += 1
                case "," if self._depth == 0:
                    return found.start()
                case ")" | "]" | "}":
                    if self._depth == 0:
                        return found.start()
                    self._depth -= 1
            if self._depth > MAX_DEPTH:
                return at
        return None

    def _between(self) -> bool:
        self._raw.clear()
        if self._text[self._at] == ",":
            self._go(_State.CALL)
        elif self._text[self._at] == "]":
            self._at += 1
            self._state = _State.CLOSING
        else:
            self._give_up()
        return True

    def _wait_or_give_up(self, beginning: str) -> bool:
        """False where all that is left may still become what was looked for."""
        left = self._text[self._at :]
        if len(left) < MAX_NAME_CHARS and re.fullmatch(beginning, left):
            return False
        self._give_up()
        return True

    def _go(self, state: _State) -> None:
        self._consume(self._at + 1)
        self._state = state

    def _consume(self, end: int) -> None:
        if not self._started:
            self._raw.append(self._text[self._at : end])
        self._at = end

    def _start_call(self) -> None:
        if self._started:
            return
        self._started = True
        self._raw.clear()
        self._pieces.start_call(self._name)

    def _give_up(self) -> None:
        """What was taken for a call is content, and so is all that follows."""
        self._state = _State.REST
        self._started = False
        raw = "".join(self._raw)
        self._raw.clear()
        self._pieces.add_content(raw)


def as_json(text: str) -> str:
    """A value as JSON: JSON's own, a literal of Python, or else the text itself as a string."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes of a model are no matter of ours
            value: Any = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
