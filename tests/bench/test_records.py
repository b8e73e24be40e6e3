"""The times of one request, from exchanges whose every stamp is given."""

from __future__ import annotations

import asyncio

import pytest

from bench.http_stream import Exchange
from bench.records import RequestRecord, read_exchange
from bench.sse import events
from tests.bench.fake_server import DONE, chunk, event, usage


def record_of(*pieces: tuple[float, bytes], status: int = 200) -> RequestRecord:
    """A request sent at 100.0, due at 99.5, in a run started at 90.0."""

    async def read() -> RequestRecord:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        exchange = Exchange(100.0, done, status=status, pieces=list(pieces), ended_at=109.0)
        exchange.headers["retry-after"] = "7"
        return read_exchange(exchange, started=90.0, due=99.5)

    return asyncio.run(read())


def chat(**delta: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def test_times_follow_their_definitions() -> None:
    record = record_of(
        (101.0, chunk("a")),
        (101.5, chunk("b")),
        (103.0, chunk("c")),
        (103.0, chunk("", "length") + usage(12, 3) + DONE),
    )
    assert record.error is None
    assert record.sent_at == 10.0
    assert record.lag_seconds == 0.5
    assert record.ttft_seconds == 1.0
    assert record.gaps == (0.5, 1.5)
    assert record.e2e_seconds == 3.0
    assert record.tpot_seconds == 1.0
    assert record.normalised_seconds == 1.0
    assert (record.input_tokens, record.output_tokens) == (12, 3)
    assert record.counted_by == "usage"


def test_chunk_of_several_tokens_counts_them_by_usage() -> None:
    record = record_of((101.0, chunk("a b")), (104.0, chunk("c d e", "stop") + usage(4, 7) + DONE))
    assert (record.output_tokens, record.num_chunks) == (7, 2)
    assert record.gaps == (3.0,)
    assert record.tpot_seconds == pytest.approx(0.5)


def test_without_usage_tokens_are_chunks() -> None:
    record = record_of((101.0, chunk("a")), (102.0, chunk("b", "length")), (102.0, DONE))
    assert (record.output_tokens, record.counted_by) == (2, "chunks")
    assert record.input_tokens is None


def test_role_chunk_and_comments_are_not_the_first_token() -> None:
    """Cases B016 and B119: a comment or the role chunk must not count as the first token."""
    record = record_of(
        (100.1, b": keep-alive\n\n"),
        (100.2, chat(role="assistant", content="")),
        (102.0, chat(content="Hi")),
        (103.0, chat(content="!")),
        (103.5, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + DONE),
    )
    assert record.ttft_seconds == 2.0
    assert record.num_chunks == 2
    assert record.finish_reason == "stop"
    assert record.e2e_seconds == 3.5


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "tool_calls"])
def test_reasoning_and_tool_calls_are_output(name: str) -> None:
    assert record_of((101.0, chat(**{name: ["x"]})), (101.0, DONE)).num_chunks == 1


def test_cached_prompt_tokens_are_kept() -> None:
    counts = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    record = record_of(
        (101.0, chunk("a", "stop")), (101.0, event({"choices": [], "usage": counts}))
    )
    assert record.cached_tokens == 8


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([(101.0, b"data: {not json}\n\n")], "malformed"),
        ([(101.0, b"data: [1]\n\n")], "malformed"),
        ([(101.0, chunk("a")), (102.0, event({"error": {"message": "died"}}))], "stream_error"),
        ([(101.0, chunk("a"))], "incomplete"),
        ([(101.0, DONE)], "empty"),
        ([(101.0, chunk("", "stop") + DONE)], "empty"),
    ],
)
def test_bad_streams_are_counted_by_kind(pieces: list[tuple[float, bytes]], kind: str) -> None:
    record = record_of(*pieces)
    assert record.error == kind
    assert record.ttft_seconds is None
    assert record.output_tokens == 0


def test_refusals_keep_their_words_and_retry_after() -> None:
    record = record_of((101.0, b'{"error": {"message": "too busy"}}'), status=429)
    assert (record.error, record.message) == ("http_429", "too busy")
    assert record.retry_after_seconds == 7.0
    assert record.e2e_seconds == 9.0


def test_one_token_has_no_tpot() -> None:
    assert record_of((101.0, chunk("a", "stop") + DONE)).tpot_seconds is None


def test_events_survive_any_split_and_line_ending() -> None:
    text = b": hello\r\n\r\ndata: one\r\n\r\ndata:two\ndata: more\n\nevent: x\ndata: last\n\n"
    wanted = [b"one", b"two\nmore", b"last"]
    for size in range(1, len(text) + 1):
        pieces = [(float(at), text[at : at + size]) for at in range(0, len(text), size)]
        assert [data for _, data in events(pieces)] == wanted


def test_event_has_the_time_of_the_piece_that_ends_it() -> None:
    assert list(events([(1.0, b"data: a"), (2.0, b"\n\ndata: b"), (3.0, b"\n")])) == [
        (2.0, b"a"),
        (3.0, b"b"),
    ]
