"""Tenants share the engine by what each is served, whoever asks for more. Time is in steps."""

from __future__ import annotations

import random

import pytest

from scheduler.policy import Fair, Priority
from scheduler.types import FinishReason
from tests.simulation.ledger import CACHED, GENERATED, PROMPT
from tests.simulation.rig import Rig


def forever(_request_id: str, _tokens: tuple[int, ...]) -> int:
    return 1


def fair(**options: object) -> Rig:
    options.setdefault("policy", Fair())
    options.setdefault("model", forever)
    options.setdefault("num_blocks", 150)
    options.setdefault("block_size", 32)
    return Rig(**options)  # type: ignore[arg-type]


def flood(rig: Rig, tenant: str, count: int, *, prompt: int = 8, answer: int = 20) -> None:
    numbers = random.Random(tenant)
    for _ in range(count):
        rig.add([numbers.randrange(10_000) for _ in range(prompt)], answer, tenant=tenant)


def served(rig: Rig, tenant: str) -> float:
    """The cost of what it has got: prompts that entered, and tokens."""
    total = 0.0
    for answer in rig.answers.values():
        if answer.request.tenant == tenant and answer.first is not None:
            total += PROMPT * len(answer.request.prompt) + GENERATED * len(answer.token_ids)
    return total


def steps_to_first_token(rig: Rig, request_id: str) -> float:
    answer = rig.answers[request_id]
    assert answer.first is not None
    return answer.first.sampled_at - answer.request.arrival


@pytest.mark.parametrize("seed", range(6))
def test_a_lone_tenant_is_served_exactly_as_without_fairness(seed: int) -> None:
    """Arrivals out of order, priorities, groups, memory too small: the same plans."""
    plans = []
    for policy in (Priority(5.0), Fair(Priority(5.0))):
        numbers = random.Random(seed)
        rig = Rig(num_blocks=14, max_step_tokens=24, max_running=4, depth=seed % 2, policy=policy)
        for _ in range(40):
            if numbers.random() < 0.6:
                rig.add_group(
                    numbers.choice((1, 1, 1, 2)),
                    [numbers.randrange(3) for _ in range(numbers.randrange(1, 20))],
                    numbers.randrange(1, 12),
                    tenant="only",
                    priority=numbers.randrange(-2, 3),
                    arrival=rig.clock() - numbers.randrange(4),
                )
            rig.step()
        rig.run()
        plans.append([(plan.seq_ids, list(plan.starts), list(plan.lengths)) for plan in rig.plans])
    assert plans[0] == plans[1]


@pytest.mark.parametrize("depth", [0, 1])
def test_newcomer_is_served_at_once_beside_a_flood(depth: int) -> None:
    """The flood holds every slot with long answers, and waits with hundreds more."""
    rig = fair(max_running=8, depth=depth)
    flood(rig, "a", 300, answer=500)
    for _ in range(30):
        rig.step()
    newcomer = rig.add(range(8), 5, tenant="b")
    for _ in range(8):
        rig.step()
    assert steps_to_first_token(rig, newcomer.id) <= 2
    assert rig.answers[newcomer.id].finished is not None


def test_each_request_gives_way_once_and_a_tenant_keeps_one() -> None:
    """So what is computed again is bounded, however often newcomers come."""
    rig = fair(max_running=4)
    flood(rig, "a", 50, answer=300)
    for number in range(100):
        if number % 3 == 0:
            rig.add([number] * 8, 2, tenant="b")
        rig.step()
        running = [s.request.tenant for s in rig.scheduler.batch.running]
        assert "a" in running
    assert 0 < rig.num_preemptions <= 50
    preempted = [p.request_id for stats in rig.stats for p in stats.preempted]
    assert len(set(preempted)) == len(preempted)


def test_a_tenant_with_requests_in_the_batch_takes_no_place_of_another() -> None:
    rig = fair(max_running=4)
    flood(rig, "a", 10, answer=50)
    rig.step()
    flood(rig, "b", 10, answer=50)
    for _ in range(20):
        rig.step()
    assert rig.num_preemptions == 1


def test_only_request_of_a_tenant_gives_way_to_nobody() -> None:
    rig = fair(max_running=3)
    for name in "abc":
        rig.add([ord(name)] * 8, 40, tenant=name)
    rig.step()
    for name in "defgh":
        rig.add([ord(name)] * 8, 10, tenant=name)
    rig.run()
    assert rig.num_preemptions == 0


@pytest.mark.parametrize("weights", [(), (("a", 3.0),)])
def test_difference_of_two_backlogged_tenants_is_bounded_by_one_request(
    weights: tuple[tuple[str, float], ...],
) -> None:
    """One sends short prompts, the other long answers; one slot, so one request at a time."""
    rig = fair(max_running=1, weights=weights)
    flood(rig, "a", 50, prompt=30, answer=3)
    flood(rig, "b", 20, prompt=4, answer=40)
    largest = max(30 * PROMPT + 3 * GENERATED, 4 * PROMPT + 40 * GENERATED)
    weight = dict(weights)
    for _ in range(250):
        rig.step()
        assert len(rig.scheduler.line.num_waiting()) == 2
        gap = served(rig, "a") / weight.get("a", 1.0) - served(rig, "b")
        assert abs(gap) <= largest
    assert served(rig, "a") > 3 * largest


def test_weights_divide_the_work_of_a_full_batch() -> None:
    rig = fair(max_running=8, weights=(("a", 3.0),))
    flood(rig, "a", 100)
    flood(rig, "b", 60)
    for _ in range(200):
        rig.step()
    assert served(rig, "a") / served(rig, "b") == pytest.approx(3.0, rel=0.15)


