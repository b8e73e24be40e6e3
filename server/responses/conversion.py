"""A request of the Responses API as the chat request that means the same.

Pure: items in, messages out. There is one way to the engine, that of chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.answers import Json
from server.chat_messages import TemplateError, read_arguments
from server.errors import InvalidRequest
from server.responses.offered_tools import OfferedTools
from server.responses.schemas import REFUSED, CountRequest, ResponseRequest
from server.schemas import SHARED, WITHOUT_EFFECT, ChatRequest
from server.unserved import refuse_unserved

LOGPROBS = "message.output_text.logprobs"
# Of a chat request, as this API calls them.
NAMES = (
    (r"messages.*", "input"),
    (r"max_tokens", "max_output_tokens"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
)
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def split(raw: Json) -> tuple[Json, Json]:
    """The fields of this API, and those of ours that mean the same here as in chat."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name, value in given.items():
        if name in REFUSED:
            raise InvalidRequest(
                "This field is not supported by this server.",
                param=name,
                code="unsupported_parameter",
            )
        if name in ResponseRequest.model_fields or name in SHARED:
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


def input_items(fields: CountRequest) -> list[Json]:
    if isinstance(fields.input, str):
        part = {"type": "input_text", "text": fields.input}
        return [{"type": "message", "role": "user", "content": [part]}]
    return fields.input


def chat_prompt(fields: CountRequest, earlier: Sequence[Json], offered: OfferedTools) -> Json:
    """The fields of a chat request that make its prompt; `earlier` are items said before.

    Instructions are of this request alone; those of an earlier one are not said again.
    """
    messages: list[Json] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    messages += messages_of([*earlier, *input_items(fields)], num_earlier=len(earlier))
    chat: Json = {"messages": messages}
    if fields.model is not None:
        chat["model"] = fields.model
    if offered.functions:
        chat["tools"] = offered.functions
        chat["tool_choice"] = _tool_choice(fields.tool_choice)
        chat["parallel_tool_calls"] = fields.parallel_tool_calls
    elif fields.tool_choice not in ("auto", "none"):
        raise InvalidRequest("This tool_choice needs tools.", param="tool_choice")
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    form = None if fields.text is None else fields.text.format
    if form is not None and form.type != "json_schema":
        chat["response_format"] = {"type": form.type, "schema": form.schema_}
    elif form is not None:
        if form.schema_ is None:
            raise InvalidRequest(
                "This field is required.",
                param="text.format.schema",
                code="missing_required_parameter",
            )
        wrapper = {"name": form.name or "output", "schema": form.schema_, "strict": form.strict}
        chat["response_format"] = {"type": "json_schema", "json_schema": wrapper}
    return chat


def chat_request(fields: ResponseRequest, earlier: Sequence[Json], offered: OfferedTools) -> Json:
    chat = chat_prompt(fields, earlier, offered)
    chat |= {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "stream": fields.stream or fields.background,  # who comes later may want to follow it
        "logprobs": LOGPROBS in fields.include or fields.top_logprobs > 0,
        "top_logprobs": fields.top_logprobs,
    }
    if fields.max_output_tokens is not None:
        chat["max_tokens"] = fields.max_output_tokens
    return chat


def messages_of(items: Sequence[Json], *, num_earlier: int = 0) -> list[Json]:
    """What the assistant thought, said and called in a row is one message to a chat template.

    The first `num_earlier` items are not of this request.
    """
    messages: list[Json] = []
    for index, item in enumerate(items, -num_earlier):
        where = f"input[{index}]" if index >= 0 else "previous_response_id"
        kind = item.get("type") or "message"
        match kind:
            case "message":
                message = _message(where, item)
                only_thought = messages and messages[-1].keys() == {"role", "reasoning_content"}
                if message["role"] == "assistant" and only_thought:
                    messages[-1]["content"] = message["content"]
                else:
                    messages.append(message)
            case "function_call":
                call = _call(where, item)
                _open_assistant(messages).setdefault("tool_calls", []).append(call)
            case "reasoning":
                name = "content" if item.get("content") else "summary"
                thought = _text_of(f"{where}.{name}", item.get(name) or [])
                _open_assistant(messages, anew=True)["reasoning_content"] = thought
            case "function_call_output":
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": _string(where, item, "call_id"),
                        "content": _text_of(f"{where}.output", item.get("output")),
                    }
                )
            case _:
                raise InvalidRequest(
                    f"Items of type '{str(kind)[:40]}' are not supported here.", param=where
                )
    return messages


def _open_assistant(messages: list[Json], *, anew: bool = False) -> Json:
    """The assistant's message at the end, made if there is none or a new one begins."""
    if anew or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _message(where: str, item: Json) -> Json:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(
            "A role is user, assistant, system or developer.", param=f"{where}.role"
        )
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise InvalidRequest("This must be a text or a list of parts.", param=f"{where}.content")
    return {"role": role, "content": _parts(f"{where}.content", content)}


def _parts(where: str, content: list[Any]) -> list[Json]:
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise InvalidRequest(
                f"Parts of type '{str(kind)[:40]}' are not supported here.", param=place
            )
        parts.append({"type": "text", "text": _string(place, part, name)})
    return parts


def _text_of(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("This must be a text or a list of parts.", param=where)
    return "\n".join(part["text"] for part in _parts(where, value))


def _call(where: str, item: Json) -> Json:
    arguments = _string(where, item, "arguments")
    try:
        read_arguments(f"{where}.arguments", arguments)
    except TemplateError as error:
        raise InvalidRequest(str(error), param=error.param, code="chat_template_error") from None
    function = {"name": _string(where, item, "name"), "arguments": arguments}
    return {"id": _string(where, item, "call_id"), "type": "function", "function": function}


def _string(where: str, item: Json, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest("This must be a text.", param=f"{where}.{name}")
    return value


def _tool_choice(choice: str | Json) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequest(
            "tool_choice is none, auto, required or {type: 'function', name}.",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}
