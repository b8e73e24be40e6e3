"""From what a step leaves on the device to a StepResult on the host.

Starts the copies when the step is submitted and waits for them when the result is asked for. Must
not know how the arrays were computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.arrays import Array, to_host
from engine.batch import Outputs
from engine.errors import CONSTRAINT, NOTHING_LEFT
from engine.logprobs import Logprobs, as_token_logprobs
from engine.pooling import PooledPrompts
from engine.prompt_scores import ScoredPrompts
from engine.sampler import Samples
from scheduler.types import StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    import torch

NOT_FINITE = "the model produced a number that is not finite"


class StepTimer:
    """Seconds between marks, of the device's own clock where it has one."""

    def __init__(self, device: torch.device | None) -> None:
        self._has_clock = device is not None and device.type == "cuda"
        self._marks: list[Any] = []  # seconds, or torch.cuda.Event

    def mark(self) -> None:
        if not self._has_clock:
            self._marks.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def wait(self) -> None:
        """Until the device has passed the last mark."""
        if self._has_clock:
            self._marks[-1].synchronize()

    def seconds(self, first: int, last: int) -> float:
        """Between two marks by index; after wait()."""
        begin, end = self._marks[first], self._marks[last]
        seconds: float = begin.elapsed_time(end) / 1000 if self._has_clock else end - begin
        return seconds


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step leaves on the device. `sampled` are the rows of `samples`, in order."""

    hidden_peaks: Array  # [outputs] float32: largest magnitude of each hidden state
    sampled: tuple[int, ...]
    samples: Samples | None
    prompts: ScoredPrompts | None
    pooled: PooledPrompts | None = None


class PendingStep:
    """A submitted step. `faults` are (row, message) known before it ran.

    The timer's marks: start of the step, end of the last layer, end of the step.
    """

    def __init__(
        self,
        plan: StepPlan,
        outputs: Outputs,
        tensors: StepTensors,
        *,
        faults: dict[int, str],
        timer: StepTimer,
    ) -> None:
        self._plan, self._outputs, self._faults, self._timer = plan, outputs, faults, timer
        self._sampled = tensors.sampled
        self._hidden_peaks = to_host(tensors.hidden_peaks)
        self._samples = self._prompts = None
        if tensors.samples is not None:
            samples = tensors.samples
            self._samples = replace(
                samples,
                token_ids=to_host(samples.token_ids),
                peaks=to_host(samples.peaks),
                logprobs=_logprobs_to_host(samples.logprobs),
            )
        if tensors.prompts is not None:
            prompts = tensors.prompts
            self._prompts = replace(
                prompts,
                token_ids=to_host(prompts.token_ids),
                logprobs=_logprobs_to_host(prompts.logprobs),
            )
        self._pooled = None
        if tensors.pooled is not None:
            self._pooled = replace(tensors.pooled, vectors=to_host(tensors.pooled.vectors))
        timer.mark()

    def result(self) -> StepResult:
        """Waits for the step to end."""
        self._timer.wait()
        ended = self._settle_grammars()
        errors = self._row_errors()
        num_rows = len(self._plan.seq_ids)
        tokens: list[tuple[int, ...]] = [()] * num_rows
        if self._samples is not None:
            for row, token in zip(self._sampled, self._samples.token_ids.tolist(), strict=True):
                if row not in errors:
                    tokens[row] = (token,)
        return StepResult(
            step=self._plan.step,
            token_ids=tuple(tokens),
            logprobs=self._sampled_logprobs(num_rows, errors),
            prompt_logprobs=self._prompt_logprobs(num_rows, errors),
            row_errors=tuple(sorted(errors.items())),
            ended_rows=ended,
            pooled=self._pooled_rows(num_rows, errors),
            device_seconds=self._timer.seconds(0, 2),
            sample_seconds=self._timer.seconds(1, 2),
        )

    def _settle_grammars(self) -> tuple[int, ...]:
        """The rows whose grammar ended; rows that a grammar refused become faults."""
        if self._samples is None or self._samples.grammar is None:
            return ()
        grammar = self._samples.grammar
        grammar.settle()
        peaks = np.asarray(self._samples.peaks)
        for row, message in grammar.errors.items():
            shown = NOTHING_LEFT if peaks[row] == -np.inf else CONSTRAINT + message
            self._faults.setdefault(self._sampled[row], shown)
        return tuple(self._sampled[row] for row in grammar.ended)

    def _row_errors(self) -> dict[int, str]:
        errors = dict(self._faults)
        peaks = np.asarray(self._hidden_peaks)
        healthy = np.isfinite(peaks).all()
        if healthy and (
            self._samples is None or np.isfinite(np.asarray(self._samples.peaks)).all()
        ):
            return errors
        peaks = np.maximum.reduceat(peaks, self._outputs.offsets[:-1])
        broken = np.flatnonzero(~np.isfinite(peaks)).tolist()
        if self._samples is not None:
            best = np.asarray(self._samples.peaks)
            finite = np.isfinite(best)
            for i in np.flatnonzero(best == -np.inf):  # all is masked, whatever the model says
                errors.setdefault(self._sampled[i], NOTHING_LEFT)
            broken += [self._sampled[i] for i in np.flatnonzero(~finite)]
        for row in broken:
            errors.setdefault(row, NOT_FINITE)
        return errors

    def _sampled_logprobs(
        self, num_rows: int, errors: dict[int, str]
    ) -> tuple[tuple[TokenLogprobs, ...], ...] | None:
        samples = self._samples
        if samples is None or samples.logprobs is None:
            return None
        token_ids = samples.token_ids.tolist()
        entries = as_token_logprobs(
            [token_ids[row] for row in samples.logprob_rows],
            samples.logprobs,
            list(samples.num_top),
        )
        of_row: list[tuple[TokenLogprobs, ...]] = [()] * num_rows
        for index, entry in zip(samples.logprob_rows, entries, strict=True):
            if self._sampled[index] not in errors:
                of_row[self._sampled[index]] = (entry,)
        return tuple(of_row)

    def _prompt_logprobs(
        self, num_rows: int, errors: dict[int, str]
    ) -> tuple[tuple[TokenLogprobs, ...], ...] | None:
        prompts = self._prompts
        if prompts is None:
            return None
        num_top = np.repeat(prompts.num_top, prompts.counts).tolist()
        entries = as_token_logprobs(prompts.token_ids.tolist(), prompts.logprobs, num_top)
        of_row: list[tuple[TokenLogprobs, ...]] = [()] * num_rows
        begin = 0
        for row, count in zip(prompts.rows, prompts.counts, strict=True):
            if row not in errors:
                of_row[row] = tuple(entries[begin : begin + count])
            begin += count
        return tuple(of_row)

    def _pooled_rows(self, num_rows: int, errors: dict[int, str]) -> tuple[bytes, ...] | None:
        if self._pooled is None:
            return None
        of_row = [b""] * num_rows
        vectors = np.asarray(self._pooled.vectors).astype("<f4")
        for row, vector in zip(self._pooled.rows, vectors, strict=True):
            if row not in errors:
                of_row[row] = vector.tobytes()
        return tuple(of_row)


def _logprobs_to_host(logprobs: Logprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(
        chosen=to_host(logprobs.chosen),
        top=to_host(logprobs.top),
        top_ids=to_host(logprobs.top_ids),
    )
