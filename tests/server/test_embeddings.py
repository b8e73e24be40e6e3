"""Embeddings equal transformers' hidden states, alone and in a crowd, in every form of the API."""

from __future__ import annotations

import base64
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.kernels.cpu.library import available_tiers
from engine.loading import load_weights, open_model
from engine.native_cpu import NativeOptions, refusal
from engine.native_runner import load_native, native_engine, native_file
from engine.step_engine import StepEngine
from engine.torch_engine import TorchEngine
from scheduler.limits import SchedulerLimits
from scheduler.types import KVCapacity
from server.completions import read_prompts
from tests.support.http_server import COMPLETIONS, MODEL_VOCAB_SIZE, House, house, in_loop
from tests.support.models import save_tiny_model
from tests.support.scripted_engine import LIMITS

CPU = torch.device("cpu")
CAPACITY = KVCapacity(num_blocks=32, block_size=16, num_slots=16, max_model_len=256)
# Chunks of 24 tokens: prompts are cut, and share steps with others.
CHUNKS = SchedulerLimits(max_step_tokens=24, max_waiting=64, max_running=8, watermark_blocks=0)
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(path of a tiny random model, the same in transformers)"""
    path = tmp_path_factory.mktemp(request.param)
    return path, save_tiny_model(request.param, path, vocab_size=MODEL_VOCAB_SIZE).eval()


def torch_engine(path: Path, **changes: int) -> TorchEngine:
    capacity = replace(CAPACITY, **changes)
    model = load_weights(open_model(path), dtype=torch.float32, device=CPU)
    return TorchEngine(model, device=CPU, dtype=torch.float32, capacity=capacity)


def engine_on_kernels(path: Path) -> StepEngine:
    file = native_file(open_model(path))
    options = NativeOptions(
        num_blocks=32,
        block_size=16,
        max_model_len=256,
        max_step_tokens=32,
        num_threads=1,
        kv_type="float32",
    )
    return native_engine(load_native(file, options), capacity=CAPACITY)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(1, 120) for _ in range(length)] for length in lengths]


def expected(model: Any, token_ids: list[int], pooling: str) -> NDArray[np.float64]:
    with torch.inference_mode():
        out = model(torch.tensor([token_ids]), output_hidden_states=True)
    states = out.hidden_states[-1][0].double().numpy()
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return np.asarray(pooled / np.linalg.norm(pooled))


async def embed(server: House, given: Any, **fields: Any) -> httpx.Response:
    return await server.client.post(EMBEDDINGS, json={"input": given, **fields})


async def vectors(server: House, given: Any, **fields: Any) -> NDArray[np.float64]:
    answer = await embed(server, given, **fields)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [row["index"] for row in data] == list(range(len(data)))
    return np.array([row["embedding"] for row in data])


@pytest.mark.parametrize("pooling", ["mean", "last"])
@in_loop
async def test_vectors_equal_the_pooled_hidden_states_of_transformers(
    family: Any, pooling: str
) -> None:
    path, model = family
    given = prompts(1, 3, 8, 50, 100, CAPACITY.max_model_len)  # the last fills the context
    wanted = [expected(model, prompt, pooling) for prompt in given]
    engines = [torch_engine(path)]
    if available_tiers() and refusal(native_file(open_model(path)).config) is None:
        engines.append(engine_on_kernels(path))
    for engine in engines:
        async with house(engine, limits=CHUNKS) as server:
            made = await vectors(server, given, pooling=pooling)
            assert np.abs(made - np.array(wanted)).max() < 1e-4
            again = await vectors(server, given, pooling=pooling)  # from the prefix cache
            assert np.abs(again - made).max() < 1e-6


@pytest.mark.parametrize("pooling", ["mean", "last"])
@in_loop
async def test_a_batch_equals_each_alone(family: Any, pooling: str) -> None:
    path, _ = family
    given = prompts(5, 60, 17, 60, 2)
    given[3] = given[1]
    async with house(torch_engine(path), limits=CHUNKS) as server:
        together = await vectors(server, given, pooling=pooling)
    async with house(torch_engine(path), limits=LIMITS) as server:
        alone = [await vectors(server, prompt, pooling=pooling) for prompt in given]
    assert np.abs(together - np.concatenate(alone)).max() < 1e-6
    assert (together[1] == together[3]).all()


@in_loop
async def test_a_preempted_prompt_is_pooled_whole(family: Any) -> None:
    """With memory for one and a half of them, sequences give way and begin anew."""
    path, model = family
    given = prompts(90, 91, 92)
    limits = SchedulerLimits(max_step_tokens=32, max_waiting=64, max_running=8, watermark_blocks=0)
    async with house(torch_engine(path, num_blocks=10), limits=limits) as server:
        made = await vectors(server, given, pooling="mean")
    for vector, prompt in zip(made, given, strict=True):
        assert np.abs(vector - expected(model, prompt, "mean")).max() < 1e-4


@in_loop
async def test_generation_beside_embeddings_is_unchanged(family: Any) -> None:
    path, _ = family
    (prompt,) = prompts(30)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with house(torch_engine(path), limits=CHUNKS) as server:
        before = (await server.client.post(COMPLETIONS, json=body)).json()["choices"]
        await vectors(server, [prompt, *prompts(9, 40)], pooling="last")
        assert (await server.client.post(COMPLETIONS, json=body)).json()["choices"] == before


@in_loop
async def test_forms_and_lengths_of_a_vector(family: Any) -> None:
    """base64 is little-endian float32; fewer dimensions are a normalised beginning."""
    path, _ = family
    async with house(torch_engine(path), limits=CHUNKS) as server:
        (plain,) = await vectors(server, "some text")
        assert abs(np.linalg.norm(plain) - 1) < 1e-6
        answer = (await embed(server, "some text", encoding_format="base64")).json()
        coded = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
        assert np.abs(coded - plain).max() < 1e-7
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
        (short,) = await vectors(server, "some text", dimensions=5)
        assert np.abs(short - plain[:5] / np.linalg.norm(plain[:5])).max() < 1e-6
        (raw,) = await vectors(server, "some text", normalize=False)
        assert np.abs(raw / np.linalg.norm(raw) - plain).max() < 1e-6
        assert abs(np.linalg.norm(raw) - 1) > 1e-3
        too_many = await embed(server, "some text", dimensions=100_000)
        assert too_many.json()["error"]["param"] == "dimensions"
        (cut,) = await vectors(server, "some text", truncate_prompt_tokens=4)
        (end,) = await vectors(server, "text")
        assert np.abs(cut - end).max() < 1e-6
        many = await vectors(server, [f"text {index}" for index in range(150)])
        assert len(many) == 150


@in_loop
async def test_many_inputs_are_one_request_in_timeline_log_and_metrics(
    family: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, _ = family
    inputs = [f"text number {index}" for index in range(80)]  # more than run at a time
    async with house(torch_engine(path), limits=CHUNKS) as server:
        await vectors(server, inputs)
        (row,) = (await server.client.get("/admin/requests")).json()["finished"]
        name = f"/admin/requests/{row['answer_id']}/timeline"
        timeline = (await server.client.get(name)).json()
        for series in ("time_to_first_token_seconds", "request_duration_seconds"):
            assert await server.metric(f"paceline_{series}_count") == 1
        assert await server.metric("paceline_requests_accepted_total") == 80
        assert await server.metric("paceline_requests_finished_total", reason="length") == 80
        tokens = await server.metric("paceline_prompt_tokens_total")
    assert (row["num_sequences"], row["finish"], row["completion_tokens"]) == (80, "length", 0)
    assert row["prompt_tokens"] == tokens > 80
    assert sum(row["phases_ms"].values()) == pytest.approx(row["e2e_ms"], abs=0.01)
    assert {"parse", "tokenize", "queue", "prefill", "close"} <= set(row["phases_ms"])
    assert all(sequence["stays"] for sequence in timeline["sequences"])
    records = [record for record in caplog.records if record.name == "paceline.request"]
    logged = records[0].__dict__["fields"]
    assert (logged["path"], logged["prompt_tokens"]) == (EMBEDDINGS, tokens)


@in_loop
async def test_a_small_server_takes_many_inputs_in_turns(family: Any) -> None:
    path, _ = family
    limits = replace(CHUNKS, max_waiting=3, max_running=2)
    async with house(torch_engine(path), limits=limits) as server:
        answer = await server.client.post(EMBEDDINGS, json={"input": ["a"] * 12})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 12


@in_loop
async def test_bad_inputs_are_refused_by_name(family: Any) -> None:
    path, _ = family
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "guided_json": {}}, "guided_json"),
    ]
    async with house(torch_engine(path), limits=CHUNKS) as server:
        for body, param in bad:
            answer = await server.client.post(EMBEDDINGS, json=body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == param, answer.text
        for long in ("x" * 300, [5] * (CAPACITY.max_model_len + 1)):
            answer = await embed(server, long)
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_forms_of_an_input_are_those_of_a_prompt() -> None:
    assert read_prompts("a", param="input") == ["a"]
    assert read_prompts([1, 2], param="input") == [[1, 2]]
    assert read_prompts([[1], [2]], param="input") == [[1], [2]]
