"""BlockPool and KeyChain by themselves."""

from __future__ import annotations

import pytest

from scheduler.block_pool import BlockPool
from scheduler.prefix import BlockKey, KeyChain


def keys(*token_ids: int, namespace: bytes = b"") -> list[BlockKey]:
    """Keys of blocks of one token."""
    found: list[BlockKey] = []
    KeyChain(1).extend(found, namespace, token_ids, len(token_ids))
    return found


def cached(pool: BlockPool, *token_ids: int) -> list[int]:
    """A table of published blocks that nobody holds any more."""
    blocks = pool.take(len(token_ids))
    for block, key in zip(blocks, keys(*token_ids), strict=True):
        assert pool.publish(block, key)
    pool.release(blocks)
    return blocks


def test_taken_blocks_come_back_when_released() -> None:
    pool = BlockPool(4)
    blocks = pool.take(4)
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.num_available == 0
    pool.release(blocks)
    assert pool.num_available == 4
    assert pool.num_referenced == 0


def test_taking_more_than_there_is_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="more blocks"):
        pool.take(3)
    assert pool.num_available == 2


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_shared_block_stays_until_its_last_table_lets_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_available == 1


def test_published_block_is_found_and_revived_after_release() -> None:
    pool = BlockPool(2)
    (block,) = cached(pool, 7)
    assert pool.find(keys(7)[0]) == block
    assert pool.num_cached == 1
    pool.share([block])
    assert pool.num_cached == 0
    assert pool.refs[block] == 1


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    (block,) = cached(pool, 7)
    assert pool.take(1) != [block]
    assert pool.find(keys(7)[0]) == block
    assert pool.take(1) == [block]
    assert pool.find(keys(7)[0]) is None


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    first, second, third = cached(pool, 1, 2, 3)
    assert pool.take(3) == [third, second, first]


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(2)
    (old,) = cached(pool, 1)
    (new,) = cached(pool, 2)
    pool.share([old])
    pool.release([old])
    assert pool.take(1) == [new]


def test_second_block_of_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    key = keys(5)[0]
    assert pool.publish(first, key)
    assert pool.publish(second, key)
    assert pool.find(key) == first
    pool.release([first, second])
    assert pool.num_cached == 1
    assert pool.free_blocks() == (second,)


def test_unpublished_block_keeps_its_tables_and_loses_its_finders() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, keys(5)[0])
    pool.unpublish(block)
    pool.unpublish(block)
    assert pool.find(keys(5)[0]) is None
    assert pool.refs[block] == 1
    pool.release([block])
    assert pool.num_cached == 0


def test_clear_forgets_every_prefix_and_keeps_every_table() -> None:
    pool = BlockPool(4)
    cached(pool, 1, 2)
    held = pool.take(1)
    pool.publish(held[0], keys(9)[0])
    pool.clear()
    assert pool.num_cached == 0
    assert pool.num_available == 3
    assert all(pool.find(key) is None for key in (*keys(1, 2), *keys(9)))


def test_equal_hash_of_other_tokens_is_not_found() -> None:
    """B103: the ids are compared, not only the hash."""
    pool = BlockPool(2)
    (block,) = pool.take(1)
    mine = BlockKey(b"same", b"parent", b"12")
    assert pool.publish(block, mine)
    for other in (BlockKey(b"same", b"parent", b"13"), BlockKey(b"same", b"other", b"12")):
        assert pool.find(other) is None
    (second,) = pool.take(1)
    assert not pool.publish(second, BlockKey(b"same", b"parent", b"13"))
    assert pool.find(mine) == block


def test_key_depends_on_all_tokens_before_and_on_the_namespace() -> None:
    """B103: parent and namespace are part of the key."""
    assert keys(1, 2)[1] == keys(1, 2)[1]
    assert keys(1, 2)[1] != keys(3, 2)[1]
    assert keys(1)[0] != keys(1, namespace=b"other")[0]


def test_namespace_cannot_pose_as_a_prefix() -> None:
    """B152: a namespace made of a parent's hash and tokens is still another root."""
    first, second = keys(1, 2)
    forged = second.parent + (2).to_bytes(4, "little")
    assert first.digest == second.parent
    assert keys(3, namespace=forged)[0].parent != second.digest
    assert keys(3, namespace=b"\x01" + forged)[0].parent != second.digest
