from router.simulator.block_cache import BlockCache


def cached(cache, hashes, nameless=0):
    """A request computes these blocks, uses them, and is over."""
    matched = cache.matching(hashes, len(hashes))
    assert cache.take(hashes[:matched], len(hashes) - matched + nameless)
    cache.name(hashes[matched:])
    cache.release(hashes, nameless)
    cache.check_invariants()


def test_least_recently_used_prompts_go_first_from_their_ends():
    cache = BlockCache(6)
    cached(cache, [1, 2, 3])
    cached(cache, [7, 8, 9])
    cached(cache, [1, 2])
    assert cache.take([], 3)
    assert cache.take_evicted() == [3, 9, 8]
    assert cache.take_evicted() == []
    assert cache.matching([1, 2, 3], 3) == 2
    assert cache.matching([7, 8], 2) == 1


def test_blocks_in_use_are_never_evicted():
    cache = BlockCache(4)
    cached(cache, [1, 2])
    assert cache.take([1, 2], 1)
    assert not cache.take([], 2)
    assert cache.take([], 1)
    assert cache.take_evicted() == []
    cache.check_invariants()


def test_a_second_copy_is_let_go():
    """Two requests compute the same blocks side by side."""
    cache = BlockCache(10)
    assert cache.take([], 3)
    assert cache.take([], 3)
    cache.name([1, 2, 3])
    cache.name([1, 2, 3])
    assert cache.used_blocks == 3
    cache.release([1, 2, 3], 0)
    assert cache.used_blocks == 3
    cache.release([1, 2, 3], 0)
    assert cache.used_blocks == 0
    cache.check_invariants()
    assert cache.matching([1, 2, 3], 2) == 2
