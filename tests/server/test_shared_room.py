"""One room for several tenants: bounded, and nobody loses by who holds less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.shared_room import SharedRoom

PUTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 60), st.integers(1, 9)),
    max_size=60,
)


def held(room: SharedRoom[str, int], now: float) -> dict[tuple[str, str], int]:
    keys = [(tenant, str(name)) for tenant in "abc" for name in range(10)]
    found = {key: room.get(key, now) for key in keys}
    return {key: size for key, size in found.items() if size is not None}


def bytes_of(things: dict[tuple[str, str], int], tenant: str) -> int:
    return sum(size for (who, _), size in things.items() if who == tenant)


@given(PUTS)
def test_the_room_is_never_full_and_only_who_holds_more_gives_up(
    puts: list[tuple[str, int, int, int]],
) -> None:
    room: SharedRoom[str, int] = SharedRoom(100)
    for now, (tenant, name, size, seconds) in enumerate(puts):
        before = held(room, now)
        room.put((tenant, str(name)), size, size=size, until=now + seconds, now=now)
        after = held(room, now)
        assert room.num_bytes <= 100
        assert room.num_bytes == sum(after.values())
        for other in set("abc") - {tenant}:
            lost = bytes_of(before, other) - bytes_of(after, other)
            assert not lost or bytes_of(before, other) > bytes_of(after, tenant) >= size
        if (tenant, str(name)) not in after:
            rest = {key: kept for key, kept in before.items() if key != (tenant, str(name))}
            assert after == rest, "what is not kept costs nobody anything"
            assert any(bytes_of(before, other) for other in set("abc") - {tenant})


def test_a_flood_of_one_tenant_leaves_the_others_what_they_have() -> None:
    room: SharedRoom[str, int] = SharedRoom(100)
    for name in range(4):
        room.put(("calm", str(name)), name, size=10, until=9, now=0)
    for name in range(1000):
        room.put(("flood", str(name)), name, size=10, until=9, now=0)
    assert [room.get(("calm", str(name)), 1) for name in range(4)] == [0, 1, 2, 3]
    assert [room.get(("flood", str(name)), 1) for name in range(993, 1000)] == [
        None,
        *range(994, 1000),
    ]
    # A newcomer gets its part from who has most, one thing at a time.
    for name in range(2):
        room.put(("new", str(name)), name, size=10, until=9, now=0)
    assert [room.get(("new", str(name)), 1) for name in range(2)] == [0, 1]
    assert [room.get(("calm", str(name)), 1) for name in range(4)] == [0, 1, 2, 3]


def test_of_one_tenant_the_least_used_goes_first_and_nothing_outlives_its_time() -> None:
    room: SharedRoom[str, int] = SharedRoom(30)
    for name in range(3):
        room.put(("a", str(name)), name, size=10, until=5, now=0)
    room.use(("a", "0"))
    room.put(("a", "3"), 3, size=10, until=9, now=1)
    assert [room.get(("a", str(name)), 2) for name in range(4)] == [0, None, 2, 3]
    assert [room.get(("a", str(name)), 5) for name in range(4)] == [None, None, None, 3]
    assert room.num_bytes == 10
    room.put(("a", "4"), 4, size=31, until=9, now=5)
    assert room.get(("a", "4"), 5) is None
    assert room.get(("a", "3"), 5) == 3
    room.expire(9)
    assert room.num_bytes == 0
    assert not room.drop(("a", "3"))
