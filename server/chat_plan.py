"""What a chat request asks of the answer's form: how to read it, and the grammar it obeys.

Owns the order of its parts (thoughts, then an answer or tool calls) and joins the grammars of each.
A constraint leaves the thoughts free and holds after them. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.errors import InvalidRequest
from server.grammar_text import ANYTHING, Grammar, Part, literal, thoughts_frame
from server.prepare import ServedModel
from server.reading import Reading
from server.reasoning import CLOSING, OPENING, Thinking
from server.schemas import ChatRequest
from server.structured import answer_part, schema_part
from server.tools.call_grammar import call_rules
from server.tools.definitions import ToolChoice, ToolPlan
from server.tools.formats import FORMATS, ToolFormat, format_of

# Tokens of thought by reasoning_effort, for a template that does not know the word; None is free.
EFFORT_BUDGETS: dict[str, int | None] = {
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": None,
    "xhigh": None,
    "max": None,
}


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """`shows_special`: markers of calls or thoughts are special tokens and must become text."""

    reading: Reading
    grammar: Grammar | None
    shows_special: bool


def tool_format(model: ServedModel) -> ToolFormat:
    template = model.tokenizer.chat_template
    if model.tool_parser != "auto":
        return FORMATS[model.tool_parser]
    return format_of(template.source if template is not None else "")


def can_reason(model: ServedModel) -> bool:
    template = model.tokenizer.chat_template
    if model.reasoning_parser == "auto":
        return template is not None and OPENING in template.source
    return model.reasoning_parser == "think"


def template_variables(fields: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """What the fields on reasoning, and chat_template_kwargs, say to the template."""
    variables = dict(fields.chat_template_kwargs or {})
    effort = fields.reasoning_effort
    if fields.enable_thinking is not None:
        if fields.enable_thinking and not can_reason(model):
            raise InvalidRequest(
                "This model does not reason, so enable_thinking can only be false.",
                param="enable_thinking",
                code="unsupported_parameter",
            )
        variables.setdefault("enable_thinking", fields.enable_thinking)
    if effort is not None:
        if effort != "none" and not can_reason(model) and not knows_effort(model):
            raise InvalidRequest(
                "This model does not reason; only reasoning_effort 'none' is possible.",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def plan_chat(
    fields: ChatRequest, tools: ToolPlan, model: ServedModel, prompt_text: str
) -> ChatPlan:
    """Raises InvalidRequest for a constraint that cannot be."""
    thinking = _thinking(fields, model, prompt_text)
    form = tool_format(model) if tools.callable else None
    answer = answer_part(fields.response_format, fields.structured_outputs)
    marker = _Markers(model)
    if form is not None:
        for text in filter(None, (form.opening, form.closing, form.also, form.separator)):
            marker(text)
    if thinking is not None:
        marker(CLOSING)  # notes whether it is special
    grammar = _grammar(fields, thinking, tools, form, answer=answer, model=model, marker=marker)
    return ChatPlan(
        Reading(thinking, tools if form else None, form), grammar, marker.any_is_special
    )


class _Markers:
    """A marker in a grammar: its text, or its id where it is a special token."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self.any_is_special = False

    def __call__(self, text: str) -> str:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and self._tokenizer.is_special(ids[0]):
            self.any_is_special = True
            return f"<[{ids[0]}]>"
        return literal(text)


def _thinking(fields: ChatRequest, model: ServedModel, prompt_text: str) -> Thinking | None:
    budget = fields.thinking_token_budget
    if not can_reason(model):
        if budget is not None and budget >= 0:
            raise InvalidRequest(
                "This model does not reason, so there is no thinking_token_budget.",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        return None
    ending = prompt_text.rstrip()
    if fields.continue_final_message or ending.endswith(CLOSING):
        return None
    return Thinking(is_open=ending.endswith(OPENING))


def knows_effort(model: ServedModel) -> bool:
    return _knows("reasoning_effort", model)


def _knows(variable: str, model: ServedModel) -> bool:
    template = model.tokenizer.chat_template
    return template is not None and variable in template.source


def _budget(fields: ChatRequest, model: ServedModel) -> int | None:
    """In tokens; None is free."""
    if fields.thinking_token_budget is not None:
        return None if fields.thinking_token_budget < 0 else fields.thinking_token_budget
    if fields.enable_thinking is False or fields.reasoning_effort == "none":
        return None if _knows("enable_thinking", model) else 0
    if fields.reasoning_effort is None or knows_effort(model):
        return None
    return EFFORT_BUDGETS.get(fields.reasoning_effort)


def _grammar(
    fields: ChatRequest,
    thinking: Thinking | None,
    tools: ToolPlan,
    form: ToolFormat | None,
    *,
    answer: Part | None,
    model: ServedModel,
    marker: _Markers,
) -> Grammar | None:
    rules: list[str] = []
    parts: dict[str, Part] = {}
    labels: dict[str, str] = {}
    choice = ToolChoice.NONE if form is None else tools.choice
    must_call = choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)
    is_strict = any(tool.is_strict for tool in tools.callable)
    root = None
    is_bound = must_call or answer is not None or is_strict or not tools.is_parallel
    if form is not None and is_bound:
        calls = call_rules(tools, form, marker=marker, schema_part=schema_part)
        rules.append(calls.rules)
        parts |= calls.parts
        labels |= calls.labels
        root = "calls" if must_call else "@answer | calls" if answer else "prose | prose_calls"
    elif answer is not None:
        root = "@answer"
    if answer is not None and not must_call:
        parts["answer"] = answer
    budget = _budget(fields, model) if thinking is not None else None
    if root is None and budget is None:
        return None
    frame, bound = thoughts_frame(thinking, budget, root or ANYTHING, marker)
    return Grammar("\n".join([*frame, *rules]), parts, labels, bound)
