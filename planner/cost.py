"""What a step costs: models from a plan's columns to seconds.

Owns the arithmetic of step time, either a line through four numbers or measured kernel tables. It
must not know why the plan is as it is.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from scheduler.types import StepPlan

Cost = Callable[[StepPlan], float]


class ProfileError(ValueError):
    """A kernel table is missing or lacks what the model needs; the message says which."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds = step + prefill x prompt tokens + decode x rows + context x KV positions read.

    Good enough where a step is bound by memory; the four numbers can be read off a server's own
    step histogram at two or three loads.
    """

    step: float
    prefill: float
    decode: float
    context: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        num_decodes = sum(1 for length in plan.lengths if length == 1)
        num_prefill = sum(plan.lengths) - num_decodes
        # A chunk reads its keys in tiles shared by its queries, so once a row, not once a query.
        num_read = sum(plan.starts) + sum(plan.lengths)
        return (
            self.step
            + self.prefill * num_prefill
            + self.decode * num_decodes
            + self.context * num_read
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear through measured points, extended by its last slope."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Curve:
        if len(points) < 2:
            raise ProfileError("a curve needs two points or more")
        xs = sorted(points)
        return cls(tuple(map(float, xs)), tuple(points[x] for x in xs))

    def __call__(self, x: float) -> float:
        if x <= self.x[0]:
            return self.y[0]
        high = min(bisect_right(self.x, x), len(self.x) - 1)
        low = high - 1
        share = (x - self.x[low]) / (self.x[high] - self.x[low])
        return self.y[low] + share * (self.y[high] - self.y[low])


@dataclass(frozen=True, slots=True)
class Surface:
    """Curves over the second coordinate, joined linearly over the first."""

    at: tuple[int, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def through(cls, points: Mapping[tuple[int, int], float]) -> Surface:
        by_first: dict[int, dict[int, float]] = defaultdict(dict)
        for (first, second), value in points.items():
            by_first[first][second] = value
        at = tuple(sorted(key for key, line in by_first.items() if len(line) > 1))
        if len(at) < 2:
            raise ProfileError("an attention table needs two sizes or more")
        return cls(at, tuple(Curve.through(by_first[first]) for first in at))

    def __call__(self, first: float, second: float) -> float:
        high = min(max(bisect_right(self.at, first), 1), len(self.at) - 1)
        low = high - 1
        below, above = self.curves[low](second), self.curves[high](second)
        share = (first - self.at[low]) / (self.at[high] - self.at[low])
        return max(0.0, below + max(share, 0.0) * (above - below))


class ProfiledCost:
    """A decoder's step from measured kernels: per layer by tokens, attention by its two shapes.

    Files `<prefix>_{dense,attention,per_sequence}.csv.gz` with times in microseconds: dense kernels
    of one layer by tokens in the step, attention by (chunk, KV before it) and (rows, mean KV),
    lm_head and sampler by sampling rows. `host_seconds` is what a step costs besides.
    """

    # Each kernel runs once a layer, but for these.
    _TWICE = ("layernorm",)
    _ONCE_A_STEP = ("embedding", "final_layernorm")

    def __init__(self, prefix: Path, *, num_layers: int, host_seconds: float = 0.0) -> None:
        dense: dict[str, dict[int, float]] = defaultdict(dict)
        for name, size, seconds in _rows(prefix, "dense", partial(_by_size, "tokens")):
            dense[name][size] = seconds
        tail: dict[str, dict[int, float]] = defaultdict(dict)
        for name, size, seconds in _rows(prefix, "per_sequence", partial(_by_size, "sequences")):
            tail[name][size] = seconds
        prefill: dict[tuple[int, int], float] = {}
        decode: dict[tuple[int, int], float] = {}
        for chunk, kv_prefill, rows, kv_decode, seconds in _rows(prefix, "attention", _by_shape):
            if rows == 0:
                prefill[chunk, kv_prefill] = seconds
            elif chunk == 0:
                decode[rows, kv_decode] = seconds
        times = {name: 2 if name in self._TWICE else 1 for name in dense}
        self._layer = [
            (times[name], Curve.through(points))
            for name, points in dense.items()
            if name not in self._ONCE_A_STEP
        ]
        self._step = [Curve.through(dense[name]) for name in self._ONCE_A_STEP if name in dense]
        self._tail = [Curve.through(points) for points in tail.values()]
        self._prefill, self._decode = Surface.through(prefill), Surface.through(decode)
        self._num_layers = num_layers
        self._host_seconds = host_seconds

    def __call__(self, plan: StepPlan) -> float:
        num_tokens = sum(plan.lengths)
        layer = sum(times * curve(num_tokens) for times, curve in self._layer)
        layer += self._attention(plan.starts, plan.lengths)
        step = sum(curve(num_tokens) for curve in self._step)
        num_samples = sum(plan.samples)
        if num_samples:
            step += sum(curve(num_samples) for curve in self._tail)
        return self._num_layers * layer + step + self._host_seconds

    def _attention(self, starts: Sequence[int], lengths: Sequence[int]) -> float:
        contexts = [start for start, length in zip(starts, lengths, strict=True) if length == 1]
        seconds = sum(
            self._prefill(length, start)
            for start, length in zip(starts, lengths, strict=True)
            if length > 1
        )
        if contexts:
            seconds += self._decode(len(contexts), sum(contexts) / len(contexts))
        return seconds


def _seconds(row: dict[str, str]) -> float:
    return float(row["time_us"]) * 1e-6


def _by_size(size: str, row: dict[str, str]) -> tuple[str, int, float]:
    return row["layer"], int(row[size]), _seconds(row)


def _by_shape(row: dict[str, str]) -> tuple[int, int, int, int, float]:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    chunk, kv_prefill, rows, kv_decode = (int(row[name]) for name in names)
    return chunk, kv_prefill, rows, kv_decode, _seconds(row)


T = TypeVar("T")


def _rows(prefix: Path, kind: str, read: Callable[[dict[str, str]], T]) -> Iterator[T]:
    """Each row as `read` makes it. Raises ProfileError that names file and line."""
    path = prefix.with_name(f"{prefix.name}_{kind}.csv.gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise ProfileError(f"no kernel table {path}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, row in enumerate(rows, start=2):
        try:
            yield read(row)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise ProfileError(f"{path}:{number}: {reason}") from None
