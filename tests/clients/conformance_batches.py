"""Files and batches with openai-python: sent, run, fetched, cancelled, deleted."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai import OpenAI

KEY = "sk-conformance"
MODEL = "scripted"
HELLO = "Hello there, čau \U0001f600!"


@pytest.fixture
def client(url: str) -> Any:
    with OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def line(custom_id: str, endpoint: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body})


def send(client: OpenAI, *lines: str) -> str:
    content = "\n".join(lines).encode()
    return client.files.create(file=("lines.jsonl", content), purpose="batch").id


def wait(client: OpenAI, batch_id: str) -> Any:
    for _ in range(600):
        batch = client.batches.retrieve(batch_id)
        if batch.status not in ("in_progress", "cancelling", "validating", "finalizing"):
            return batch
        time.sleep(0.05)
    raise AssertionError("the batch did not end")


def results(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    rows = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def test_files(client: OpenAI) -> None:
    content = b'{"a": "\xc4\x8d"}\r\n\r\n--boundary\x00\xff'
    made = client.files.create(file=("some name.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(content), "some name.jsonl", "batch")
    assert client.files.content(made.id).read() == content
    assert client.files.retrieve(made.id).id == made.id
    assert made.id in {file.id for file in client.files.list(purpose="batch", limit=2)}
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 60}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
def test_a_batch_of_every_endpoint(client: OpenAI, endpoint: Any, body: dict[str, Any]) -> None:
    lines = [line(f"line-{i}", endpoint, {"model": MODEL, **body}) for i in range(5)]
    lines.append(line("bad", endpoint, {"model": "other", **body}))
    batch = client.batches.create(
        input_file_id=send(client, *lines),
        endpoint=endpoint,
        completion_window="24h",
        metadata={"purpose": "test"},
    )
    assert batch.status == "in_progress"
    batch = wait(client, batch.id)
    assert batch.status == "completed"
    assert batch.metadata == {"purpose": "test"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    made = results(client, batch.output_file_id)
    assert set(made) == {f"line-{i}" for i in range(5)}
    if "embeddings" not in endpoint:
        assert all(HELLO in json.dumps(row, ensure_ascii=False) for row in made.values())
    failed = results(client, batch.error_file_id)["bad"]
    assert failed["response"]["status_code"] == 404
    assert batch.id in {found.id for found in client.batches.list(limit=3)}


def test_a_bad_file_makes_a_failed_batch_that_says_why(client: OpenAI) -> None:
    good = line("a", "/v1/completions", {"prompt": "hello"})
    bad = [good, good, "{", line("b", "/v1/embeddings", {}), '{"custom_id": "c"}']
    batch = client.batches.create(
        input_file_id=send(client, *bad), endpoint="/v1/completions", completion_window="24h"
    )
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [2, 3, 4, 5]
    assert batch.errors.data[0].code == "duplicate_custom_id"
    with pytest.raises(openai.NotFoundError):
        client.batches.create(
            input_file_id="file-none", endpoint="/v1/completions", completion_window="24h"
        )


def test_a_cancelled_batch_keeps_what_it_has(client: OpenAI) -> None:
    endless = {"prompt": "zzz", "max_tokens": 4000, "seed": 1}
    lines = [line(f"line-{i}", "/v1/completions", endless) for i in range(40)]
    batch = client.batches.create(
        input_file_id=send(client, *lines), endpoint="/v1/completions", completion_window="24h"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    made = batch.request_counts.completed
    if made:
        assert len(results(client, batch.output_file_id)) == made
    errors = results(client, batch.error_file_id)
    assert made + len(errors) == 40
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)
