"""Chat completions end to end: shape of answers and streams, choices, official clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import openai
import pytest

from server.requests import choice_seed
from tests.support.http_server import (
    CHAT,
    House,
    TextEngine,
    events,
    eventually,
    finish_reasons,
    house,
    in_loop,
    texts,
)
from tests.support.tokenizers import CHATML, EOS, byte_tokenizer

GREETING = "Hello there, rider."


def greeter(**options: float) -> TextEngine:
    return TextEngine({"greet": GREETING}, **options)  # type: ignore[arg-type]


@in_loop
async def test_plain_answer_has_the_shape_of_the_api() -> None:
    async with house(greeter()) as server:
        answer = await server.chat("greet me")
        body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": GREETING, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["completion_tokens"] == len(GREETING) + 1  # the EOS token counts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "timings" not in body


@in_loop
async def test_stream_follows_the_reference_order() -> None:
    """Survey section 5: role, content, end, usage with no choices, [DONE]; one id throughout."""
    async with house(greeter()) as server:
        answer = await server.chat(
            "greet me", stream=True, stream_options={"include_usage": True}, seed=1
        )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    chunks = events(answer.text)
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in middle:
        (choice,) = chunk["choices"]
        assert set(choice["delta"]) == {"content"}
        assert choice["delta"]["content"]
        assert choice["finish_reason"] is None
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(GREETING) + 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert texts(chunks) == {0: GREETING}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@in_loop
async def test_usage_chunk_has_no_choices_and_counts_the_prompt_once() -> None:
    """B010, B121: n=2."""
    async with house(greeter()) as server:
        one = (await server.chat("greet me")).json()["usage"]
        two = (await server.chat("greet me", n=2)).json()["usage"]
        options = {"include_usage": True}
        answer = await server.chat("greet me", n=2, stream=True, stream_options=options)
    chunks = events(answer.text)
    assert [chunk["choices"] == [] for chunk in chunks].count(True) == 1
    for usage in (two, chunks[-1]["usage"]):
        assert usage["prompt_tokens"] == one["prompt_tokens"]
        assert usage["completion_tokens"] == 2 * one["completion_tokens"]


@in_loop
async def test_no_usage_chunk_unless_asked() -> None:
    async with house(greeter()) as server:
        chunks = events((await server.chat("greet me", stream=True)).text)
    assert all(chunk["choices"] for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


@in_loop
async def test_continuous_usage_grows_to_the_final_usage() -> None:
    async with house(greeter()) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await server.chat("greet me", stream=True, stream_options=options)
    chunks = events(answer.text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == len(GREETING) + 1
    assert counts[0] < counts[-1]


@in_loop
async def test_each_choice_ends_exactly_once() -> None:
    """B013: n=3, streaming, choices of different lengths; nothing of a choice after its end."""
    async with house() as server:
        answer = await server.chat("x", n=3, stream=True, max_tokens=60, seed=11, stop=["z", "q"])
        plain = (await server.chat("x", n=3, max_tokens=60, seed=11, stop=["z", "q"])).json()
    chunks = events(answer.text)
    ends = finish_reasons(chunks)
    assert {index: len(reasons) for index, reasons in ends.items()} == {0: 1, 1: 1, 2: 1}
    ended = set()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in ended
        if choice["finish_reason"]:
            ended.add(choice["index"])
    lengths = {len(choice["message"]["content"]) for choice in plain["choices"]}
    assert len(lengths) > 1
    assert [ends[i][0] for i in range(3)] == [c["finish_reason"] for c in plain["choices"]]


@in_loop
async def test_choices_of_a_stream_equal_those_of_a_plain_answer() -> None:
    """B014, B082: n=4; each role once; the first of n equals n=1; the choices differ."""
    async with house() as server:
        fields = {"n": 4, "seed": 5, "temperature": 1, "max_tokens": 20}
        plain = (await server.chat("x", **fields)).json()
        chunks = events((await server.chat("x", stream=True, **fields)).text)
        alone = (await server.chat("x", **{**fields, "n": 1})).json()
    expected = [choice["message"]["content"] for choice in plain["choices"]]
    assert texts(chunks) == dict(enumerate(expected))
    assert len(set(expected)) == 4
    assert alone["choices"][0]["message"]["content"] == expected[0]
    roles = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if "role" in choice["delta"]
    ]
    assert roles == [0, 1, 2, 3]


class FirstChoiceIsLate(TextEngine):
    """Choice 0 needs four tokens for its first character, choice 1 one."""

    def _script_token(self, request_id: str, tokens: Sequence[int], num_prompt: int) -> int:
        script = ("😀" if request_id.endswith("-0") else "abcd").encode()
        index = len(tokens) - num_prompt
        return script[index] if index < len(script) else EOS


@in_loop
async def test_roles_come_in_order_whichever_choice_is_first() -> None:
    """Clients index choices by the order in which they first see them."""
    async with house(FirstChoiceIsLate()) as server:
        chunks = events((await server.chat("x", n=2, stream=True)).text)
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indices[:3] == [0, 1, 1]
    assert texts(chunks) == {0: "😀", 1: "abcd"}


@in_loop
async def test_choice_that_met_its_stop_string_frees_its_place_at_once() -> None:
    """While its siblings go on: the core is told to end that one alone."""
    # With a stride of two letters and an even start, "b" never comes: see TextEngine.
    seeds = ((seed, choice_seed(seed, 1)) for seed in range(0, 10_000, 2))
    seed = next(own for own, second in seeds if own % 5 == 1 and second % 5 == 0)
    async with house(TextEngine(step_seconds=0.005)) as server:
        fields = {"n": 2, "seed": seed, "stop": ["b"], "max_tokens": 400}
        answer = asyncio.create_task(server.chat("x", **fields))
        await eventually(lambda: server.core.num_unfinished == 2)
        await eventually(lambda: server.core.num_unfinished == 1)
        assert not answer.done()
        choices = (await answer).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"]


def test_first_choice_has_the_seed_of_the_request() -> None:
    """B082."""
    assert [choice_seed(seed, 0) for seed in (0, 5, 2**63 - 1)] == [0, 5, 2**63 - 1]
    derived = {choice_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(derived) == 50 * 128
    assert all(0 <= seed < 2**63 for seed in derived)


@in_loop
async def test_answers_without_a_seed_differ() -> None:
    async with house() as server:
        answers = [(await server.chat("x", max_tokens=30)).json() for _ in range(4)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) > 1


@in_loop
async def test_content_parts_and_developer_role_reach_the_template() -> None:
    """B046, B047: parts are text; an empty list is an empty string."""
    engine = TextEngine({"developer": "D", "onetwo": "12"})
    async with house(engine) as server:

        async def ask(messages: list[object]) -> tuple[int, str]:
            answer = await server.client.post(CHAT, json={"messages": messages, "max_tokens": 3})
            return answer.status_code, answer.text

        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        for messages in (
            [{"role": "user", "content": parts}],
            [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": ""}],
        ):
            status, text = await ask(messages)
            assert status == 200, text
            assert "type=" not in text


def tool_turn(arguments: str, content: object) -> list[object]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "and?"},
    ]


@in_loop
async def test_tool_calls_of_earlier_turns_are_taken_or_refused_by_index() -> None:
    """B043, B044, B046: a conversation that another server began."""
    async with house() as server:

        async def ask(messages: list[object], **more: object) -> tuple[int, dict[str, object]]:
            body = {"messages": messages, "max_tokens": 2, **more}
            answer = await server.client.post(CHAT, json=body)
            return answer.status_code, answer.json().get("error") or {}

        for content in (None, "", []):
            for arguments in ("null", "", "{}", '{"a":1}'):
                status, error = await ask(tool_turn(arguments, content))
                assert status == 200, error
            for arguments in ("[]", "not json", '{"a":', '{"a":NaN}', '{"a":-1e999}'):
                status, error = await ask(tool_turn(arguments, content))
                assert status == 400
                assert error["param"] == "messages[1].tool_calls[0].function.arguments"
                assert str(error["message"]).startswith("messages[1].")
                # The template shows no tools: they are told by a message of ours.
                tool = {"type": "function", "function": {"name": "f"}}
                status, told = await ask(tool_turn(arguments, content), tools=[tool])
                assert (status, told) == (400, error)


@in_loop
async def test_model_without_template_says_so() -> None:
    async with house(tokenizer=byte_tokenizer(chat_template=None)) as server:
        answer = await server.chat("x", stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_chat_template"


@in_loop
async def test_template_error_is_a_400_before_any_event() -> None:
    """B049, B050: the template's own words only; the next request works."""
    picky = (
        "{% for m in messages %}{% if m['content'] == 'bad' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    tokenizer = byte_tokenizer(picky)
    assert tokenizer.chat_template is not None
    try:
        async with house(greeter(), tokenizer=tokenizer) as server:
            before = (await server.chat("greet me")).json()
            for stream in (False, True):
                answer = await server.chat("bad", stream=stream)
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["message"] == "roles must alternate"
                assert error["param"] == "messages"
            after = (await server.chat("greet me")).json()
    finally:
        tokenizer.chat_template.close()
    assert before["choices"] == after["choices"]
    assert before["usage"]["prompt_tokens"] == after["usage"]["prompt_tokens"]


@in_loop
async def test_official_client_reads_plain_answers_and_streams() -> None:
    async with house(greeter(), live=True) as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        async with client:
            await use_client(client, server)


async def use_client(client: openai.AsyncOpenAI, server: House) -> None:
    models = await client.models.list()
    name = models.data[0].id
    assert (await client.models.retrieve(name)).id == name
    messages = [{"role": "user", "content": "greet me"}]
    plain = await client.chat.completions.create(model=name, messages=messages)  # type: ignore[arg-type]
    assert plain.choices[0].message.content == GREETING
    stream = await client.chat.completions.create(
        model=name,
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    text = ""
    usage = None
    async for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == GREETING
    assert usage is not None
    assert usage.completion_tokens == len(GREETING) + 1
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=messages)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id is not None
    assert server.core.num_open == 0


@in_loop
async def test_stream_helper_of_the_official_client_sees_every_choice() -> None:
    """The helper joins every string of the deltas and indexes choices by their order."""
    async with house(live=True) as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        fields = {"n": 3, "seed": 3, "max_tokens": 12, "model": "scripted"}
        plain = (await server.chat("x", **fields)).json()
        async with (
            client,
            client.chat.completions.stream(
                messages=[{"role": "user", "content": "x"}],
                stream_options={"include_usage": True},
                **fields,
            ) as stream,
        ):
            async for _event in stream:
                pass
            with pytest.raises(openai.LengthFinishReasonError):
                await stream.get_final_completion()
            snapshot = stream.current_completion_snapshot
    assert [choice.message.role for choice in snapshot.choices] == ["assistant"] * 3
    joined = [choice.message.content for choice in snapshot.choices]
    assert joined == [choice["message"]["content"] for choice in plain["choices"]]


@in_loop
async def test_synchronous_official_client_works() -> None:
    def talk(url: str) -> str:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "greet me"}], stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with house(greeter(), live=True) as server:
        assert await asyncio.to_thread(talk, server.url) == GREETING
