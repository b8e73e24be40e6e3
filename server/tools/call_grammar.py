"""The grammar of tool calls in a format: the rule `calls`, and what surrounds it.

Owns how a ToolFormat becomes Lark. Which schema binds whom: where a call is asked for (required,
named) every tool's; left to the model (auto) only those marked strict, the others take any object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.grammar_text import ANYTHING, Part, literal
from server.tools.call_reader import MAX_CALLS
from server.tools.definitions import Tool, ToolChoice, ToolPlan
from server.tools.formats import ToolFormat

# A marker that is a special token is not text to a grammar; the caller knows the vocabulary.
Marker = Callable[[str], str]
SchemaPart = Callable[[Any, str], Part]


@dataclass(frozen=True, slots=True)
class CallRules:
    """`rules` define `calls`, `prose` (an answer without any) and `prose_calls` (both)."""

    rules: str
    parts: dict[str, Part]
    labels: dict[str, str]


def call_rules(
    plan: ToolPlan, form: ToolFormat, *, marker: Marker, schema_part: SchemaPart
) -> CallRules:
    """`schema_part` makes the part of a client's schema, and refuses a bad one."""
    parts: dict[str, Part] = {}
    labels: dict[str, str] = {}
    bodies = []
    for tool in plan.callable:
        name = f"tool_{tool.index}"
        label = f"tool '{tool.name}'"
        place = f"tools[{tool.index}].function.parameters"
        parts[name] = schema_part(_schema(tool, plan.choice), place)
        labels[name] = label
        if form.separator:
            bodies.append(f"{literal(tool.name)} {marker(form.separator)} @{name}")
            continue
        head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
        bodies.append(f'{literal(head)} @{name} "}}"')
    rules = [f"body: {' | '.join(bodies)}", *_around(plan, form, marker)]
    return CallRules("\n".join(rules), parts, labels)


def _around(plan: ToolPlan, form: ToolFormat, marker: Marker) -> list[str]:
    """`calls` begins with the marker, `rest` right after it."""
    limit = MAX_CALLS - 1 if plan.is_parallel else 0
    opening = marker(form.opening) if form.opening else ""
    if form.is_list:
        rest = (
            f'"[" body{_more(f"{literal(form.between)} body", limit)} {literal("]" + form.closing)}'
        )
    elif form.opening:
        inner, closing, between = (
            literal(text) if text else ""
            for text in (form.before, form.after + form.closing, form.between)
        )
        call = f"{opening} {inner} body {closing}"
        rest = f"{inner} body {closing}{_more(f'{between} {call}', limit)}"
    else:
        rest = f"body{_more(f'{literal(form.between)} body', limit)}"
    rules = [f"rest: {rest}", f"calls: {opening} rest"]
    if not form.opening:
        return [*rules, r"prose: /[ \t\r\n]*([^ \t\r\n{\[](.|\n)*)?/", "prose_calls: rest"]
    if opening.startswith("<["):  # never in text
        return [*rules, rf"prose: {ANYTHING}", f"prose_calls: prose {opening} rest"]
    # Up to the marker, as soon as it is there; a prose that goes on to the end has none.
    return [
        *rules,
        "prose: PROSE",
        f"PROSE: {ANYTHING} & ~HOLDS",
        f"HOLDS: {ANYTHING} {opening} {ANYTHING}",
        f"until[suffix={opening}]: {ANYTHING}",
        "prose_calls: until rest",
    ]


def _more(item: str, limit: int) -> str:
    return f" ({item}){{0,{limit}}}" if limit else ""


def _schema(tool: Tool, choice: ToolChoice) -> dict[str, Any]:
    if choice is ToolChoice.AUTO and not tool.is_strict:
        return {"type": "object"}
    schema = dict(tool.parameters)
    if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.setdefault("type", "object")
    return schema
