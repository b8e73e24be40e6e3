"""Chat templates: what transformers would render, content in any form, and no message lost."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest

from server.chat_template import ChatTemplate, TemplateError
from server.text import TextError
from tests.support.tokenizers import CHATML, template

PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "({{ call.function.name }}:{{ call.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
TOOLS_AS_TEXT = TOOLS.replace(
    "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]


@functools.cache
def shared(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return shared(source).render(messages, **variables)


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def test_rendered_text_equals_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{{ bos_token }}\n"
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "  {%- generation %}{{ m.content | trim }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ {'b': '<é>', 'a': [1, true]} | tojson }} {{ {'b': 1} | tojson(indent=2) }}\n"
        "{% if add_generation_prompt %}go{% endif %} {{ extra }}\n"
    )
    messages = [{"role": "user", "content": " <b>&é😀 "}, {"role": "assistant", "content": "y"}]
    with template(source, special_tokens={"bos_token": "<s>"}) as made:
        ours = made.render(messages, extra="x")
    theirs, _ = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
        extra="x",
    )
    assert ours == theirs[0]


def test_time_is_known_to_the_template() -> None:
    before = time.strftime("%Y-%m-%d")
    text = render("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}", HI)
    assert text in {f"{before} hi", f"{time.strftime('%Y-%m-%d')} hi"}


def test_generation_prompt_is_optional() -> None:
    assert render(CHATML, HI).endswith("<|im_start|>assistant\n")
    assert render(CHATML, HI, add_generation_prompt=False).endswith("hi<|im_end|>\n")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_template_gets_parts_as_one_text(role: str) -> None:
    """B047: the joiner is a line break."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    before = [] if role == "system" else [*HI, call({})][: 2 if role == "tool" else 1]
    after = HI if role == "system" else []
    made = shared(CHATML)
    joined = made.render([*before, {"role": role, "content": "a\nb"}, *after])
    assert made.render([*before, {"role": role, "content": parts}, *after]) == joined
    assert "'type'" not in joined


def test_part_template_gets_parts() -> None:
    """B047."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for source in (PARTS_ONLY, BOTH):
        assert render(source, [{"role": "user", "content": parts}]) == "[user]<a><b>"


def test_part_template_gets_a_text_as_one_part() -> None:
    """B047, B043: a template that loops over parts would drop the letters of a string."""
    assert render(PARTS_ONLY, HI) == "[user]<hi>"
    assert render(BOTH, HI) == "[user]hi"


def test_parts_are_joined_for_a_role_whose_first_part_alone_would_be_shown() -> None:
    """B047, B043: the system message of some templates."""
    source = (
        "{% set content = messages[0].content %}"
        "{{ content if content is string else content[0].text }}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(source, [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize("content", [None, "", []])
def test_template_that_asks_for_null_beside_a_call_gets_it(content: Any) -> None:
    """B043: DeepSeek's prints a second, empty answer for any content that is not null."""
    source = TOOLS.replace(
        "{{ m.content }}", "{% if m.content is not none %}<{{ m.content }}>{% endif %}"
    )
    messages = [*HI, {**call({}), "content": content}, {"role": "assistant", "content": content}]
    assert render(source, messages) == "[user]<hi>[assistant](f:{})[assistant]<>"


@pytest.mark.parametrize("source", [PARTS_ONLY, BOTH, TOOLS, CHATML])
@pytest.mark.parametrize("content", [None, [], "", [{"type": "text", "text": ""}]])
def test_empty_content_in_any_form_is_nothing(source: str, content: Any) -> None:
    """B043, B046."""
    messages = [*HI, {"role": "assistant", "content": content}, *HI]
    empty = [*HI, {"role": "assistant", "content": ""}, *HI]
    made = shared(source)
    assert made.render(messages) == made.render(empty)
    assert made.render([{"role": "user"}]) == made.render([{"role": "user", "content": ""}])


@pytest.mark.parametrize("source", [TOOLS, TOOLS_AS_TEXT])
def test_tool_call_without_content_is_in_the_prompt(source: str) -> None:
    """B043."""
    messages = [*HI, call('{"x": 1}'), {"role": "tool", "tool_call_id": "call_1", "content": "r"}]
    assert render(source, messages) == '[user]hi[assistant](f:{"x": 1})[tool]r'


def test_template_without_tools_shows_the_call_as_text() -> None:
    """B043: no message is silently dropped."""
    text = render(CHATML, [*HI, call('{"x": "é"}')])
    assert '{"tool_calls": [{"name": "f", "arguments": {"x": "é"}}]}' in text
    spoken = render(CHATML, [*HI, {**call({}), "content": "so:"}])
    assert 'so:\n{"tool_calls"' in spoken
    assert '<{"tool_calls"' in render(PARTS_ONLY, [*HI, {**call({}), "content": "so:"}])


