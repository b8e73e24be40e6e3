"""The fields tools, tool_choice and parallel_tool_calls: checked and brought into one plan.

Pure: fields in, ToolPlan or InvalidRequest out. Knows no formats and no grammars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from server.errors import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolChoice(Enum):
    """AUTO leaves it to the model; NAMED is one tool that must be called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is the client's schema, unchecked but for being an object; `index` its place."""

    index: int
    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`callable` are the tools that may be called, `shown` what the template is given."""

    choice: ToolChoice
    callable: tuple[Tool, ...]
    shown: tuple[Mapping[str, Any], ...]
    is_parallel: bool = True


NO_TOOLS = ToolPlan(ToolChoice.NONE, (), ())


def plan_tools(
    tools: Sequence[Any] | None, choice: Any, *, is_parallel: bool | None = None
) -> ToolPlan:
    """Raises InvalidRequest. No tools with auto or none is the same as no tools at all."""
    found = _read_tools(tools or ())
    kind, wanted = _read_choice(choice, has_tools=bool(found))
    if kind in (ToolChoice.REQUIRED, ToolChoice.NAMED) and not found:
        raise InvalidRequest("This tool_choice needs tools.", param="tool_choice")
    if wanted is not None and wanted not in {tool.name for tool in found}:
        raise InvalidRequest(
            f"tool_choice names '{wanted[:64]}', which is not among the tools.",
            param="tool_choice",
        )
    if kind is ToolChoice.NONE or not found:
        return NO_TOOLS
    may_call = tuple(tool for tool in found if wanted is None or tool.name == wanted)
    one_only = kind is ToolChoice.NAMED or is_parallel is False
    return ToolPlan(kind, may_call, tuple(tools or ()), is_parallel=not one_only)


def _read_tools(tools: Sequence[Any]) -> list[Tool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"There can be at most {MAX_TOOLS} tools.", param="tools")
    found = [_read_tool(index, tool) for index, tool in enumerate(tools)]
    names = [tool.name for tool in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequest(f"Two tools have the name '{min(twice)}'.", param="tools")
    return found


def _read_tool(index: int, tool: Any) -> Tool:
    where = f"tools[{index}]"
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidRequest("A tool must be {type: 'function', function: {...}}.", param=where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest("A tool needs a function.", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            "A function needs a name of 1 to 64 letters, digits, '_', '-' or '.'.",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("description") or "", str):
        raise InvalidRequest("A description must be a text.", param=f"{where}.function.description")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"The parameters of tool '{name}' must be a JSON Schema of type object.",
            param=f"{where}.function.parameters",
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest("strict must be true or false.", param=f"{where}.function.strict")
    return Tool(index, name, parameters, bool(strict))


def _read_choice(choice: Any, *, has_tools: bool) -> tuple[ToolChoice, str | None]:
    """The kind, and the name of a named choice."""
    if choice is None:
        return (ToolChoice.AUTO if has_tools else ToolChoice.NONE), None
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice), None
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return ToolChoice.NAMED, name
    raise InvalidRequest(
        "tool_choice must be 'none', 'auto', 'required' or "
        "{type: 'function', function: {name: ...}}.",
        param="tool_choice",
    )
