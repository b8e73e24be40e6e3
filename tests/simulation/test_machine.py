"""Random commands at depths 0 and 1 on tiny pools: every invariant, and the answers of a solo run.

DESIGN's first pillar. `tests.simulation.seeded_bugs` shows that it would notice.
"""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.simulation.machine import EXAMPLES, SchedulerMachine, machine_settings


def test_random_commands_keep_every_invariant_and_every_answer() -> None:
    """Cases B092, B094, B100, B101, B104, B107, B109 and their kin, at random."""
    run_state_machine_as_test(SchedulerMachine, settings=machine_settings(int(120 * EXAMPLES)))