def test_role_that_the_template_leaves_out_is_refused() -> None:
    """B043."""
    source = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    made = shared(source)
    assert made.render([{"role": "system", "content": ""}, *HI]) == "hi"
    with pytest.raises(TemplateError, match="leaves out messages of role 'system'") as caught:
        made.render([{"role": "system", "content": "be kind"}, *HI])
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("arguments", ["null", "", "{}", " ", None, {}])
def test_empty_arguments_are_an_empty_mapping(arguments: Any) -> None:
    """B044."""
    assert "(f:{})" in render(TOOLS, [*HI, call(arguments)])
    assert "(f:{})" in render(TOOLS_AS_TEXT, [*HI, call(arguments)])


@pytest.mark.parametrize("arguments", ["[]", "not json", '{"a":', "3", '"x"', [], "[" * 100_000])
def test_arguments_that_are_no_object_name_their_place(arguments: Any) -> None:
    """B044."""
    made = shared(TOOLS)
    with pytest.raises(TemplateError, match=r"messages\[1\]\.tool_calls\[0\]") as caught:
        made.render([*HI, call(arguments)])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_unknown_parts_name_their_place_and_show_no_object() -> None:
    """B046."""
    made = shared(CHATML)
    for content in ([{"type": "image_url"}], [{"type": "text", "text": 3}], ["a"], 7):
        with pytest.raises(TemplateError) as caught:
            made.render([{"role": "user", "content": content}])
        assert (caught.value.param or "").startswith("messages[0].content")
        assert "{" not in str(caught.value)


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "be kind"}, *HI]
    assert "<|im_start|>system\nbe kind" in render(CHATML, messages)
    knows = CHATML + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert "<|im_start|>developer\nbe kind" in render(knows, messages)


def test_input_is_not_changed() -> None:
    messages = [*HI, call("null")]
    before = json.dumps(messages)
    render(TOOLS, messages)
    assert json.dumps(messages) == before


def test_tools_use_the_template_for_tools() -> None:
    text = "{{ messages[0].content }}"
    with template({"default": text, "tool_use": text + "{{ tools | length }}"}) as made:
        assert made.render(HI, tools=[{"type": "function"}]) == "hi1"
        assert made.render(HI) == "hi"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "s"}, *HI],
        [*HI, *HI],
        [*HI, {"role": "tool", "content": "r"}, {"role": "tool", "content": "r"}],
    ],
)
def test_refusal_is_the_templates_own_message(messages: list[dict[str, Any]]) -> None:
    """B049."""
    made = shared(STRICT)
    with pytest.raises(TemplateError) as caught:
        made.render(messages)
    assert str(caught.value) == "Roles must alternate user/assistant"


def test_lone_surrogate_is_a_text_error_and_a_pair_is_not() -> None:
    """B031."""
    made = shared(TOOLS)
    for bad in ([{"role": "user", "content": "\ud800"}], [*HI, call('{"a": "\\udc00"}')]):
        with pytest.raises(TextError, match="lone surrogate U\\+D"):
            made.render(bad)
    assert made.render([{"role": "user", "content": json.loads('"\\ud83d\\ude00"')}]).endswith("😀")


def test_long_conversation_passes_whole() -> None:
    messages = [{"role": "user", "content": f"é{index} " * 1000} for index in range(200)]
    text = render(CHATML, messages)
    assert all(message["content"] in text for message in messages)


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        ("system:a developer:b user:c", "[system]a\nb[user]c"),
        ("developer:a developer:b user:c", "[system]a\nb[user]c"),
        ("user:a developer:b", "[user]a\nb"),
        ("user:a developer:b assistant:c user:d", "[user]a\nb[assistant]c[user]d"),
        ("user:a assistant:b developer:c user:d", "[user]a[assistant]b[user]c\nd"),
        ("user:a assistant:b developer:c developer:d user:e", "[user]a[assistant]b[user]c\nd\ne"),
        ("user:a developer:b user:c", "[user]a\nb[user]c"),
    ],
)
def test_a_developer_may_speak_where_a_template_takes_no_system_message(
    turns: str, shown: str
) -> None:
    """ollama/ollama#17774, anthropics/claude-code#77698: clients send orders in the middle."""
    pairs = [turn.split(":") for turn in turns.split()]
    messages = [{"role": role, "content": content} for role, content in pairs]
    assert render(SYSTEM_FIRST, messages) == shown
    plain = SYSTEM_FIRST.replace("not loop.first", "false")
    told = [("system" if role == "developer" else role, content) for role, content in pairs]
    assert render(plain, messages) == "".join(f"[{role}]{content}" for role, content in told)
