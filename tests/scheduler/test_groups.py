"""n > 1: the requests of one Submit share their prompt's KV and compute it once."""

from __future__ import annotations

import random

import pytest

from scheduler.types import FinishReason
from tests.simulation.rig import Rig, next_token


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_prompt_is_computed_once(length: int, prefix_caching: bool, depth: int) -> None:
    """B109, B121: siblings compute no more of the prompt than its last token."""
    rig = Rig(block_size=8, max_step_tokens=6, depth=depth, prefix_caching=prefix_caching)
    group = rig.add_group(4, range(length), 5)
    rig.run()
    counts = sorted(rig.num_computed(r.id) - 4 for r in group)
    assert counts == [1, 1, 1, length]
    answers = {tuple(rig.answers[r.id].token_ids) for r in group}
    assert len(answers) == 4


def test_partial_block_is_copied_and_full_ones_are_shared() -> None:
    rig = Rig(block_size=4)
    leader, *siblings = rig.add_group(3, range(10), 9)
    rig.step()
    plan = rig.step()
    assert plan is not None
    tables = [rig.scheduler.sequences[r.id].block_ids for r in (leader, *siblings)]
    assert plan.copies == tuple((tables[0][2], table[2]) for table in tables[1:])
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    refs = rig.scheduler.batch.pool.refs
    assert [refs[block] for block in tables[0]] == [3, 3, 1]


def test_last_token_at_the_start_of_a_block_needs_no_copy() -> None:
    rig = Rig(block_size=4)
    rig.add_group(2, range(9), 2)
    rig.run()
    assert all(not plan.copies for plan in rig.plans)


@pytest.mark.parametrize("when", [0, 1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_group_survives_the_abort_of_its_leader(when: int, prefix_caching: bool) -> None:
    rig = Rig(block_size=4, max_step_tokens=8, prefix_caching=prefix_caching)
    group = rig.add_group(3, range(20), 4)
    for _ in range(when):
        rig.step()
    rig.abort(group[0].id)
    rig.run()
    assert rig.reasons() == {FinishReason.ABORT: 1, FinishReason.LENGTH: 2}


def test_group_under_pressure_keeps_every_answer() -> None:
    """B109: two of four children are preempted; the rig compares each answer with a solo run."""
    rig = Rig(num_blocks=14, block_size=2, prefix_caching=False)
    group = rig.add_group(4, range(8), 10)
    rig.run()
    preempted = [r for r in group if rig.answers[r.id].finished.num_preemptions]  # type: ignore[union-attr]
    assert len(preempted) >= 2


def test_groups_that_hang_up_leave_nothing_behind() -> None:
    """B109: one child stops early, then the rest is aborted; many times."""
    rig = Rig(num_blocks=40, block_size=2)
    for i in range(100):
        group = rig.add_group(4, [i % 7, 1, 2], 12, stop_token_ids=(0, 1, 2))
        for _ in range(50):
            rig.step()
            if any(rig.answers[r.id].finished for r in group):
                break
        rig.abort(*[r.id for r in group])
        rig.run()
    assert rig.scheduler.sequences == {}


def test_group_larger_than_the_batch_goes_through_in_turns() -> None:
    rig = Rig(max_running=2, block_size=4)
    group = rig.add_group(7, range(10), 3)
    rig.run()
    assert sum(rig.num_computed(r.id) for r in group) <= 7 * 2 + 10 * 1 + 6 * 10
    assert rig.reasons() == {FinishReason.LENGTH: 7}


def test_first_of_a_group_equals_the_request_alone() -> None:
    """B082: the token stream depends on the request, not on its siblings."""
    for n in (1, 2):
        rig = Rig(model=lambda _, tokens: next_token("seed", tokens))
        group = rig.add_group(n, range(6), 8)
        rig.run()
        assert len({tuple(rig.answers[r.id].token_ids) for r in group}) == 1
        if n == 1:
            expected = rig.answers[group[0].id].token_ids
        assert rig.answers[group[0].id].token_ids == expected


def test_soak_of_everything_leaves_no_block_behind() -> None:
    """B100: lengths around block borders, too long ones, aborts, n > 1; idle now and then."""
    draw = random.Random(100)
    for depth in (0, 1):
        rig = Rig(num_blocks=24, block_size=4, max_step_tokens=20, depth=depth, max_waiting=40)
        for _ in range(20):
            for _ in range(30):
                length = draw.choice((3, 4, 5, 7, 8, 9, 15, 16, 17, 95, 96, 200))
                rig.add_group(
                    draw.choice((1, 1, 2, 4)), [draw.randrange(3)] * length, draw.randrange(9)
                )
                if draw.random() < 0.5:
                    rig.step()
                if rig.scheduler.sequences and draw.random() < 0.3:
                    rig.abort(draw.choice(list(rig.scheduler.sequences)))
            rig.run()
            assert rig.scheduler.sequences == {}
