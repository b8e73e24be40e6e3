"""Thoughts told from answers: whatever the split, streamed and plain, counted, shown or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.reasoning import Thinking, ThoughtSplitter
from tests.support.http_server import TextEngine, events, house, in_loop, texts
from tests.support.tokenizers import CHATML, byte_tokenizer

# Templates that think: the model opens the thoughts itself, or the prompt does.
MAY_THINK = CHATML + "{# <think> #}"
THINKS = CHATML.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
ANSWER = "<think>\nIt is 2 < 3 </thin k.\n</think>\n\nYes."


def split(text: str, parts: list[str], *, is_open: bool) -> tuple[str, str]:
    splitter = ThoughtSplitter(Thinking(is_open))
    pieces = [splitter.feed(part) for part in parts] + [splitter.finish()]
    assert "".join(parts) == text
    return "".join(thought for thought, _ in pieces), "".join(answer for _, answer in pieces)


CASES = {
    "both": (ANSWER, False, ("It is 2 < 3 </thin k.", "Yes.")),
    "open": ("Hm.\n</think>\nYes. ", True, ("Hm.", "Yes. ")),
    "no thoughts": (" Yes.\n", False, ("", " Yes.\n")),
    "empty thoughts": ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    "never closed": ("<think>a </thi", False, ("a </thi", "")),
    "marker begun": ("<thi", False, ("", "<thi")),
    "second marker is text": (
        "<think>a</think>b<think>c</think>",
        False,
        ("a", "b<think>c</think>"),
    ),
    "only white space": ("  ", False, ("", "  ")),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_are_split_the_same_at_every_cut(name: str) -> None:
    text, is_open, expected = CASES[name]
    assert split(text, [text], is_open=is_open) == expected
    assert split(text, list(text), is_open=is_open) == expected
    for at in range(len(text)):
        assert split(text, [text[:at], text[at:]], is_open=is_open) == expected, at


@given(st.text(alphabet="</think> ab\n", max_size=60), st.booleans())
def test_any_text_is_split_the_same_at_every_character(text: str, is_open: bool) -> None:
    assert split(text, list(text), is_open=is_open) == split(text, [text], is_open=is_open)


def thinker(template: str, script: str) -> tuple[TextEngine, dict[str, object]]:
    return TextEngine({"think": script}), {"tokenizer": byte_tokenizer(template)}


@in_loop
@pytest.mark.parametrize(
    ("template", "script"), [(MAY_THINK, ANSWER), (THINKS, ANSWER.removeprefix("<think>\n"))]
)
async def test_reasoning_comes_under_both_names_and_is_counted(template: str, script: str) -> None:
    """Survey section 2 item 17: clients read either name."""
    engine, options = thinker(template, script)
    async with house(engine, **options) as server:  # type: ignore[arg-type]
        plain = (await server.chat("think")).json()
        streamed = events(
            (await server.chat("think", stream=True, stream_options={"include_usage": True})).text
        )
    message = plain["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning"] == message["reasoning_content"] == "It is 2 < 3 </thin k."
    deltas = [c["delta"] for event in streamed for c in event["choices"]]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    thoughts = script[: script.index("</think>") + len("</think>")]
    for usage in (plain["usage"], streamed[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == pytest.approx(
            len(thoughts), abs=len("<think>")
        )


@in_loop
async def test_reasoning_can_be_left_out_of_the_answer() -> None:
    engine, options = thinker(MAY_THINK, ANSWER)
    async with house(engine, **options) as server:  # type: ignore[arg-type]
        plain = (await server.chat("think", include_reasoning=False)).json()
        text = (await server.chat("think", include_reasoning=False, stream=True)).text
    assert "reasoning" not in plain["choices"][0]["message"]
    assert "reasoning" not in text
    assert texts(events(text)) == {0: "Yes."}


@in_loop
async def test_model_without_reasoning_keeps_its_text_and_refuses_the_controls() -> None:
    async with house(TextEngine({"think": ANSWER})) as server:
        plain = (await server.chat("think")).json()
        refused = [
            await server.chat("think", reasoning_effort="high"),
            await server.chat("think", thinking_token_budget=5),
            await server.chat("think", enable_thinking=True),
        ]
        accepted = await server.chat("think", reasoning_effort="none", enable_thinking=False)
    assert plain["choices"][0]["message"]["content"] == ANSWER
    assert [answer.status_code for answer in refused] == [400, 400, 400]
    assert accepted.status_code == 200


@in_loop
async def test_thoughts_in_the_history_reach_the_template_under_either_name() -> None:
    shows = CHATML.replace(
        "message['content']", "(message.reasoning_content or '') + message.content"
    )
    tokenizer = byte_tokenizer(shows + "{# <think> #}")
    engine = TextEngine()
    async with house(engine, tokenizer=tokenizer) as server:
        for name in ("reasoning", "reasoning_content"):
            turn = {"role": "assistant", "content": "b", name: "because"}
            body = {"messages": [{"role": "user", "content": "a"}, turn], "max_tokens": 1}
            await server.client.post("/v1/chat/completions", json=body)
    prompts = [bytes(t for t in prompt if t < 256) for prompt in engine.prompts.values()]
    assert prompts
    assert all(b"becauseb" in prompt for prompt in prompts)


@in_loop
async def test_template_variables_reach_the_template_and_reserved_ones_do_not() -> None:
    tokenizer = byte_tokenizer(
        CHATML + "{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}{# <think> #}"
    )
    engine = TextEngine()
    async with house(engine, tokenizer=tokenizer) as server:
        answer = await server.chat(
            "a",
            chat_template_kwargs={"mood": "glad"},
            reasoning_effort="low",
            enable_thinking=True,
            max_tokens=1,
        )
        refused = await server.chat("a", chat_template_kwargs={"messages": []})
    assert answer.status_code == 200
    (prompt,) = engine.prompts.values()
    assert bytes(t for t in prompt if t < 256).endswith(b"gladlowTrue")
    assert refused.status_code == 400
    assert "messages" in refused.json()["error"]["message"]


@in_loop
@pytest.mark.parametrize("name", ["self", "template", "name", "variables", "context", "", "a b"])
async def test_no_name_of_a_variable_meets_one_of_ours(name: str) -> None:
    template = CHATML + ("{{ " + name + " }}" if name.isidentifier() and name != "self" else "glad")
    engine = TextEngine()
    async with house(engine, tokenizer=byte_tokenizer(template)) as server:
        answer = await server.chat("a", chat_template_kwargs={name: "glad"}, max_tokens=1)
    assert answer.status_code == 200, answer.text
    (prompt,) = engine.prompts.values()
    assert bytes(t for t in prompt if t < 256).endswith(b"glad")
