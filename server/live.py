"""The feed of the console: what happened since the last tick, a few times a second.

Nothing is computed, and the core is asked nothing, while nobody watches. Knows no HTTP: it hands
out objects. Steps are columns, since there may be hundreds in a tick.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from scheduler.types import KVMap, StepStats
from server.config import ServerConfig
from server.core_client import CoreClient, CoreState
from server.errors import Overloaded, retry_headers
from server.recorder import Recorder
from server.timeline_json import summary

Json = dict[str, Any]

TICK_SECONDS = 0.2
HISTORY_SECONDS = 60.0
MAX_VIEWERS = 16
MAX_STEPS = 512
MAX_ROWS = 64
# The map of a larger pool shows every second, third, ... block.
MAX_CELLS = 8192
OTHERS = "another key's request"  # in place of the id of one that is not to be seen


class LiveFeed:
    """One a server; each viewer has its own ticks, and they share the newest map."""

    def __init__(self, core: CoreClient, recorder: Recorder, config: ServerConfig) -> None:
        self._core = core
        self._recorder = recorder
        self._config = config
        self._num_viewers = 0
        self._kv_map: KVMap | None = None
        self._asked_at = 0.0

    def take_kv_map(self, kv_map: KVMap) -> None:
        self._kv_map = kv_map

    async def ticks(self, *, with_map: bool, sees: str | None) -> AsyncIterator[Json]:
        """The past minute first, then what is new. Raises Overloaded if too many watch.

        `sees` is the tenant whose requests are shown, None all; steps are everybody's.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(
                "Too many consoles watch this server.",
                code="too_many_viewers",
                headers=retry_headers(5.0),
            )
        self._num_viewers += 1
        recorder = self._recorder
        since = recorder.now() - HISTORY_SECONDS
        seen = max(0, recorder.num_finished - len(recorder.finished))
        try:
            while not (self._core.state is CoreState.DRAINING and self._core.num_open == 0):
                if with_map:
                    self._ask_for_map()
                now = recorder.now()
                yield self._tick(since, now, seen, with_map, sees)
                since, seen = now, recorder.num_finished
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self._num_viewers -= 1
            if self._num_viewers == 0:
                self._kv_map = None

    def _ask_for_map(self) -> None:
        now = self._recorder.now()
        if now - self._asked_at > TICK_SECONDS / 2:
            self._asked_at = now
            self._core.inspect()

    def _tick(self, since: float, now: float, seen: int, with_map: bool, sees: str | None) -> Json:
        recorder, info = self._recorder, self._core.info
        steps = recorder.steps_between(since, now)
        num_new = min(recorder.num_finished - seen, len(recorder.finished))
        newest = islice(reversed(recorder.finished), num_new)
        ended = [timeline for timeline in newest if sees in (None, timeline.tenant)]
        live = recorder.running(sees)
        return {
            "now_ms": round(now * 1e3, 1),
            "time": time.time(),
            "state": self._core.state.value,
            "model": info.model_name if info else "",
            "device": f"{info.device}, {info.kernels} kernels" if info else "",
            "num_blocks": info.capacity.num_blocks if info else 0,
            "block_size": info.capacity.block_size if info else 0,
            "max_running": info.limits.max_running if info else 0,
            "ttft_limit_ms": self._config.ttft_limit_seconds * 1e3,
            "tpot_limit_ms": self._config.tpot_limit_seconds * 1e3,
            "open": self._core.num_open,
            "unfinished": self._core.num_unfinished,
            "steps": [_columns(step) for step in steps[-MAX_STEPS:] if step.ended_at > since],
            "requests": [summary(t, now) for t in live[:MAX_ROWS]],
            "num_requests": len(live),
            "finished": [summary(timeline, now) for timeline in reversed(ended[:MAX_ROWS])],
            "latencies": [[t.ttft_seconds, t.tpot_seconds] for t in reversed(ended)],
            "kv": self._cells(self._kv_map, sees) if with_map and self._kv_map else None,
        }

    def _cells(self, kv_map: KVMap, sees: str | None) -> Json:
        """`cells` is base64 of little-endian uint16, one for each `stride` blocks."""
        blocks = memoryview(kv_map.blocks).cast("H")
        stride = -(-len(blocks) // MAX_CELLS)
        cells = kv_map.blocks if stride == 1 else blocks[::stride].tobytes()
        return {
            "owners": [
                owner if self._recorder.may_see(sees, owner) else OTHERS for owner in kv_map.owners
            ],
            "cells": base64.b64encode(cells).decode(),
            "stride": stride,
        }


def _columns(step: StepStats) -> list[float]:
    return [
        step.step,
        round(step.ended_at * 1e3, 2),
        round(step.step_seconds * 1e3, 3),
        round(step.plan_seconds * 1e3, 3),
        step.num_prefill_tokens,
        step.num_decode_tokens,
        step.num_running,
        step.num_waiting,
        step.num_blocks_used,
        step.num_blocks_cached,
        len(step.preempted),
    ]
