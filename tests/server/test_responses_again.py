"""Stored responses told again as streams: the same events, numbers and all, for who comes late."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from tests.server.test_anthropic import FailingEngine, named_events
from tests.server.test_reasoning import ANSWER, MAY_THINK, thinker
from tests.server.test_responses import CASES, RESPONSES, SCRIPTS, accumulated, ask
from tests.support.http_server import House, TextEngine, house, in_loop


async def again(server: House, response_id: str, **query: Any) -> httpx.Response:
    return await server.client.get(f"{RESPONSES}/{response_id}", params={"stream": "true", **query})


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    return named_events(text) if text else []


def id_of(text: str) -> str:
    found: str = events_of(text)[0][1]["response"]["id"]
    return found


def numbers(text: str) -> list[int]:
    return [data["sequence_number"] for _, data in events_of(text)]


async def check_replay(server: House, text: str, **fields: Any) -> None:
    made = await ask(server, text, **fields, stream=True)
    response_id = id_of(made.text)
    replayed = await again(server, response_id)
    assert replayed.headers["content-type"].startswith("text/event-stream")
    assert replayed.text == made.text
    events = events_of(made.text)
    for after in (0, 1, len(events) - 2, len(events) - 1, 10**9):
        rest = await again(server, response_id, starting_after=after)
        assert events_of(rest.text) == events[after + 1 :]


@pytest.mark.parametrize("case", CASES, ids=[str(list(case.items())[:2]) for case in CASES])
@in_loop
async def test_a_stored_stream_is_told_again_event_by_event(case: dict[str, Any]) -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        await check_replay(server, **{"text": "greet", **case, "store": True})


@in_loop
async def test_thoughts_are_told_again_too() -> None:
    engine, options = thinker(MAY_THINK, ANSWER)
    async with house(engine, **options) as server:  # type: ignore[arg-type]
        await check_replay(server, "think")


@in_loop
async def test_a_plain_answer_is_told_as_a_stream_that_adds_up_to_it() -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        made = (await ask(server)).json()
        assert accumulated((await again(server, made["id"])).text) == made


@in_loop
async def test_a_background_stream_goes_on_without_its_client_and_is_taken_up_again() -> None:
    """By several at once, from any event on, while it is made and after."""
    async with house(TextEngine(SCRIPTS, step_seconds=0.01), live=True) as server:
        body = {"input": "greet", "background": True, "stream": True}
        seen: list[str] = []
        async with server.client.stream("POST", RESPONSES, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                seen.append(line)
                if len([one for one in seen if one.startswith("data: ")]) == 4:
                    break
        response_id = id_of("\n".join(seen[:3]) + "\n")
        late = [again(server, response_id, starting_after=n) for n in (3, 0, 3)]
        whole, *rests = await asyncio.gather(again(server, response_id), *late)
        response = accumulated(whole.text)
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["text"] == SCRIPTS["greet"]
        events = events_of(whole.text)
        for rest, after in zip(rests, (3, 0, 3), strict=True):
            assert events_of(rest.text) == events[after + 1 :]
        assert (await again(server, response_id)).text == whole.text
        assert (await server.client.get(f"{RESPONSES}/{response_id}")).json() == response


@in_loop
async def test_a_background_stream_is_the_same_to_who_began_it_and_who_came_late() -> None:
    """While it is made, too: what goes to one must not be missing for the other."""
    body = {"input": "greet", "background": True, "stream": True}
    async with house(TextEngine(SCRIPTS, step_seconds=0.02), live=True) as server:
        async with server.client.stream("POST", RESPONSES, json=body) as answer:
            texts = answer.aiter_text()
            text = await anext(texts)
            late = asyncio.create_task(again(server, id_of(text.partition("\n\n")[0])))
            async for more in texts:
                text += more
        assert accumulated(text)["status"] == "completed"
        assert (await late).text == text
        assert (await again(server, id_of(text))).text == text


@in_loop
async def test_who_follows_a_cancelled_or_deleted_response_is_told_its_end() -> None:
    async with house(TextEngine(step_seconds=0.01), live=True) as server:
        for method, tail in (("POST", "/cancel"), ("DELETE", "")):
            started = (await ask(server, "endless", background=True)).json()
            path = f"{RESPONSES}/{started['id']}"
            async with server.client.stream("GET", path + "?stream=true") as answer:
                lines = answer.aiter_lines()
                first = await anext(lines)
                gone = await server.client.request(method, path + tail)
                assert gone.status_code == 200
                rest = [line async for line in lines]
            assert first == "event: response.created"
            if tail:
                assert rest[-3] == "event: response.incomplete"
                assert '"status":"cancelled"' in rest[-2]
                later = await again(server, started["id"], starting_after=500)
                assert numbers(later.text) == [501]


@in_loop
async def test_who_follows_a_response_that_fails_is_told_so() -> None:
    async with house(FailingEngine(SCRIPTS), live=True) as server:
        made = await ask(server, "cut", background=True, stream=True)
        events = events_of(made.text)
        assert events[-1][0] == "response.failed"
        assert events[-1][1]["response"]["error"]["message"]
        assert numbers(made.text) == list(range(len(events)))


@in_loop
async def test_the_error_of_a_stream_has_the_next_number() -> None:
    async with house(FailingEngine(SCRIPTS)) as server:
        made = await ask(server, "cut", stream=True)
        assert events_of(made.text)[-1][0] == "error"
        assert numbers(made.text) == list(range(len(numbers(made.text))))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "maybe"}, "stream"),
        ({"starting_after": "3"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "true", "include_obfuscation": "true"}, "include_obfuscation"),
    ],
)
@in_loop
async def test_a_wish_for_events_that_cannot_be_kept_is_refused(
    query: dict[str, str], param: str
) -> None:
    async with house(TextEngine(SCRIPTS)) as server:
        made = (await ask(server)).json()
        answer = await server.client.get(f"{RESPONSES}/{made['id']}", params=query)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@in_loop
async def test_nobody_follows_the_response_of_another_tenant() -> None:
    config = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"))
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    async with house(TextEngine(SCRIPTS), config) as server:
        made = (await ask(server, headers=alice)).json()
        path = f"{RESPONSES}/{made['id']}?stream=true"
        assert (await server.client.get(path, headers=bob)).status_code == 404
        assert (await server.client.get(path, headers=alice)).status_code == 200


@in_loop
async def test_input_items_come_in_pages() -> None:
    said = [{"role": "user", "content": f"greet {number}"} for number in range(5)]
    async with house(TextEngine(SCRIPTS)) as server:
        made = (await ask(server, said)).json()
        path = f"{RESPONSES}/{made['id']}/input_items"
        seen: list[str] = []
        after: dict[str, str] = {}
        for has_more in (True, True, False):
            page = (
                await server.client.get(path, params={"limit": "2", "order": "asc", **after})
            ).json()
            assert page["has_more"] is has_more
            seen += [item["content"] for item in page["data"]]
            after = {"after": page["last_id"]}
        assert seen == [item["content"] for item in said]
        for wrong in ({"limit": "0"}, {"order": "up"}, {"after": "item_99"}):
            assert (await server.client.get(path, params=wrong)).status_code == 400
