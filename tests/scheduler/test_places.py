"""Places in the queue: a lone tenant may have them all, one of several may not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.limits import SchedulerLimits
from scheduler.places import Places, Refusal, most_places
from scheduler.types import FinishReason
from tests.simulation.rig import Rig


def places(total: int, num_tenants: int = 1, weights: tuple[tuple[str, float], ...] = ()) -> Places:
    limits = SchedulerLimits(64, total - 1, 1, 0, num_tenants=num_tenants, weights=weights)
    return Places(limits)


def fill(of: Places, tenant: str) -> int:
    """How many places it gets, one by one."""
    count = 0
    while of.refusal(tenant, 1) is None:
        of.take(tenant, 1)
        count += 1
    return count


def test_lone_tenant_takes_every_place() -> None:
    one = places(80)
    assert fill(one, "") == 80
    assert one.refusal("", 1) is Refusal.FULL


def test_one_of_several_leaves_an_eighth_to_those_who_hold_less() -> None:
    several = places(80, num_tenants=3)
    assert fill(several, "a") == 70
    assert several.refusal("a", 1) is Refusal.SHARE
    assert fill(several, "b") == 10
    assert several.refusal("c", 1) is Refusal.FULL
    assert several.refusal("a", 1) is Refusal.SHARE
    several.give_back("a")
    assert several.refusal("a", 1) is Refusal.SHARE
    assert several.refusal("c", 1) is None


def test_most_that_one_may_ask_for_is_given_on_an_idle_server() -> None:
    """More is refused for good at the door, not again and again."""
    for num_tenants in (1, 2, 9):
        limits = SchedulerLimits(64, 33, 4, 0, num_tenants=num_tenants)
        most = most_places(limits)
        assert Places(limits).refusal("a", most) is None
        assert num_tenants == 1 or Places(limits).refusal("a", most + 1) is Refusal.SHARE


def test_share_goes_by_weight() -> None:
    several = places(80, num_tenants=2, weights=(("a", 3.0),))
    assert fill(several, "a") == 70
    several = places(80, num_tenants=2, weights=(("a", 3.0),))
    assert fill(several, "b") == 70
    assert fill(several, "a") == 10


def test_two_tenants_share_evenly_once_the_flood_drains() -> None:
    """Whatever ends is taken by the one that holds less, until both hold half."""
    several = places(80, num_tenants=2)
    fill(several, "a")
    for _ in range(200):
        fill(several, "b")
        fill(several, "a")
        several.give_back("a" if several.num_taken_by("a") > 40 else "b")
    assert abs(several.num_taken_by("a") - several.num_taken_by("b")) <= 2


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=40),
    st.lists(st.sampled_from("abc"), max_size=60),
)
def test_who_counts_more_refuses_what_the_other_refuses(
    asked: list[tuple[str, int]], ended: list[str]
) -> None:
    """The door hears of ends later than the core, so it counts more and refuses first."""
    door, core = (places(24, num_tenants=3, weights=(("a", 2.0),)) for _ in range(2))
    for tenant, count in asked:
        if door.refusal(tenant, count) is None:
            assert core.refusal(tenant, count) is None
            door.take(tenant, count)
            core.take(tenant, count)
        if ended and core.num_taken_by(ended[-1]):
            core.give_back(ended.pop())


def test_scheduler_refuses_the_flood_and_takes_the_other() -> None:
    rig = Rig(max_running=1, max_waiting=15, num_tenants=2)
    for number in range(40):
        rig.add([number] * 4, 3, tenant="a")
    refused = [a.finished for a in rig.answers.values() if a.finished is not None]
    assert len(refused) == 26
    assert {finished.message for finished in refused} == {Refusal.SHARE.value}
    other = rig.add([1] * 4, 3, tenant="b")
    rig.run()
    finished = rig.answers[other.id].finished
    assert finished is not None
    assert finished.reason is FinishReason.LENGTH
