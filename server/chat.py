"""POST /v1/chat/completions: messages to a prompt, and the plan of its answer.

Owns what is particular to chat; how the answer is written is in chat_format.py, the way through the
core in inference.py.
"""

from __future__ import annotations

import secrets
from typing import Any, cast

from server.chat_plan import plan_chat, template_variables, tool_format
from server.chat_template import ChatTemplate, TemplateError
from server.errors import InvalidRequest
from server.field_names import client_names
from server.generation import PromptGroup
from server.prepare import (
    LogprobsWish,
    ServedModel,
    check_length,
    check_prompt_logprobs,
    make_group,
)
from server.reasoning import CLOSING, OPENING
from server.requests import RequestOrigin
from server.schemas import ChatRequest
from server.special_text import MarkedText, Shield
from server.sse import to_json
from server.text import TextError
from server.tools.definitions import ToolPlan, plan_tools
from server.tools.formats import INSTRUCTIONS
from server.truncation import truncate_prompt

# What the server says to the template, and a client must not.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


def prepare_chat(
    fields: ChatRequest, model: ServedModel, origin: RequestOrigin
) -> list[PromptGroup]:
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    check_prompt_logprobs(fields)
    wanted = _wanted_tokens(fields)
    tools = _tools(fields)
    text = _render(fields, tools, model)
    check_length(len(text.text), model)
    prompt = model.tokenizer.encode_chat(text)
    if not prompt:
        raise InvalidRequest("The messages make an empty prompt.", param="messages")
    prompt = truncate_prompt(prompt, fields, model, wanted=wanted)
    plan = plan_chat(fields, tools, model, text.text)
    # Either of its two names may be the one that was sent.
    newer = (
        () if fields.max_completion_tokens is None else (("max_tokens", "max_completion_tokens"),)
    )
    with client_names(newer):
        group = make_group(
            fields,
            prompt,
            model,
            origin,
            wanted_tokens=wanted,
            logprobs=LogprobsWish(
                fields.top_logprobs if fields.logprobs else None, fields.prompt_logprobs
            ),
            grammar=plan.grammar,
            reading=plan.reading,
            shows_special=plan.shows_special,
        )
    return [group]


def _wanted_tokens(fields: ChatRequest) -> int | None:
    if fields.max_tokens is None or fields.max_completion_tokens is None:
        return fields.max_tokens or fields.max_completion_tokens
    if fields.max_tokens != fields.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens contradict each other; give one of them.",
            param="max_tokens",
        )
    return fields.max_tokens


def _tools(fields: ChatRequest) -> ToolPlan:
    return plan_tools(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls)


def render_chat(fields: ChatRequest, model: ServedModel) -> str:
    """The text of the prompt that the messages make. Raises InvalidRequest."""
    return _render(fields, _tools(fields), model).text


def _render(fields: ChatRequest, tools: ToolPlan, model: ServedModel) -> MarkedText:
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions.", code="no_chat_template"
        )
    if not fields.messages:
        raise InvalidRequest("There must be at least one message.", param="messages")
    for index, message in enumerate(fields.messages):
        # An assistant may have called a tool without a word.
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"A message of role '{message.role}' needs content.",
                param=f"messages[{index}].content",
                code="missing_required_parameter",
            )
    messages = [
        _as_template_message(message.model_dump(exclude_none=True)) for message in fields.messages
    ]
    # The content alone must fit, before the template copies it about.
    check_length(_num_chars(messages), model)
    variables = _variables(fields, model)
    shown: list[Any] | None = list(tools.shown) or None
    shield = Shield(model.tokenizer.special_tokens, messages, shown)
    messages = [_shielded(shield, message, model) for message in messages]
    first_index = 0
    if shown and "tools" not in template.source:
        told = _with_instructions(messages, shield(to_json(shown)))
        first_index = len(messages) - len(told)  # one may be ours
        messages, shown = told, None
    shown = shield(shown)
    if fields.continue_final_message:
        text = _render_open(fields, template, messages, first_index, shown, variables)
        return MarkedText(text, shield.mark)
    try:
        text = template.render(
            messages,
            first_index,
            tools=shown,
            add_generation_prompt=fields.add_generation_prompt,
            **variables,
        )
    except (TemplateError, TextError) as error:
        raise _refusal(error) from None
    return MarkedText(text, shield.mark)


def _shielded(shield: Shield, message: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """What an assistant said may hold the markers of its own thoughts and calls."""
    if message["role"] != "assistant":
        return cast(dict[str, Any], shield(message))
    form = tool_format(model)
    own = frozenset((OPENING, CLOSING, form.opening, form.closing, form.also))
    return cast(dict[str, Any], shield(message, free=own))


def _refusal(error: TemplateError | TextError) -> InvalidRequest:
    param = error.param if isinstance(error, TemplateError) else None
    return InvalidRequest(str(error), param=param or "messages", code="chat_template_error")


def _as_template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Thoughts come under either name; templates look for one of them."""
    thought = message.pop("reasoning", None)
    if thought is not None:
        message.setdefault("reasoning_content", thought)
    return message


def _with_instructions(messages: list[dict[str, Any]], tools: str) -> list[dict[str, Any]]:
    """For a template that shows no tools: they are told by the system message."""
    text = INSTRUCTIONS.format(tools=tools)
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    first = dict(messages[0])
    content = first.get("content") or ""
    if isinstance(content, str):
        first["content"] = f"{content}\n\n{text}".lstrip()
    else:
        first["content"] = [*content, {"type": "text", "text": text}]
    return [first, *messages[1:]]


def _variables(fields: ChatRequest, model: ServedModel) -> dict[str, Any]:
    variables = template_variables(fields, model)
    reserved = sorted(_RESERVED & variables.keys())
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not set '{reserved[0]}'.", param="chat_template_kwargs"
        )
    return variables


def _render_open(
    fields: ChatRequest,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    first_index: int,
    tools: list[Any] | None,
    variables: dict[str, Any],
) -> str:
    """The prompt up to the end of the last message's content: the answer goes on from there."""
    last = messages[-1]
    content = last.get("content") or ""
    *before, text = [content] if isinstance(content, str) else [part["text"] for part in content]
    # Calls stand behind the text, so going on after it would drop them.
    if last["role"] != "assistant" or not text.strip() or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant, with text and no calls.",
            param="continue_final_message",
        )
    if "add_generation_prompt" in fields.model_fields_set and fields.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other.",
            param="continue_final_message",
        )
    # Templates trim, and write more behind the content: its end is marked, by what nobody can say.
    said, end = text.rstrip(), secrets.token_hex(16)
    parts = [{"type": "text", "text": part} for part in (*before, said + end)]
    messages = [*messages[:-1], {**last, "content": said + end if not before else parts}]
    try:
        shown = template.render(
            messages, first_index, tools=tools, add_generation_prompt=False, **variables
        )
    except (TemplateError, TextError) as error:
        raise _refusal(error) from None
    prompt, found, _ = shown.rpartition(end)
    if not found or not prompt.endswith(said.lstrip()):
        raise InvalidRequest(
            "This model's chat template changes the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return prompt + text[len(said) :]


def _num_chars(messages: list[dict[str, Any]]) -> int:
    total = 0
    for message in messages:
        content = message.get("content", "")
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        total += sum(len(part) for part in parts)
    return total
