"""Everything at once on the path that cuda takes: the answers are the reference's, one by one.

Depth 1, graph buckets, chunked prefills, preemption, cached prefixes, aborts of what is in flight,
grammars, seeds, penalties and log-probabilities; and copies to the host that arrive late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import engine.grammar_rows
import engine.step_engine
import engine.step_result
from engine.cuda_engine import TritonSampling
from engine.cuda_graphs import bucket_sizes
from engine.grammar import GrammarCompiler
from engine.loading import LoadedModel
from engine.torch_engine import TorchEngine
from scheduler.types import FinishReason, KVCapacity, Request, SamplingParams
from tests.engine.kernels_triton.test_cuda_engine import ReplayedWork, make_runner
from tests.engine.test_grammar import LETTERS, OPEN_END, VOCABULARY
from tests.engine.test_torch_engine import GREEDY, Answer, load_tiny, random_prompt, serve

CPU = torch.device("cpu")
CAPACITY = KVCapacity(num_blocks=8, block_size=8, num_slots=4, max_model_len=64)


class LateCopies:
    """Stands in for a stream: a copy to the host holds garbage until somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._arrived = 0
        self.num_waits = 0
        monkeypatch.setattr(engine.step_result, "to_host", self._to_host)
        monkeypatch.setattr(engine.grammar_rows, "to_host", self._to_host)
        monkeypatch.setattr(engine.step_engine, "StepTimer", lambda _device: self._Mark(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda: self._Mark(self))

    def _to_host(self, array: Tensor) -> Tensor:
        host = torch.full_like(array, -7 if array.dtype is torch.int64 else torch.nan)
        self._copies.append((host, array.clone()))
        return host

    class _Mark:
        """An event, or a timer: what was copied before it is there once it was waited for."""

        def __init__(self, stream: LateCopies) -> None:
            self._stream, self._place = stream, 0

        def mark(self) -> None:
            self._place = len(self._stream._copies)

        @torch.inference_mode()
        def wait(self) -> None:
            stream = self._stream
            stream.num_waits += 1
            for host, value in stream._copies[stream._arrived : self._place]:
                host.copy_(value)
            stream._arrived = max(stream._arrived, self._place)

        record, synchronize = mark, wait

        def seconds(self, _first: int, _last: int) -> float:
            return 0.0


def requests() -> list[Request]:
    shared = random_prompt(17, seed=99)
    scored = replace(GREEDY, num_logprobs=2, prompt_logprobs=1)
    penalised = replace(GREEDY, repetition_penalty=2.0, frequency_penalty=0.5, min_tokens=3)
    of = [
        ("greedy", shared, scored, b""),
        ("aborted", random_prompt(20, 2), SamplingParams(temperature=0.9, seed=3), b""),
        ("letters", random_prompt(9, 3), GREEDY, LETTERS),
        ("penalised", random_prompt(25, 4), penalised, b""),
        ("seeded", shared, SamplingParams(temperature=0.8, seed=42, num_logprobs=0), b""),
        ("open", shared[:9], SamplingParams(temperature=1.5, seed=5), OPEN_END),
        ("ranked", (*shared, 5), SamplingParams(top_k=5, seed=-3, presence_penalty=0.5), b""),
        ("waiting", random_prompt(12, 6), GREEDY, b""),
        ("again", shared, scored, b""),
    ]
    long = {"aborted": 30, "penalised": 14, "letters": 12, "ranked": 3}
    return [
        Request(
            id=name,
            prompt=prompt,
            max_tokens=long.get(name, 6),
            sampling=sampling,
            stop_token_ids=(2,) if grammar or name == "penalised" else (),
            grammar=grammar,
        )
        for name, prompt, sampling, grammar in of
    ]


def reference(model: LoadedModel, work: Sequence[Request]) -> dict[str, Answer]:
    """Each alone, in torch, waiting for every step."""
    answers = {}
    for request in work:
        alone = TorchEngine(
            model,
            device=CPU,
            dtype=torch.float32,
            capacity=replace(CAPACITY, num_blocks=48),
            grammars=GrammarCompiler(VOCABULARY),
        )
        answers |= serve(alone, [request]).answers
    return answers


def test_every_answer_is_the_reference_s(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    expected = reference(model, requests())
    stream, recorder = LateCopies(monkeypatch), ReplayedWork()
    runner = make_runner(model, num_blocks=CAPACITY.num_blocks, recorder=recorder)
    made = TorchEngine(
        model,
        device=CPU,
        dtype=torch.float32,
        capacity=CAPACITY,
        runner=runner,
        grammars=GrammarCompiler(VOCABULARY),
        sampler_kernels=TritonSampling(),
    )
    made._steps._sampler._grammars._device = SimpleNamespace(type="cuda")
    served = serve(
        made,
        requests(),
        depth=1,
        max_step_tokens=24,
        arrivals=lambda i: (0, 0, 0, 0, 3, 4, 5, 6, 30)[i],
        aborts={9: ("aborted", "waiting")},
        watermark_blocks=0,
    )
    num_preemptions = sum(answer.num_preemptions for answer in served.answers.values())
    for name in ("aborted", "waiting"):
        answer = served.answers.pop(name)
        assert answer.reason is FinishReason.ABORT
        assert answer.token_ids == expected[name].token_ids[: len(answer.token_ids)]
    for name, answer in served.answers.items():
        assert answer.token_ids == expected[name].token_ids, name
        assert answer.reason is expected[name].reason, (name, answer.message)
        for part in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(answer, part), getattr(expected[name], part), strict=True)
            for ours, theirs in pairs:
                assert ours.token_id == theirs.token_id
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert served.prefix_hits > 0
    assert num_preemptions > 0
    assert runner.graphs is not None
    assert runner.graphs.num_captured == len(bucket_sizes(4))
    assert recorder.num_replays > 5
    assert stream.num_waits > recorder.num_replays
