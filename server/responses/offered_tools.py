"""The tools of a Responses request as functions of a chat request.

Pure. A namespace is a group of functions under one name, which calls of them bear. A tool that
OpenAI's servers would run is run by nobody here: beside functions that the model is free to call it
is an offer that is not made, and told so; alone or demanded, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from server.answers import Json
from server.errors import InvalidRequest
from server.responses.schemas import CountRequest, Function, Tool

_OWN = ("function", "namespace")


@dataclass(slots=True)
class OfferedTools:
    """`places` are where each of `functions` stands in the body, `namespaces` those of functions
    that are in one, `unheard` the tools that are not offered."""

    functions: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    namespaces: dict[str, str] = field(default_factory=dict)
    unheard: list[str] = field(default_factory=list)

    def names(self) -> list[tuple[str, str]]:
        """What the client calls the fields of each function."""
        return [
            (rf"tools\[{index}\](\.function)?", place) for index, place in enumerate(self.places)
        ]


def offered_tools(fields: CountRequest) -> OfferedTools:
    """Raises InvalidRequest."""
    offered = OfferedTools()
    is_free = fields.tool_choice in ("auto", "none") and any(
        tool.type in _OWN for tool in fields.tools
    )
    for index, tool in enumerate(fields.tools):
        place = f"tools[{index}]"
        if tool.type not in _OWN:
            if not is_free:
                raise InvalidRequest(
                    f"Tools of type '{tool.type[:40]}' are not supported here.",
                    param=f"{place}.type",
                )
            offered.unheard.append(f"tools.{tool.type}")
            continue
        for where, function, description in _functions(place, tool):
            offered.functions.append(_chat_function(function, description))
            offered.places.append(where)
            if tool.type == "namespace":
                offered.namespaces[function.name] = tool.name or ""
    return offered


def _functions(place: str, tool: Tool) -> Iterator[tuple[str, Function, str | None]]:
    """(place, function, what the model is told of it)."""
    if tool.name is None:
        raise InvalidRequest(
            "This field is required.", param=f"{place}.name", code="missing_required_parameter"
        )
    foreign = {"tools"} if tool.type == "function" else {"parameters", "strict"}
    for name in sorted(foreign & tool.model_fields_set):
        raise InvalidRequest(f"A {tool.type} has none.", param=f"{place}.{name}")
    if tool.type == "function":
        function = Function.model_validate({**tool.model_dump(), "name": tool.name})
        yield place, function, tool.description
        return
    # What a namespace is about is said once, with the first of it.
    about = tool.description
    for index, function in enumerate(tool.tools):
        texts = filter(None, (about, function.description))
        yield f"{place}.tools[{index}]", function, "\n".join(texts) or None
        about = None


def _chat_function(function: Function, description: str | None) -> Json:
    given = function.model_dump(include={"name", "parameters", "strict"}, exclude_none=True)
    if description is not None:
        given["description"] = description
    return {"type": "function", "function": given}


def shown_tools(fields: CountRequest) -> list[Json]:
    """As the response tells of them: those that are offered."""
    return [_shown(tool) for tool in fields.tools if tool.type in _OWN]


def _shown(tool: Tool) -> Json:
    if tool.type == "function":
        given = tool.model_dump(exclude={"tools"})
        return {**given, "strict": bool(tool.strict)}
    head = tool.model_dump(include={"type", "name", "description"})
    inner = [{**one.model_dump(), "strict": bool(one.strict)} for one in tool.tools]
    return {**head, "tools": inner}
