"""The grammar of a whole chat answer: thoughts free, then what was asked for, in every format.

Walks through the grammar pick any allowed byte, so they go where no model would; what they say is
read by the same Reader as a model's text.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler, GrammarState
from engine.vocabulary import Vocabulary
from server.chat import _tools
from server.chat_plan import ChatPlan, plan_chat
from server.logprobs import TokenNames
from server.prepare import ServedModel
from server.reading import Reader, ReadMessage
from server.requests import TokenLimits
from server.schemas import ChatRequest
from server.tokenizer import Tokenizer
from server.tools.formats import FORMATS
from tests.support.tokenizers import CHATML, byte_tokenizer

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -9, "maximum": 9},
        "s": {"type": "string", "pattern": "^[a-zé]{1,3}$"},
        "kind": {"enum": ["x", "ö", '"q"']},
    },
    "required": ["a", "s"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"add": ADD, "ping": {"type": "object", "additionalProperties": False}}
NAMED = {"type": "function", "function": {"name": "add"}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
THINKS = CHATML + "{# <think> #}"


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


@cache
def tokenizer(template: str) -> Tokenizer:
    return byte_tokenizer(template)


@cache
def compiler() -> GrammarCompiler:
    known = tokenizer(CHATML)
    vocabulary = Vocabulary(
        known.all_token_bytes(),
        tuple(sorted(known.special_ids)),
        tuple(sorted(known.eos_token_ids)),
    )
    return GrammarCompiler(vocabulary)


def plan(template: str, ending: str = "", *, form: str = "auto", **fields: Any) -> ChatPlan:
    """`ending` is what the prompt ends with."""
    used = tokenizer(template)
    model = ServedModel(
        name="m",
        tokenizer=used,
        token_names=TokenNames(used),
        limits=TokenLimits(total=4096, input=None, output=None, vocab_size=used.vocab_size),
        eos_token_ids=tuple(used.eos_token_ids),
        max_group=8,
        tool_parser=form,
    )
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)
    return plan_chat(request, _tools(request), model, ending)


def begin(made: ChatPlan) -> GrammarState:
    assert made.grammar is not None
    return compiler().start(made.grammar.spec())


def says(state: GrammarState, text: str) -> bool:
    """Whether the text may come; the state is then after it."""
    try:
        state.accept(list(text.encode()))
    except GrammarError:
        return False
    return True


def may_end(state: GrammarState) -> bool:
    return state.ended or bool(state.allowed()[sorted(tokenizer(CHATML).eos_token_ids)].any())


def walk(state: GrammarState, seed: int) -> str:
    """Any text that the grammar lets out; it ends where it may."""
    draw = random.Random(seed)
    said = bytearray()
    while not may_end(state) or (not state.ended and draw.random() < 0.5):
        allowed = [byte for byte in np.flatnonzero(state.allowed()).tolist() if byte < 256]
        if not allowed:
            break
        said.append(draw.choice(allowed))
        state.accept([said[-1]])
        assert len(said) < 4_000
    return said.decode()


def read(made: ChatPlan, text: str) -> ReadMessage:
    """Character by character."""
    reader, message = Reader(made.reading), ReadMessage()
    for character in text:
        message.add(reader.feed(character))
    message.add(reader.finish())
    return message


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_enforced_calls_are_read_back_and_obey_their_schemas(
    form: str, choice: Any, parallel: bool
) -> None:
    """Named is one call of the one tool, whatever parallel_tool_calls says."""
    made = plan(CHATML, form=form, tools=tools(), tool_choice=choice, parallel_tool_calls=parallel)
    names = set()
    for seed in range(6):
        text = walk(begin(made), seed)
        message = read(made, text)
        assert message.calls, text
        assert message.content == ""
        names |= {name for name, _ in message.calls}
        assert len(message.calls) == 1 or (parallel and choice == "required")
        for name, arguments in message.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert names == ({"add", "ping"} if choice == "required" else {"add"})


@pytest.mark.parametrize("form", FORMATS)
def test_auto_with_strict_tools_leaves_prose_free_and_binds_calls(form: str) -> None:
    made = plan(CHATML, form=form, tools=tools(strict=True))
    state = begin(made)
    assert says(state, "Well, 2 < 3. No {call} [here].")
    assert may_end(state)
    good = walk(begin(plan(CHATML, form=form, tools=tools(), tool_choice="required")), 3)
    state = begin(made)
    assert says(state, good)
    assert may_end(state)
    assert read(made, good).calls
    if not FORMATS[form].separator:
        bad = {"name": "add", FORMATS[form].arguments: {"a": 1}}  # "s" is missing
        opening = FORMATS[form].opening + FORMATS[form].before + "[" * FORMATS[form].is_list
        assert not says(begin(made), opening + json.dumps(bad))


@pytest.mark.parametrize("form", FORMATS)
def test_one_call_at_a_time_holds_where_the_model_is_free_to_call(form: str) -> None:
    """Prose and one call may come, a second call may not; without the wish nothing is bound."""
    one = plan(CHATML, form=form, tools=tools(), parallel_tool_calls=False)
    assert plan(CHATML, form=form, tools=tools()).grammar is None
    assert plan(CHATML, form=form, tools=tools(), parallel_tool_calls=True).grammar is None
    state = begin(one)
    assert says(state, "Well, 2 < 3. No {call} [here].")
    assert may_end(state)
    many = plan(CHATML, form=form, tools=tools(), tool_choice="required")
    texts = [walk(begin(many), seed) for seed in range(40)]
    counts = {text: len(read(many, text).calls or ()) for text in texts}
    assert {1, 2} <= set(counts.values()), "the walks must show what is told apart"
    for text, count in counts.items():
        assert says(begin(one), text) == (count == 1), text


@pytest.mark.parametrize("form", FORMATS)
def test_schema_beside_tools_allows_the_answer_or_calls_and_nothing_else(form: str) -> None:
    made = plan(CHATML, form=form, tools=tools(), response_format=ANSWER)
    state = begin(made)
    assert says(state, "true")
    assert may_end(state)
    assert not says(begin(made), "maybe")
    calls = walk(begin(plan(CHATML, form=form, tools=tools(), tool_choice="required")), 1)
    state = begin(made)
    assert says(state, calls)
    assert may_end(state)


THOUGHT = 'Hm: {"a": [1, "x", maybe </thi <tool_call> true?\n'


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": ANSWER}, "false", "maybe"),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, "nein", "j "),
        (
            {"tools": tools(), "tool_choice": NAMED},
            '<tool_call>[{"name": "add", "arguments": {"a": 1, "s": "x"}}]</tool_call>',
            "Sure",
        ),
    ],
    ids=["schema", "choice", "named"],
)
@pytest.mark.parametrize("budget", [None, 60])
@pytest.mark.parametrize("ending", ["<think>\n", ""], ids=["open", "model opens"])
def test_thoughts_are_free_and_what_follows_is_bound(
    fields: dict[str, Any], good: str, bad: str, budget: int | None, ending: str
) -> None:
    """Survey section 2 item 15: the constraint begins where the thoughts end, exactly."""
    made = plan(THINKS, ending, thinking_token_budget=budget, **fields)
    thought = THOUGHT if ending else "<think>" + THOUGHT
    state = begin(made)
    assert says(state, thought)
    assert not may_end(state)
    assert says(state, "</think>\n\n")
    assert not may_end(state)
    assert not says(begin(made), thought + "</think>\n\n" + bad)
    assert says(state, good)
    assert may_end(state)
    message = read(made, thought + "</think>\n\n" + good)
    assert message.thought == THOUGHT.strip()
    assert (message.calls or message.content) == (
        [("add", '{"a": 1, "s": "x"}')] if "tools" in fields else good
    )


@pytest.mark.parametrize("fields", [{}, {"response_format": ANSWER}], ids=["free", "schema"])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_budget_closes_the_thoughts(fields: dict[str, Any], budget: int) -> None:
    """One byte is one token here: after so many, nothing but the end of the thoughts may come."""
    made = plan(THINKS, "<think>", thinking_token_budget=budget, **fields)
    state = begin(made)
    assert says(state, "a" * budget)
    assert np.flatnonzero(state.allowed()).tolist() == [ord("<")]
    assert says(state, "</think>true")
    assert may_end(state)


def test_effort_bounds_the_thoughts_where_the_template_does_not_know_it() -> None:
    knows = THINKS + "{{ reasoning_effort }}"
    assert plan(THINKS, "<think>", reasoning_effort="minimal").grammar is not None
    assert plan(THINKS, "<think>", reasoning_effort="high").grammar is None
    assert plan(knows, "<think>", reasoning_effort="minimal").grammar is None


def test_a_wish_for_no_thoughts_is_kept_where_the_template_does_not_know_it() -> None:
    """sgl-project/sglang#40529: dropped without a word, the model thinks all the same."""
    wishes: list[dict[str, Any]] = [{"enable_thinking": False}, {"reasoning_effort": "none"}]
    knows = THINKS + "{{ enable_thinking }}"
    for wish in wishes:
        state = begin(plan(THINKS, "<think>", **wish))
        assert np.flatnonzero(state.allowed()).tolist() == [ord("<")]
        assert plan(knows, "<think>", **wish).grammar is None
        assert plan(CHATML, "", **wish).grammar is None


def test_negative_budget_is_no_budget() -> None:
    assert plan(THINKS, "<think>", thinking_token_budget=-1).grammar is None


def test_budget_has_no_way_around_it_for_an_answer_that_begins_otherwise() -> None:
    """Without thoughts the answer is free; with them it is bounded, however they begin."""
    made = plan(THINKS, "", thinking_token_budget=2)
    state = begin(made)
    assert says(state, "Just an answer.")
    assert may_end(state)
    assert not says(begin(made), "<think>abc")
