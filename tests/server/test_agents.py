"""What agents built on the Anthropic API send: hints are told as without effect, never refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from tests.server.test_anthropic import CALL, MESSAGES, TOOL, accumulated, body, named_events
from tests.support.http_server import MODEL, House, TextEngine, house, in_loop
from tests.support.tokenizers import CHATML, byte_tokenizer

SCRIPTS = {
    "look up": "Let me see. " + CALL,
    "think": "<think>\nHm.\n</think>\n\nYes.",
    "greet": "Hi",
}
IGNORED = "x-paceline-ignored-params"
BILLING = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={};"
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
# As Claude Code sends it.
AGENT: dict[str, Any] = {
    "system": [
        {"type": "text", "text": BILLING.format("1a2b3")},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "tools": [{**TOOL, "type": "custom", "eager_input_streaming": True, "strict": False, **CACHED}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
}
BETA = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,effort-2025-11-24",
}
THINKER = CHATML + "{# <think> #}"


async def ask(server: House, text: str = "greet", **fields: Any) -> httpx.Response:
    return await server.client.post(MESSAGES, json=body(text, **fields))


def shown(engine: TextEngine) -> str:
    (prompt, *_) = engine.prompts.values()
    return bytes(token for token in prompt if token < 256).decode()


def ignored(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get(IGNORED, "").split(", ") if name]


@in_loop
async def test_a_request_of_an_agent_is_answered_and_its_hints_are_told() -> None:
    """And its tokens are counted; the word on billing is for nobody here."""
    engine = TextEngine(SCRIPTS)
    async with house(engine) as server:
        for stream in (False, True):
            answer = await server.client.post(
                MESSAGES + "?beta=true", json=body("look up", stream=stream, **AGENT), headers=BETA
            )
            assert ignored(answer) == ["metadata", "output_config.effort"]
            message = accumulated(named_events(answer.text)) if stream else answer.json()
            assert message["stop_reason"] == "tool_use"
            assert message["context_management"] == {"applied_edits": []}
        used = message["usage"]
        counted = await server.client.post(
            MESSAGES + "/count_tokens?beta=true", json=body("look up", **AGENT), headers=BETA
        )
        assert ignored(counted) == ["metadata", "output_config.effort"]
        total = used["input_tokens"] + used["cache_read_input_tokens"]
        edits = {"original_input_tokens": total}
        assert counted.json() == {"input_tokens": total, "context_management": edits}
    assert "You are an agent." in shown(engine)
    assert "billing" not in shown(engine)


@in_loop
async def test_the_word_on_billing_keeps_no_prefix_from_the_cache() -> None:
    """It is another one in each request; what only looks like it stays."""
    engine = TextEngine(SCRIPTS)
    long = "You are an agent. " * 20
    async with house(engine) as server:
        for form in (
            "{}\n" + long,
            [{"type": "text", "text": "{}"}, {"type": "text", "text": long}],
        ):
            hits = []
            for nonce in ("11111", "22222"):
                system = json.loads(json.dumps(form).replace("{}", BILLING.format(nonce)))
                used = (await ask(server, system=system)).json()["usage"]
                hits.append(used["cache_read_input_tokens"])
            assert hits[1] > 300
        engine.prompts.clear()
        await ask(server, "explain " + BILLING, system="Of x-anthropic-billing-header: all.")
    assert shown(engine).count("x-anthropic-billing-header:") == 2


HINTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # fields, told by a model that does not think, told by one that does
    ({"output_config": {"effort": "low"}}, ["output_config.effort"], []),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, ["thinking"], []),
    ({"thinking": {"type": "between_tools"}}, ["thinking"], ["thinking"]),
    ({"thinking": {"type": "disabled"}}, [], []),
    (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
        ["output_config.effort"],
        ["output_config.effort"],
    ),
    (
        {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
        ["output_config.task_budget"],
        ["output_config.task_budget"],
    ),
    ({"context_management": {}}, [], []),
    (
        {
            "context_management": {
                "edits": [
                    {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens"}},
                    {"type": "clear_thinking_20251015", "keep": {"type": "all"}},
                    {"type": "compact_20260112"},
                ]
            }
        },
        ["context_management.clear_tool_uses_20250919", "context_management.compact_20260112"],
        ["context_management.clear_tool_uses_20250919", "context_management.compact_20260112"],
    ),
    (
        {"tools": [{**TOOL, "defer_loading": True}]},
        ["tools.defer_loading"],
        ["tools.defer_loading"],
    ),
    ({"speed": "fast", "fallbacks": "default"}, ["speed", "fallbacks"], ["speed", "fallbacks"]),
    ({"cache_control": {"type": "ephemeral"}, "inference_geo": "global"}, [], []),
]


@pytest.mark.parametrize("thinks", [False, True])
@in_loop
async def test_a_hint_that_is_not_followed_is_told_and_refused_where_requests_are_strict(
    thinks: bool,
) -> None:
    template = THINKER if thinks else CHATML
    for strict in (False, True):
        config = ServerConfig(strict_requests=strict)
        async with house(TextEngine(SCRIPTS), config, tokenizer=byte_tokenizer(template)) as server:
            for fields, *told in HINTS:
                for path in (MESSAGES, MESSAGES + "/count_tokens"):
                    answer = await server.client.post(path, json=body(**fields))
                    if strict and told[thinks]:
                        assert answer.status_code == 400, fields
                        assert told[thinks][0] in answer.json()["error"]["message"]
                    else:
                        assert ignored(answer) == told[thinks], (fields, path)


@in_loop
async def test_what_is_no_hint_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"context_management": {"edits": [{}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": ["clear"]}}, "context_management.edits[0]"),
        ({"tools": [{**TOOL, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "messages[0].content"),
        ({"thread": {"type": "create"}}, "thread"),
    ]
    form = {"type": "json_schema", "schema": {"type": "object"}}
    cases.append(({"output_format": form, "output_config": {"format": form}}, "output_format"))
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    turns = [*body()["messages"], {"role": "assistant", "content": [call]}]
    cases.append(({"messages": turns}, "messages[1].content"))
    async with house(TextEngine(SCRIPTS)) as server:
        for fields, words in cases:
            answer = await server.client.post(MESSAGES, json=body() | fields)
            assert answer.status_code == 400, fields
            assert words in answer.json()["error"]["message"], (fields, answer.text)


@in_loop
async def test_thoughts_that_are_omitted_are_empty_blocks() -> None:
    async with house(TextEngine(SCRIPTS), tokenizer=byte_tokenizer(THINKER)) as server:
        for display, thought in (("omitted", ""), ("summarized", "Hm."), ("updates", "Hm.")):
            thinking = {"type": "adaptive", "display": display}
            plain = (await ask(server, "think", thinking=thinking)).json()
            stream = (await ask(server, "think", thinking=thinking, stream=True)).text
            for message in (plain, accumulated(named_events(stream))):
                thoughts = message["usage"]["output_tokens_details"]["thinking_tokens"]
                assert len("<think>Hm.") < thoughts < message["usage"]["output_tokens"]
                kinds = [(block["type"], block.get("thinking")) for block in message["content"]]
                assert kinds == [("thinking", thought), ("text", None)], display


@in_loop
async def test_what_the_model_is_told_of_a_tool_and_what_it_is_not() -> None:
    """Examples are words for the model; the thoughts of another model are for its maker."""
    engine = TextEngine(SCRIPTS)
    turns = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "SECRET"},
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "user", "content": "greet"},
    ]
    tool = {**TOOL, "input_examples": [{"at": "the sea"}], **CACHED}
    async with house(engine) as server:
        answer = await ask(server, messages=turns, tools=[tool])
        assert ignored(answer) == []
        prompt = shown(engine)
        format_ = {"type": "json_schema", "schema": {"const": "Hi"}}
        assert (await ask(server, output_format=format_)).status_code == 200
    assert "the sea" in prompt
    assert "SECRET" not in prompt
    assert "cache_control" not in prompt


@in_loop
async def test_models_are_told_in_the_form_of_the_api_that_asks() -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with house(TextEngine(SCRIPTS)) as server:
        listed = (await server.client.get("/v1/models", headers=version)).json()
        (card,) = listed["data"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
        assert (card["type"], card["id"], card["display_name"]) == ("model", MODEL, MODEL)
        assert card["max_input_tokens"] == server.engine.capacity.max_model_len - 1
        one = await server.client.get(f"/v1/models/{MODEL}", headers=version)
        assert one.json() == card
        assert one.headers["request-id"] == one.headers["x-request-id"]
        missing = await server.client.get("/v1/models/x/y", headers=version)
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"
        assert missing.json()["request_id"] == missing.headers["request-id"]
        other = await server.client.get("/v1/models/x/y")
        assert set(other.json()["error"]) == {"message", "type", "param", "code"}
        assert (await server.client.get("/v1/models")).json()["object"] == "list"
        for path in ("/", "/v1/models"):
            assert (await server.client.head(path, headers=version)).status_code == 200


@in_loop
async def test_silence_brings_events_of_this_api() -> None:
    """Its clients count events; comments are none."""
    engine = TextEngine(SCRIPTS, step_seconds=0.4)
    async with house(engine, ServerConfig(keepalive_seconds=0.05)) as server:
        answer = await ask(server, stream=True)
    events = named_events(answer.text)
    assert events[0] == ("ping", {"type": "ping"})
    message = accumulated(events)
    assert message["content"] == [{"type": "text", "text": "Hi"}]


@in_loop
async def test_a_prompt_that_is_too_long_is_called_so_in_words_that_agents_know() -> None:
    """They compact the conversation by it."""
    async with house(TextEngine(SCRIPTS), ServerConfig(max_input_tokens=30)) as server:
        for text in ("x" * 40, "x" * 9999):
            answer = await ask(server, text)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("prompt is too long: ")


@in_loop
async def test_errors_name_the_field_that_was_sent() -> None:
    schema = {"type": "json_schema", "schema": {"not": {}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output_config": {"format": schema}}, "output_config.format.schema"),
        ({"output_format": schema}, "output_format.schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"max_tokens": 9999}, "max_tokens"),
        ({"thinking": {"type": "disabled"}, "tool_choice": {"type": "any"}}, "tool_choice"),
    ]
    async with house(TextEngine(SCRIPTS), ServerConfig(max_output_tokens=200)) as server:
        for fields, name in cases:
            for stream in (False, True):
                answer = await ask(server, **fields, stream=stream)
                assert answer.status_code == 400
                message = answer.json()["error"]["message"]
                assert message.startswith((f"{name}: ", f"This {name} ")), answer.text
