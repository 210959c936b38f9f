"""The map under pressure: crowded, growing, and forgetting."""

from random import Random

import pytest

from router.protocol.values import Tier
from router.runtime.kernels import reserved_memory
from support.engines.engines import Edge, batch, engine_hash, names, placeholder, removed, stored

INVERSE = pow(0x9E3779B97F4A7C15, -1, 2**64)
TOKENS = list(range(64))


def crowded_hash(random):
    """A hash whose home is one of a few slots, the last and the first among them."""
    home = random.choice([0, 1, 2, 1021, 1022, 1023])
    return (home << 54 | random.getrandbits(54)) * INVERSE % 2**64


class Tree:
    """Prompts of two blocks, over and over, and how often each block is on the device."""

    def __init__(self, random):
        self.names, self.copies = {}, {}
        self.pairs = []
        for first in range(60):
            pair = crowded_hash(random), crowded_hash(random)
            tokens = [first, *TOKENS[:7]]
            self.pairs.append((pair, tokens))
            self.names.update(zip(pair, names(tokens), strict=True))
        self.copies = dict.fromkeys(self.names, 0)

    def held(self):
        return {self.names[h] for h, count in self.copies.items() if count}


@pytest.mark.parametrize("seed", range(2))
def test_crowded_slots_are_searched_filled_and_closed_up(seed):
    random = Random(seed)
    tree, edge = Tree(random), Edge(num_gpu_blocks=random.choice([1, 4, 20]))
    for _ in range(300):
        if random.random() < 0.5:
            pair, tokens = random.choice(tree.pairs)
            edge.feed(stored(pair, tokens))
            for each in pair:
                tree.copies[each] += 1
        held = [h for h, count in tree.copies.items() for _ in range(count)]
        gone = random.sample(held, random.randint(0, len(held)))
        edge.feed(removed(gone))
        for each in gone:
            tree.copies[each] -= 1
        assert edge.held() == tree.held()
    assert edge.counts.unknown_removed == edge.counts.refused_events == 0


def test_grows_and_finds_everything_again():
    random, edge = Random(1), Edge()
    hashes = [random.getrandbits(64) for _ in range(5_000)]
    for start in range(0, 5_000, 500):
        part = hashes[start : start + 500]
        tokens = [start, *range(1, 2_000)]
        edge.normalizer.apply(batch(stored(part, tokens)), 0.0)
    edge.feed()
    assert len(edge.held()) == 5_000
    edge.feed(removed(hashes[:4_990]), placeholder(hashes[:100]))
    assert (len(edge.held()), len(edge.held(Tier.HOST))) == (10, 100)


def test_one_event_may_be_larger_than_all_before():
    edge = Edge().feed(stored(range(1, 3_001), range(12_000)))
    assert len(edge.held()) == 3_000


def test_hashes_may_be_anything():
    edge = Edge().feed(stored([0, 2**64 - 1, -5, b"x" * 32], TOKENS[:16]))
    assert edge.held() == set(names(TOKENS[:16]))
    edge.feed(stored([7], TOKENS[16:20], engine_hash(b"x" * 32)), removed([0, -1, -5]))
    assert edge.held() == set(names(TOKENS[:20])[3:])


def test_parents_may_be_0():
    edge = Edge().feed(stored([0], TOKENS[:4]), stored([1], TOKENS[4:8], 0))
    assert edge.held() == set(names(TOKENS[:8]))


def test_grows_slot_by_slot_while_blocks_come_and_go(monkeypatch):
    monkeypatch.setattr(reserved_memory, "LARGE_BYTES", 1 << 13)
    monkeypatch.setattr(reserved_memory, "PART_BYTES", 5 * 4096)
    random, edge, held, moving = Random(0), Edge(), {}, 0
    for number in range(150):
        hashes = [random.getrandbits(64) for _ in range(16)]
        tokens = [number] * 64
        edge.feed(stored(hashes, tokens))
        held |= zip(hashes, names(tokens), strict=True)
        gone = random.sample(sorted(held), len(held) // 4)
        edge.feed(removed(gone))
        for each in gone:
            del held[each]
        moving += edge.normalizer.map.slots.former is not None
        if number % 25 == 0:
            assert edge.held() == set(held.values())
            edge.normalizer.check_invariants()
    assert edge.held() == set(held.values())
    assert moving >= 3
    assert edge.counts.unknown_removed == edge.counts.refused_events == 0


def test_crowded_slots_grow_around_their_end(monkeypatch):
    monkeypatch.setattr(reserved_memory, "LARGE_BYTES", 1 << 13)
    monkeypatch.setattr(reserved_memory, "PART_BYTES", 5 * 4096)
    random, edge, held, moving = Random(0), Edge(), {}, 0
    for number in range(80):
        hashes = [crowded_hash(random) for _ in range(12)]
        tokens = [number] * 48
        edge.feed(stored(hashes, tokens))
        held |= zip(hashes, names(tokens), strict=True)
        gone = random.sample(sorted(held), 2)
        edge.feed(removed(gone))
        for each in gone:
            del held[each]
        if edge.normalizer.map.slots.former is not None:
            edge.normalizer.check_invariants()
            moving += 1
    assert edge.held() == set(held.values())
    assert moving
    edge.feed(removed(list(held)))
    assert not edge.held()
    edge.normalizer.check_invariants()
    assert edge.counts.unknown_removed == edge.counts.refused_events == 0
