"""What a chat template can take, found by rendering small conversations and reading the result.

Behaviour is asked, not the source: templates reach the content of a message through slices, macros
and renamed variables that no reading of the syntax tree follows. Knows nothing of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = Mapping[str, Any]
# The text of a conversation, None if the template refuses it.
TryRender = Callable[[Sequence[Message]], str | None]

_WORDS = ("pacelinefirst", "pacelinelast")
_NAME, _KEY, _VALUE = "paceline_name", "paceline_key", "pacelinevalue"
_CALL_ID = "paceline1"  # nine letters and digits, as Mistral's templates demand


class ArgumentForm(Enum):
    """The form in which a template wants the arguments of a tool call."""

    MAPPING = "mapping"
    JSON_TEXT = "JSON text"
    UNKNOWN = "unknown"  # the template does not show tool calls


@dataclass(frozen=True, slots=True)
class ContentForms:
    """Which forms of content of one role reach the prompt whole."""

    text: bool
    parts: bool


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Content forms by role, the form of tool call arguments, and what stands for no content.

    `null_with_calls`: a message that is only a tool call has the content None, as in the API;
    otherwise the template wants "" there, like everywhere else. `late_system`: a system message
    may also come after others.
    """

    content: Mapping[str, ContentForms]
    arguments: ArgumentForm
    null_with_calls: bool
    late_system: bool


def learn_traits(attempt: TryRender) -> TemplateTraits:
    """The traits of the template behind `attempt`, at a price of about a dozen small renders."""
    arguments = _argument_form(attempt)
    content = {role: _content_forms(attempt, role, arguments) for role in _CONVERSATIONS}
    return TemplateTraits(
        content, arguments, _takes_null(attempt, arguments), _takes_late_system(attempt)
    )


def _argument_form(attempt: TryRender) -> ArgumentForm:
    for form in (ArgumentForm.MAPPING, ArgumentForm.JSON_TEXT):
        text = attempt(_call_conversation(form, ""))
        if text is not None and _NAME in text and _VALUE in text and f"'{_KEY}'" not in text:
            return form
    return ArgumentForm.UNKNOWN


def _takes_null(attempt: TryRender, arguments: ArgumentForm) -> bool:
    """Whether a call with content None is shown, and None is not."""
    if arguments is ArgumentForm.UNKNOWN:
        return False
    null = attempt(_call_conversation(arguments, None))
    empty = attempt(_call_conversation(arguments, "")) or ""
    return null is not None and _VALUE in null and null.count("None") == empty.count("None")


def _takes_late_system(attempt: TryRender) -> bool:
    late = {"role": "system", "content": _VALUE}
    text = attempt([_user("a"), {"role": "assistant", "content": "b"}, late, _user("c")])
    return text is not None and _VALUE in text


def _content_forms(attempt: TryRender, role: str, arguments: ArgumentForm) -> ContentForms:
    """A role that the template refuses altogether counts as text, so that it says so itself."""
    conversation = _CONVERSATIONS[role]
    call = _call({} if arguments is ArgumentForm.MAPPING else "{}")
    text = attempt(conversation(" ".join(_WORDS), call))
    parts = attempt(conversation([{"type": "text", "text": word} for word in _WORDS], call))
    return ContentForms(
        text=text is None or all(word in text for word in _WORDS),
        parts=parts is not None
        and all(word in parts and f"'{word}'" not in parts for word in _WORDS),
    )


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _tool(content: Any) -> Message:
    return {"role": "tool", "name": _NAME, "tool_call_id": _CALL_ID, "content": content}


def _call(arguments: Any, content: str | None = "") -> Message:
    function = {"name": _NAME, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _call_conversation(form: ArgumentForm, content: str | None) -> Sequence[Message]:
    arguments: Any = {_KEY: _VALUE}
    if form is ArgumentForm.JSON_TEXT:
        arguments = json.dumps(arguments)
    return [_user("a"), _call(arguments, content), _tool("b")]


# role -> the shortest conversation with a message of that role, given its content and a tool call
_CONVERSATIONS: dict[str, Callable[[Any, Message], Sequence[Message]]] = {
    "system": lambda content, _: [{"role": "system", "content": content}, _user("a")],
    "user": lambda content, _: [_user(content)],
    "assistant": lambda content, _: [
        _user("a"),
        {"role": "assistant", "content": content},
        _user("b"),
    ],
    "tool": lambda content, call: [_user("a"), call, _tool(content)],
}
