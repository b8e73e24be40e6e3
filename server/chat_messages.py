"""Brings the messages of a request into the form that a chat template can take, losing none.

Pure: messages and traits in, messages out. Rules: text parts become one text with a line break
between them unless the template takes parts; absent, null and empty content are one and the same
(""; None beside tool calls, if the template takes it); arguments of tool calls become mappings;
`developer` is `system` to a template that does not know it, and part of the message beside it where
that must come first; what a template would leave out without a word is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from server.template_traits import ArgumentForm, ContentForms, TemplateTraits

PART_JOINER = "\n"
_UNPROBED = ContentForms(text=True, parts=False)


class TemplateError(ValueError):
    """A conversation that cannot be rendered: the client's error, with a message for the client.

    `param` names the place in the request, such as "messages[1].content", if there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def fit_messages(
    messages: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    *,
    knows_developer: bool,
    first_index: int = 0,
) -> list[dict[str, Any]]:
    """New messages for a template with these traits; raises TemplateError.

    `first_index` is -1 where the first message is not the client's.
    """
    placed = list(enumerate(messages, first_index))
    if not (knows_developer or traits.late_system):
        placed = _without_late_developers(placed)
    return [
        _fit(f"messages[{index}]", message, traits, knows_developer=knows_developer)
        for index, message in placed
    ]


Placed = tuple[int, Mapping[str, Any]]


def _without_late_developers(messages: Sequence[Placed]) -> list[Placed]:
    """Clients put orders where they arise. What cannot stand there joins the first message, or the
    user's beside it; with none beside it, it is a user's."""
    rows: list[tuple[int, list[Mapping[str, Any]]]] = []  # each becomes one message
    is_own = False  # the last one is a user's only because it could not be a developer's
    for index, message in messages:
        role = message.get("role")
        before = rows[-1][1][0].get("role") if rows else None
        is_late = role == "developer" and bool(rows)
        is_first = len(rows) == 1 and before in ("system", "developer")
        if (is_late and (before == "user" or is_first)) or (role == "user" and is_own):
            rows[-1][1].append(message)
            is_own = is_own and is_late
        else:
            rows.append((index, [{**message, "role": "user"} if is_late else message]))
            is_own = is_late
    return [(index, row[0] if len(row) == 1 else _joined(row)) for index, row in rows]


def _joined(row: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = [part for message in row for part in as_parts(message.get("content"))]
    return {**row[0], "content": parts}


def as_parts(content: str | Sequence[dict[str, Any]] | None) -> Sequence[dict[str, Any]]:
    """A message's content as parts, so that others can stand beside them."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _fit(
    where: str, message: Mapping[str, Any], traits: TemplateTraits, *, knows_developer: bool
) -> dict[str, Any]:
    fitted = {name: value for name, value in message.items() if value is not None}
    if fitted.get("role") == "developer" and not knows_developer:
        fitted["role"] = "system"
    role = fitted.get("role")
    if not isinstance(role, str):
        raise TemplateError("A message needs a role.", f"{where}.role")
    forms = traits.content.get("system" if role == "developer" else role, _UNPROBED)
    fitted["content"] = _content(f"{where}.content", role, fitted.get("content"), forms)
    calls = fitted.pop("tool_calls", None)
    if calls:
        calls = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
        if traits.arguments is ArgumentForm.UNKNOWN:
            fitted["content"] = _append_text(fitted["content"], _calls_text(calls))
        else:
            fitted["tool_calls"] = [_formed(call, traits.arguments) for call in calls]
            if fitted["content"] == "" and traits.null_with_calls:
                fitted["content"] = None
    return fitted


def _content(
    where: str, role: str, content: Any, forms: ContentForms
) -> str | list[dict[str, Any]]:
    if content is None or content == []:
        return ""
    texts = [content] if isinstance(content, str) else _texts(where, content)
    if not any(texts):
        return ""
    if forms.parts and (not isinstance(content, str) or not forms.text):
        return [{"type": "text", "text": text} for text in texts]
    if not forms.text:
        raise TemplateError(
            f"This model's chat template leaves out messages of role '{role}'.", where
        )
    return PART_JOINER.join(texts)


def _texts(where: str, content: Any) -> list[str]:
    if not isinstance(content, list):
        raise TemplateError("Content must be a string or a list of parts.", where)
    texts = []
    for index, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise TemplateError("Only text parts are supported.", f"{where}[{index}]")
        texts.append(part["text"])
    return texts


def _call(where: str, call: Any) -> dict[str, Any]:
    """The tool call with its arguments as a mapping."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError("A tool call needs a function with a name.", f"{where}.function")
    arguments = read_arguments(f"{where}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def read_arguments(where: str, arguments: Any) -> dict[str, Any]:
    """Of a call that was made before. Raises TemplateError."""
    if isinstance(arguments, str):
        try:
            arguments = _strict_json(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise TemplateError(f"{where} is not valid JSON.", where) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"{where} must be a JSON object.", where)
    return dict(arguments)


def _strict_json(text: str) -> Any:
    """Python would read NaN, and make Infinity of a number that is too large; JSON has neither."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no number of JSON")
    return value


def _formed(call: dict[str, Any], form: ArgumentForm) -> dict[str, Any]:
    if form is ArgumentForm.MAPPING:
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": _json(function["arguments"])}}


def _calls_text(calls: Sequence[dict[str, Any]]) -> str:
    """Tool calls as text, for a template that shows none."""
    return _json({"tool_calls": [call["function"] for call in calls]})


def _append_text(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return content + PART_JOINER + text if content else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
