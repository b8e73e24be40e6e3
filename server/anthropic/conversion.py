"""A request of the Anthropic API as the chat request that means the same.

Pure: fields in, the fields of a chat request out. There is one way to the engine, that of chat.
"""

from __future__ import annotations

import json
from typing import Any

from server.answers import Json
from server.anthropic.schemas import (
    REFUSED,
    CustomTool,
    MessagesRequest,
    Thinking,
    ToolChoice,
    Turn,
)
from server.chat_messages import as_parts
from server.errors import InvalidRequest
from server.schemas import (
    SHARED,
    WITHOUT_EFFECT,
    ChatRequest,
    Parsed,
    parse_chat,
    parse_strict,
)
from server.unserved import refuse_unserved

NOT_HERE = "This field is not supported by this server."


def parse_messages(raw: Json) -> Parsed[ChatRequest]:
    """Raises InvalidRequest. `ignored` are the names that change nothing."""
    given = {name: value for name, value in raw.items() if value is not None}
    own, shared = _split(given)
    parsed = parse_strict(MessagesRequest, own)
    fields = parsed.fields
    chat = _chat(fields) | shared
    chat |= {
        "max_tokens": fields.max_tokens,
        "stream": fields.stream,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
    }
    if fields.stop_sequences:
        chat["stop"] = fields.stop_sequences
    return Parsed(parse_chat(chat).fields, parsed.ignored, parsed.unknown)


def parse_count(raw: Json) -> Parsed[ChatRequest]:
    given = {name: value for name, value in raw.items() if value is not None}
    own, shared = _split(given)
    # All fields of a request for an answer are taken here too.
    parsed = parse_strict(MessagesRequest, {"max_tokens": 1} | own)
    chat = _chat(parsed.fields)
    return Parsed(parse_chat(chat | shared).fields, parsed.ignored, parsed.unknown)


def _split(given: Json) -> tuple[Json, Json]:
    for name, value in given.items():
        if name in REFUSED and value not in ([], {}):
            raise InvalidRequest(NOT_HERE, param=name, code="unsupported_parameter")
        if name in MessagesRequest.model_fields or name in SHARED:
            continue
        refuse_unserved(name, value)
        if name in ChatRequest.model_fields and name not in WITHOUT_EFFECT:
            raise InvalidRequest(
                "This is a field of /v1/chat/completions.",
                param=name,
                code="unsupported_parameter",
            )
    shared = {name: given[name] for name in SHARED if name in given}
    return {name: value for name, value in given.items() if name not in shared}, shared


def _chat(fields: MessagesRequest) -> Json:
    messages = _system(fields.system)
    for index, turn in enumerate(fields.messages):
        for message in _turn(f"messages[{index}]", turn):
            if messages and messages[-1]["role"] == message["role"] in ("user", "assistant"):
                messages[-1] = _joined(messages[-1], message)
            else:
                messages.append(message)
    chat: Json = {"model": fields.model, "messages": messages}
    if fields.messages[-1].role == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if fields.tools:
        chat["tools"] = [_tool(tool) for tool in fields.tools]
    if fields.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if fields.thinking is not None:
        chat |= _thinking(fields.thinking)
    output = fields.output_config
    if output is not None and output.format is not None:
        schema = {"name": "output", "schema": output.format.schema_, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output is not None and output.effort is not None:
        chat.setdefault("reasoning_effort", output.effort)
    return chat


def _thinking(thinking: Thinking) -> Json:
    """`adaptive` leaves it to the model, as saying nothing does."""
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    if thinking.type == "adaptive":
        return {}
    if thinking.budget_tokens is None:
        raise InvalidRequest(
            "This field is required.",
            param="thinking.budget_tokens",
            code="missing_required_parameter",
        )
    return {"thinking_token_budget": thinking.budget_tokens}


def _tool(tool: CustomTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
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


def _system(system: str | list[Json] | None) -> list[Json]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    return [{"role": "system", "content": _text_parts("system", system)}]


def _joined(first: Json, second: Json) -> Json:
    """Turns of one role in a row are one turn, as the API says; templates may take no others."""
    joined = {"role": first["role"]}
    for name in ("content", "tool_calls"):
        found = [as_parts(message.get(name) or None) for message in (first, second)]
        if any(found):
            joined[name] = [*found[0], *found[1]]
    thoughts = [message.get("reasoning_content") for message in (first, second)]
    if any(thoughts):
        joined["reasoning_content"] = "\n".join(filter(None, thoughts))
    return joined


def _turn(where: str, turn: Turn) -> list[Json]:
    if turn.role == "system":  # it may come anywhere here, which to a template a developer's may
        content = turn.content
        if not isinstance(content, str):
            content = _text_parts(f"{where}.content", content)
        return [{"role": "developer", "content": content}]
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(f"{where}.content", turn.content)]
    return _user(f"{where}.content", turn.content)


def _user(where: str, blocks: list[Json]) -> list[Json]:
    """Results of tools become messages of their own, in order, with the texts between them."""
    messages: list[Json] = []
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            parts += _text_parts(where, [block], first=index)
            continue
        if parts:
            messages.append({"role": "user", "content": parts})
            parts = []
        messages.append(_tool_result(place, block))
    if parts or not messages:
        messages.append({"role": "user", "content": parts})
    return messages


def _tool_result(where: str, block: Json) -> Json:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in _text_parts(f"{where}.content", content))
    if not isinstance(content, str):
        raise InvalidRequest("Content must be a text or a list of blocks.", param=where)
    if block.get("is_error") is True:
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": _text(where, block, "tool_use_id"), "content": content}


def _assistant(where: str, blocks: list[Json]) -> Json:
    message: Json = {"role": "assistant"}
    texts: list[Json] = []
    calls = []
    thoughts = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block.get("type"):
            case "tool_use":
                calls.append(_tool_use(place, block))
            case "thinking":
                thoughts.append(_text(place, block, "thinking"))
            case _:
                texts += _text_parts(where, [block], first=index)
    if texts:
        message["content"] = texts[0]["text"] if len(texts) == 1 else texts
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tool_use(where: str, block: Json) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest("The input of a tool must be an object.", param=f"{where}.input")
    function = {"name": _text(where, block, "name"), "arguments": json.dumps(given)}
    return {"id": _text(where, block, "id"), "type": "function", "function": function}


def _text_parts(where: str, blocks: list[Json], *, first: int = 0) -> list[Json]:
    parts = []
    for index, block in enumerate(blocks, first):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"Blocks of type '{str(kind)[:40]}' are not supported here.", param=place
            )
        parts.append({"type": "text", "text": _text(place, block, "text")})
    return parts


def _text(where: str, block: Json, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest("This must be a text.", param=f"{where}.{name}")
    return value