def test_leaving_out_max_tokens_costs_nothing() -> None:
    """What counts is what was generated: both answer in ten tokens."""

    def ten(_request_id: str, tokens: tuple[int, ...]) -> int:
        return 7 if len(tokens) % 20 == 17 else 1

    rig = fair(max_running=4, model=ten)
    for _ in range(60):
        for tenant, most in (("a", 1000), ("b", 10)):
            rig.add([1] * 8, most, tenant=tenant, stop_token_ids=(7,), cache_namespace=b"x")
    for _ in range(150):
        rig.step()
    assert rig.reasons()[FinishReason.STOP] > 50
    assert served(rig, "a") == pytest.approx(served(rig, "b"), rel=0.1)


def gains_once_b_asks(rig: Rig, num_requests: int, *, num_steps: int) -> tuple[float, float]:
    """What tenants a and b are served from when b asks for more."""
    before = served(rig, "a"), served(rig, "b")
    flood(rig, "b", num_requests)
    for _ in range(num_steps):
        rig.step()
    return served(rig, "a") - before[0], served(rig, "b") - before[1]


@pytest.mark.parametrize("answer", [5, 900])
def test_who_does_not_ask_saves_nothing_up(answer: int) -> None:
    """Neither an idle tenant, nor one whose only request runs on while another takes the rest."""
    rig = fair(max_running=4)
    flood(rig, "b", 1, answer=answer)
    flood(rig, "a", 80)
    for _ in range(150):
        rig.step()
    of_a, of_b = gains_once_b_asks(rig, 40, num_steps=150)
    assert of_b == pytest.approx(of_a, rel=0.15)


def test_who_is_set_back_has_no_claim_from_the_time_in_which_it_did_not_wait() -> None:
    """A lone request ran on while another tenant took the rest; then memory was short."""
    rig = fair(max_running=8, num_blocks=600)
    flood(rig, "b", 1, answer=1500)
    flood(rig, "a", 150, answer=100)
    for _ in range(500):
        rig.step()
    rig.memory = 1
    rig.step()
    rig.memory = 1000
    assert not rig.scheduler.batch.running
    of_a, of_b = gains_once_b_asks(rig, 60, num_steps=300)
    assert of_b == pytest.approx(of_a, rel=0.25)


@pytest.mark.parametrize("num_shared", [0, 60])
def test_nobody_gives_way_in_vain(num_shared: int) -> None:
    """The newcomer would need what must stay free for those who run, or what they share."""
    rig = fair(num_blocks=100, block_size=4, watermark_blocks=10)
    for number in range(3):
        own = [1000 + number] * ((200 if number == 0 else 80) - num_shared)
        rig.add([*range(num_shared), *own], 60, tenant="a")
        rig.step()
    need = 180 if not num_shared else 240
    rig.add([7] * need, 4, tenant="b")
    for _ in range(8):
        rig.step()
    assert rig.num_preemptions == 0
    assert len(rig.scheduler.batch.running) == 3
    rig.run()


def test_priority_moves_only_requests_of_its_own_tenant() -> None:
    rig = fair(max_running=1)
    flood(rig, "a", 20, answer=5)
    rig.step()
    other = rig.add([5] * 8, 5, tenant="b", priority=100)
    urgent = rig.add([6] * 8, 5, tenant="a", priority=-100)
    rig.run()
    first = {r.id: rig.answers[r.id].first for r in (other, urgent)}
    assert all(first.values())
    assert first[other.id].scheduled_at < first[urgent.id].scheduled_at + 12  # type: ignore[union-attr]
    others = [a.first.scheduled_at for a in rig.answers.values() if a.request.tenant == "a"]  # type: ignore[union-attr]
    assert sorted(others).index(first[urgent.id].scheduled_at) == 1  # type: ignore[union-attr]


def test_nobody_of_many_tenants_waits_for_ever() -> None:
    """More tenants than slots, one of them without measure, all asking again and again."""
    rig = fair(max_running=4)
    flood(rig, "flood", 100, answer=30)
    waits = []
    asked = {}
    for _ in range(200):
        for number in range(8):
            tenant = f"t{number}"
            last = asked.get(tenant)
            if last is None or rig.answers[last].finished is not None:
                asked[tenant] = rig.add([number] * 8, 10, tenant=tenant).id
        rig.step()
    for answer in rig.answers.values():
        if answer.request.tenant != "flood" and answer.first is not None:
            waits.append(answer.first.sampled_at - answer.request.arrival)
    assert len(waits) > 40
    assert max(waits) <= 60.0
    assert served(rig, "flood") > 0


def test_cached_prompts_are_cheaper() -> None:
    rig = fair(max_running=1, block_size=4)
    rig.add([1] * 41, 1, tenant="a")
    rig.step()
    rig.add([1] * 41, 2, tenant="a")
    rig.add([2] * 41, 2, tenant="b")
    rig.step()
    (a, b) = rig.scheduler.line.lanes
    assert a.name == "a"
    assert a.served == CACHED * 40 + PROMPT + GENERATED
    assert b.served == 0.0
    rig.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_tenants_under_pressure_of_memory_all_finish(depth: int) -> None:
    rig = fair(num_blocks=30, max_running=6, depth=depth, prefix_caching=False, block_size=4)
    for number in range(30):
        rig.add([number] * 8, 30, tenant="abc"[number % 3])
    rig.run(max_steps=1500)
    assert rig.reasons() == {FinishReason.LENGTH: 30}
    assert rig.num_preemptions > 0
