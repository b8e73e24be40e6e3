"""How prompts share a step."""

from __future__ import annotations

from tests.simulation.rig import Rig


def test_short_prompts_do_not_wait_for_a_very_long_one() -> None:
    """B110: 200 chunks, and 20 short requests while they last."""

    def run(num_short: int) -> tuple[float, list[float]]:
        rig = Rig(num_blocks=2000, block_size=16, max_step_tokens=64, max_running=32)
        long = rig.add([i % 100 for i in range(64 * 200)], 1)
        short = []
        for i in range(num_short):
            for _ in range(5):
                rig.step()
            short.append(rig.add([i] * 24, 4))
        rig.run()
        finished = rig.answers[long.id].finished
        assert finished is not None
        firsts = [rig.answers[r.id].first for r in short]
        waits = [f.sampled_at - r.arrival for f, r in zip(firsts, short, strict=True) if f]
        assert len(waits) == num_short
        return finished.finished_at, waits

    alone, _ = run(0)
    beside, waits = run(20)
    assert alone == 200.0
    assert beside <= 1.2 * alone
    assert max(waits) <= 2.0


def test_budget_that_nobody_else_wants_goes_to_the_first_in_line() -> None:
    rig = Rig(num_blocks=256, block_size=4, max_step_tokens=100)
    long = rig.add([1] * 500, 1)
    rig.add([2] * 10, 1)
    plan = rig.step()
    assert plan is not None
    assert plan.seq_ids[0] == long.id
    assert list(plan.lengths) == [90, 10]


def test_decodes_come_before_prompts() -> None:
    rig = Rig(num_blocks=256, block_size=4, max_step_tokens=16)
    decoding = [rig.add([i], 50) for i in range(3)]
    rig.step()
    long = rig.add([1] * 200, 1)
    for _ in range(10):
        plan = rig.step()
        assert plan is not None
        assert plan.seq_ids == (*[r.id for r in decoding], long.id)
        assert sum(plan.lengths) == 16
