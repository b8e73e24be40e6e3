"""A request of the Anthropic API as the chat request that means the same.

Pure: fields in, the fields of a chat request out. There is one way to the engine, that of chat.
Owns which fields are hints, which are told as without effect where this model cannot follow them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.answers import Json
from server.anthropic.blocks import chat_messages, check_open
from server.anthropic.schemas import (
    REFUSED,
    CustomTool,
    MessagesChat,
    MessagesRequest,
    OutputFormat,
    ToolChoice,
)
from server.chat_plan import can_reason, knows_effort
from server.errors import InvalidRequest
from server.field_names import client_names
from server.prepare import ServedModel
from server.schemas import SHARED, WITHOUT_EFFECT, ChatRequest, Parsed, parse_fields, parse_strict
from server.structured import schema_part
from server.unserved import refuse_unserved

NOT_HERE = "This field is not supported by this server."
# Of a chat request, as this API calls them.
NAMES = (
    (r"messages.*", "messages"),
    (r"continue_final_message", "messages"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format", "output_config.format"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"stop", "stop_sequences"),
)


def parse_messages(raw: Json, model: ServedModel) -> Parsed[MessagesChat]:
    """Raises InvalidRequest. `ignored` are the names that change nothing."""
    own, shared = _split(raw)
    parsed = parse_strict(MessagesRequest, own)
    fields = parsed.fields
    chat: Json = {
        "max_tokens": fields.max_tokens,
        "stream": fields.stream,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
    }
    if fields.stop_sequences:
        chat["stop"] = fields.stop_sequences
    return _converted(parsed, shared | chat, model)


def parse_count(raw: Json, model: ServedModel) -> Parsed[MessagesChat]:
    own, shared = _split(raw)
    # All fields of a request for an answer are taken here too.
    return _converted(parse_strict(MessagesRequest, {"max_tokens": 1} | own), shared, model)


def _split(raw: Json) -> tuple[Json, Json]:
    """The fields of this API, and those of ours that mean the same here as in chat."""
    own, shared = {}, {}
    for name, value in raw.items():
        if value is None:
            continue
        if name in SHARED:
            shared[name] = value
            continue
        if name in REFUSED:
            if value in ([], {}):
                continue
            raise InvalidRequest(NOT_HERE, param=name, code="unsupported_parameter")
        own[name] = value
        if name in MessagesRequest.model_fields:
            continue
        refuse_unserved(name, value)
        if name in ChatRequest.model_fields and name not in WITHOUT_EFFECT:
            raise InvalidRequest(
                "This is a field of /v1/chat/completions.",
                param=name,
                code="unsupported_parameter",
            )
    return own, shared


def _converted(
    parsed: Parsed[MessagesRequest], chat: Json, model: ServedModel
) -> Parsed[MessagesChat]:
    fields = parsed.fields
    thinking, hints = _thinking(fields, model)
    hints += _unheard_edits(fields)
    if any(tool.defer_loading for tool in fields.tools):
        hints.append("tools.defer_loading")  # every tool is shown at once
    said = _chat(fields) | thinking | chat
    with client_names(NAMES):
        converted = parse_fields(MessagesChat, said)
    return Parsed(converted.fields, (*parsed.ignored, *hints), (*parsed.unknown, *hints))


def _chat(fields: MessagesRequest) -> Json:
    messages = chat_messages(fields.system, fields.messages)
    chat: Json = {
        "model": fields.model,
        "messages": messages,
        "has_context_management": fields.context_management is not None,
    }
    if fields.messages[-1].role == "assistant":
        check_open(messages[-1], f"messages[{len(fields.messages) - 1}].content")
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if fields.tools:
        chat["tools"] = [_tool(index, tool) for index, tool in enumerate(fields.tools)]
    if fields.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    form = _format(fields)
    if form is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _thinking(fields: MessagesRequest, model: ServedModel) -> tuple[Json, list[str]]:
    """What is said of thoughts, and the hints that this model cannot follow.

    `adaptive` leaves it to the model, as saying nothing does. A bound on thoughts is kept by a
    model that has none.
    """
    thinking = fields.thinking
    said: Json = {}
    unheard = []
    if thinking is not None:
        said["include_reasoning"] = thinking.display != "omitted"
        if thinking.type == "disabled":
            said["reasoning_effort"] = "none"
        elif thinking.type == "enabled" and thinking.budget_tokens is None:
            raise InvalidRequest(
                "This field is required.",
                param="thinking.budget_tokens",
                code="missing_required_parameter",
            )
        elif thinking.type == "enabled" and can_reason(model):
            said["thinking_token_budget"] = thinking.budget_tokens
        elif thinking.type != "adaptive":
            unheard.append("thinking")
    effort = None if fields.output_config is None else fields.output_config.effort
    if effort is None:
        return said, unheard
    becomes_bound = can_reason(model) and "thinking_token_budget" not in said
    if "reasoning_effort" not in said and (knows_effort(model) or becomes_bound):
        said["reasoning_effort"] = effort
    else:
        unheard.append("output_config.effort")
    return said, unheard


def _unheard_edits(fields: MessagesRequest) -> Iterator[str]:
    """All turns are kept as they are sent, which is all that a clear_thinking may ask for."""
    if fields.context_management is None:
        return
    for index, edit in enumerate(fields.context_management.edits):
        kind = edit.get("type")
        if not isinstance(kind, str):
            where = f"context_management.edits[{index}].type"
            raise InvalidRequest("This must be a text.", param=where)
        if kind != "clear_thinking_20251015" or edit.get("keep") not in ("all", {"type": "all"}):
            yield f"context_management.{kind}"


def _format(fields: MessagesRequest) -> OutputFormat | None:
    form = None if fields.output_config is None else fields.output_config.format
    if form is not None and fields.output_format is not None:
        raise InvalidRequest(
            "This is the older place of output_config.format; give one of them.",
            param="output_format",
        )
    if fields.output_format is not None:
        schema_part(fields.output_format.schema_, "output_format.schema")  # named as it was sent
    return form or fields.output_format


def _tool(index: int, tool: CustomTool) -> Json:
    if "direct" not in tool.allowed_callers:
        raise InvalidRequest(
            "Only the model itself calls tools here, so 'direct' must be among these.",
            param=f"tools[{index}].allowed_callers",
        )
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = {**parameters, "examples": tool.input_examples}
    function: Json = {"name": tool.name, "parameters": parameters}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("This tool_choice needs a name.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
