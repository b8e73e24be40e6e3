"""The KV budget of a GPU, by a trial step in a scripted memory."""

from __future__ import annotations

import pytest

from engine.cuda_memory import plan_memory

BLOCK = 1000


class ScriptedMemory:
    """A device of 100,000 bytes; the trial takes its pool and `step` bytes more, and frees them."""

    def __init__(self, *, weights: int, others: int, step: int, graphs: int = 0) -> None:
        self.weights, self.others, self.step, self.graphs = weights, others, step, graphs
        self.peak = 99_999  # of before; not to be read
        self.trials: list[int] = []

    def total(self) -> int:
        return 100_000

    def used_by_others(self) -> int:
        return self.others

    def reserved(self) -> int:
        return self.weights

    def peak_reserved(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.weights

    def trial(self, num_blocks: int) -> int:
        self.trials.append(num_blocks)
        self.peak = self.weights + (num_blocks + 1) * BLOCK + self.step
        return self.others + self.graphs


def test_what_weights_step_and_others_leave_is_blocks_to_the_last_one() -> None:
    memory = ScriptedMemory(weights=40_000, others=5_500, step=12_000)
    plan = plan_memory(memory.trial, memory, trial_blocks=8, block_bytes=BLOCK)
    assert memory.trials == [8]
    assert plan.step == 12_000
    used = 40_000 + 5_500 + 12_000 + (plan.num_blocks + 1) * BLOCK
    assert 100_000 - BLOCK < used <= 100_000
    assert "41 blocks" in plan.describe()
    assert "+ 500 bytes" in plan.describe()


def test_what_the_driver_keeps_for_graphs_is_no_room_for_blocks() -> None:
    """It is beside the allocator's memory, and gone when the trial is over: it comes again."""
    memory = ScriptedMemory(weights=40_000, others=5_500, step=12_000, graphs=3_000)
    plan = plan_memory(memory.trial, memory, trial_blocks=8, block_bytes=BLOCK)
    assert plan.others == 8_500
    used = 40_000 + 8_500 + 12_000 + (plan.num_blocks + 1) * BLOCK
    assert 100_000 - BLOCK < used <= 100_000


def test_a_pool_without_a_block_is_refused_with_the_numbers() -> None:
    memory = ScriptedMemory(weights=90_000, others=0, step=9_000)
    with pytest.raises(ValueError, match="weights 90000, the largest step 9000"):
        plan_memory(memory.trial, memory, trial_blocks=1, block_bytes=BLOCK)


def test_a_pool_comes_in_whole_units_of_the_device() -> None:
    """The trial's pool was rounded up, and so will the engine's be: neither may be forgotten."""
    granule = 4096
    memory = ScriptedMemory(weights=8192, others=4096, step=12288)

    def trial(num_blocks: int) -> int:
        pool = -(-(num_blocks + 1) * BLOCK // granule) * granule
        memory.peak = memory.weights + pool + memory.step
        return memory.others

    plan = plan_memory(trial, memory, trial_blocks=9, block_bytes=BLOCK, granule=granule)
    assert plan.step == 12288
    room = 100_000 - 4096 - 8192 - 12288
    taken = -(-(plan.num_blocks + 1) * BLOCK // granule) * granule
    assert taken <= room < taken + granule + BLOCK
