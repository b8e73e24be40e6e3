"""Tools of the Responses API that chat does not know, and what is said of the text beside calls."""

from __future__ import annotations

from server.config import ServerConfig
from tests.server.test_anthropic import CALL
from tests.server.test_responses import RESPONSES, SCRIPTS, TOOL, accumulated, ask
from tests.support.http_server import MODEL, TextEngine, house, in_loop
from tests.support.tokenizers import CHATML, byte_tokenizer

WEB = {"type": "web_search", "search_context_size": "low"}
GROUP = {
    "type": "namespace",
    "name": "sky",
    "description": "All about the sky.",
    "tools": [{**TOOL, "description": "Look up."}, {"type": "function", "name": "fly"}],
}


@in_loop
async def test_functions_of_a_namespace_are_called_by_it() -> None:
    """Codex sends such groups; the call, its events and what is stored bear the name."""
    engine = TextEngine(SCRIPTS)
    async with house(engine) as server:
        plain = (await ask(server, "look up", tools=[GROUP])).json()
        stream = await ask(server, "look up", tools=[GROUP], stream=True)
        again = await server.client.get(f"{RESPONSES}/{plain['id']}?stream=true")
        for response in (plain, accumulated(stream.text), accumulated(again.text)):
            call = response["output"][-1]
            assert (call["type"], call["name"], call["namespace"]) == (
                "function_call",
                "look",
                "sky",
            )
        assert plain["tools"][0]["name"] == "sky"
        assert [tool["name"] for tool in plain["tools"][0]["tools"]] == ["look", "fly"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "and then"}
        items = [{"role": "user", "content": "look up"}, *plain["output"], result]
        assert (await ask(server, items, tools=[GROUP])).status_code == 200
        other = (await ask(server, "look up", tools=[TOOL])).json()
        assert "namespace" not in other["output"][-1]
        prompt = bytes(token for token in engine.prompts[0] if token < 256).decode()
        assert "namespace" not in prompt
        wrong = {**GROUP, "tools": [TOOL, {**TOOL, "name": "a b"}]}
        for tools, param in (
            ([TOOL, wrong], "tools[1].tools[1].name"),
            ([TOOL, GROUP], "tools"),
            ([{"type": "namespace", "tools": []}], "tools[0].name"),
            ([{**GROUP, "strict": True}], "tools[0].strict"),
            ([{**TOOL, "tools": [TOOL]}], "tools[0].tools"),
        ):
            error = (await ask(server, tools=tools)).json()["error"]
            assert error["param"] == param, error


@in_loop
async def test_a_tool_that_only_openai_runs_is_not_offered_and_told_unless_it_is_relied_upon() -> (
    None
):
    async with house(TextEngine(SCRIPTS)) as server:
        for path, extra in ((RESPONSES, {}), (RESPONSES + "/input_tokens", {})):
            body = {"model": MODEL, "input": "greet", "tools": [WEB, TOOL], **extra}
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 200
            told = answer.headers["x-paceline-ignored-params"].split(", ")
            assert told == ["tools.search_context_size", "tools.web_search"]
        shown = (await ask(server, tools=[WEB, TOOL])).json()["tools"]
        assert [tool["type"] for tool in shown] == ["function"]
        for fields in (
            {"tools": [WEB]},
            {"tools": [WEB, TOOL], "tool_choice": "required"},
            {"tools": [WEB, TOOL], "tool_choice": {"type": "web_search"}},
        ):
            answer = await ask(server, **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools[0].type"
    async with house(TextEngine(SCRIPTS), ServerConfig(strict_requests=True)) as server:
        answer = await ask(server, tools=[{"type": "web_search"}, TOOL])
        assert answer.json()["error"]["param"] == "tools.web_search"


@in_loop
async def test_log_probabilities_of_a_message_are_those_of_its_text() -> None:
    """B074: not of thoughts before it, nor of calls behind it; however the answer was cut."""
    script = f"<think>\nHm.\n</think>\n\nLet me  see. \n{CALL} </too"
    engine = TextEngine({"look up": script, "greet": " Hello. "})
    async with house(engine, tokenizer=byte_tokenizer(CHATML + "{# <think> #}")) as server:
        for text, tools, told in (("look up", [TOOL], "Let me  see."), ("greet", [], " Hello. ")):
            fields = {"tools": tools, "top_logprobs": 1}
            plain = (await ask(server, text, **fields)).json()
            stream = await ask(server, text, **fields, stream=True)
            again = await server.client.get(f"{RESPONSES}/{plain['id']}?stream=true")
            for response in (plain, accumulated(stream.text), accumulated(again.text)):
                messages = [item for item in response["output"] if item["type"] == "message"]
                first, *rest = [message["content"][0] for message in messages]
                rows = first["logprobs"]
                assert "".join(row["token"] for row in rows) == first["text"] == told
                assert not any(part["logprobs"] for part in rest)
                assert (len(rest) == 1) == bool(tools)
