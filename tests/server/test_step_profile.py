"""--profile-steps: what the table says of steps on a scripted clock."""

from __future__ import annotations

from array import array
from itertools import count

import pytest

from scheduler.types import Event, KVCapacity, StepPlan, StepResult, StepStats
from server.config import parse_settings
from server.step_profile import StepProfile, kind_of


class Fixed:
    """An engine whose steps take 8 ms, 2 of them after the last layer."""

    capacity = KVCapacity(8, 16, 4, 64)

    def submit(self, plan: StepPlan) -> Fixed:
        self._step = plan.step
        return self

    def result(self) -> StepResult:
        return StepResult(self._step, ((1,),), device_seconds=0.008, sample_seconds=0.002)


def plan(step: int) -> StepPlan:
    row = array("q", [0])
    return StepPlan(
        step=step, seq_ids=("a",), slots=row, starts=row, lengths=array("q", [1]), samples=b"\1",
        block_slots=array("q"), block_indices=array("q"), block_ids=array("q"), admissions=(),
    )  # fmt: skip


def stats(step: int, prefill: int, decode: int) -> StepStats:
    return StepStats(
        step, 1, 0, 8, 1, 0, num_prefill_tokens=prefill, num_decode_tokens=decode,
        plan_seconds=0.001, step_seconds=0.008,
    )  # fmt: skip


def profile_of(kinds: list[tuple[int, int]]) -> tuple[str, list[Event]]:
    ticks = count()
    profile = StepProfile(lambda: next(ticks) * 0.003, lambda: {"qkv": 0.004, "head": 0.0015})
    sent: list[Event] = []
    engine, emit = profile.engine(Fixed()), profile.emit(sent.extend)
    for step, (prefill, decode) in enumerate(kinds):
        engine.submit(plan(step)).result()
        emit([stats(step, prefill, decode)])
    return profile.table(), sent


def test_parts_of_a_step_add_up_and_events_pass() -> None:
    table, sent = profile_of([(0, 1), (0, 1)])
    assert [event.step for event in sent if isinstance(event, StepStats)] == [0, 1]
    words = {line.split()[0]: line for line in table.splitlines()[2:]}
    assert "decode, 1 row: 2 steps, 1.0 tokens, 12.000 ms" in table
    for part, milliseconds in (
        *(("planning", "1.000"), ("qkv", "4.000"), ("head", "1.500"), ("sampling", "0.500")),
        *(("rest", "2.000"), ("transport", "3.000")),
    ):
        assert milliseconds in words[part].split()


def test_kinds_of_steps_are_apart() -> None:
    table, _ = profile_of([(0, 1), (0, 16), (100, 0), (512, 0), (100, 3)])
    heads = [line.split(":")[0] for line in table.splitlines()[1:] if not line.startswith(" ")]
    assert heads == [
        *("decode, 1 row", "decode, 5-16 rows", "mixed"),
        *("prefill, above 128", "prefill, up to 128"),
    ]
    assert kind_of(stats(0, 0, 40)) == "decode, 33 rows or more"


@pytest.mark.parametrize(("argv", "wanted"), [([], False), (["--profile-steps"], True)])
def test_flag_reaches_the_core(argv: list[str], wanted: bool) -> None:
    assert parse_settings(argv, {}).engine.profile_steps is wanted
