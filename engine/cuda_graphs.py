"""Decode-shaped steps as CUDA graphs: buckets of rows, static inputs, padding, capture, replay.

Knows nothing of layers: `work` computes hidden states from static inputs, and everything else here
is about giving it the same addresses each time. A step that fits no bucket runs eagerly.

Capture records launches and runs none of them, so it needs no pause of the device. One bucket is
captured after each decode step that had to run eagerly, the largest first, on the thread that
submits: the server is ready before any, no other thread meets the allocator in a capture, and the
memory of all buckets (one shared pool) is taken early.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.triton import Columns, HostColumns, Space, TritonAttention
from engine.batch import Batch

log = logging.getLogger("paceline.engine")


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8, up to the first that holds max_rows (at most 256)."""
    limit = min(max_rows, 256)
    sizes = [1, 2, 4, *range(8, 257, 8)]
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < limit)


class Recorder(Protocol):
    """Turns work into something that repeats it on the same tensors."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What to call to repeat the work, and the tensor in which it leaves its result."""
        ...


class CudaRecorder:
    """CUDA graphs in one memory pool, which is safe since they run one after the other."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """`stream` is for captures alone; libraries keep a workspace for each that they meet."""
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would synchronise and empty the allocator's cache first.
        with _no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph.replay, result


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """It may free a graph or an event, by calls of the driver that end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """What a captured step of `num_rows` rows reads; views of buffers that all buckets share."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    kv_slots: Tensor  # [rows] int64, -1 = padding
    columns: dict[int | None, Columns]  # by window


Work = Callable[[StaticInputs], Tensor]  # -> hidden [rows, hidden]


class DecodeGraphs:
    """Steps in which every row has one token."""

    def __init__(
        self,
        work: Work,
        attention: TritonAttention,
        *,
        max_rows: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._work, self._attention, self._recorder = work, attention, recorder
        self._sizes = bucket_sizes(max_rows)
        self._pending = list(self._sizes)  # to be captured, the largest at the end
        self._captured: dict[int, tuple[Callable[[], None], Tensor, StaticInputs]] = {}
        self._device = device
        rows = self._sizes[-1]
        # Sequences that share most of the pool can need more; such a step runs eagerly.
        self._max_items = min(
            attention.max_split_items(rows, max_model_len),
            attention.max_split_items(1, num_blocks * block_size) + rows,
        )
        self._tokens = torch.zeros((3, rows), dtype=torch.int64, device=device)
        tables = rows * -(-max_model_len // block_size)
        columns_size = Space(rows, self._max_items, 0).bounds[3] + tables
        windows = dict.fromkeys(attention.windows)
        self._columns = {
            window: torch.zeros(columns_size, dtype=torch.int32, device=device)
            for window in windows
        }
        self._partials = attention.partials(self._max_items)

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def replay(self, batch: Batch) -> Tensor | None:
        """Hidden states [rows, hidden] of a decode-shaped batch; None if it has to run eagerly.

        They stay valid until the next replay.
        """
        num_rows = len(batch.lengths)
        size = next((size for size in self._sizes if size >= num_rows), None)
        captured = self._captured.get(size) if size is not None else None
        if captured is None or (batch.lengths != 1).any():
            return None
        run, hidden, inputs = captured
        if not self._fill(inputs, batch):
            return None
        run()
        return hidden[:num_rows]

    def capture_all(self) -> None:
        """Every bucket at once, for a trial of how much memory they take."""
        while self._pending:
            self.capture_next()

    def capture_next(self) -> None:
        """Capture one more bucket, if any is left. Call between steps.

        A capture that fails leaves the server on eager steps, which compute the same.
        """
        if not self._pending:
            return
        size = self._pending.pop()
        inputs = self._inputs(size)
        self._tokens[2].fill_(-1)
        for columns in inputs.columns.values():
            self._upload(columns, HostColumns.empty())
        try:
            # Padding only, computed once: kernels are compiled, libraries choose theirs.
            self._work(inputs)
            replay, hidden = self._recorder.record(lambda: self._work(inputs))
        except RuntimeError as error:
            log.warning("CUDA graphs are off, a capture of %d rows failed: %s", size, error)
            self._pending.clear()
            return
        self._captured[size] = (replay, hidden, inputs)

    def _inputs(self, size: int) -> StaticInputs:
        token_ids, positions, kv_slots = self._tokens[:, :size]
        space = Space(size, self._max_items, 0)
        columns = {
            window: Columns(buffer, space, self._partials)
            for window, buffer in self._columns.items()
        }
        return StaticInputs(token_ids, positions, kv_slots, columns)

    def _fill(self, inputs: StaticInputs, batch: Batch) -> bool:
        """Write the batch where the graph reads it; False if it does not fit."""
        host = {window: self._attention.host_columns(batch, window) for window in inputs.columns}
        if any(len(columns.split_items) > self._max_items for columns in host.values()):
            return False
        num_rows = len(batch.lengths)
        inputs.token_ids[:num_rows].copy_(batch.token_ids)
        inputs.positions[:num_rows].copy_(batch.positions)
        inputs.kv_slots[:num_rows].copy_(batch.kv_slots)
        inputs.kv_slots[num_rows:].fill_(-1)
        for window, columns in inputs.columns.items():
            self._upload(columns, host[window])
        return True

    def _upload(self, columns: Columns, host: HostColumns) -> None:
        packed = torch.from_numpy(host.packed(columns.space))
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        columns.buffer[: len(packed)].copy_(packed, non_blocking=True)
