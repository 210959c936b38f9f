"""The map under pressure: crowded, growing, and forgetting."""

from random import Random

import pytest

from engines import Edge, batch, engine_hash, names, placeholder, removed, stored
from router.protocol.values import Tier
from router.publisher import engine_map

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
    assert edge.normalizer._names.map.memory_bytes <= 5_000 * 48
    edge.feed(removed(hashes[:4_990]), placeholder(hashes[:100]))
    assert (len(edge.held()), len(edge.held(Tier.HOST))) == (10, 100)


def test_a_map_of_a_known_pool_does_not_grow_before_it_is_full():
    edge = Edge(num_gpu_blocks=4_000)
    rows = edge.normalizer._names.map._rows
    edge.feed(stored(range(1, 4_001), range(16_000)))
    assert edge.normalizer._names.map._rows is rows
    edge.feed(removed(range(1, 4_001)), stored(range(5_001, 9_001), range(16_000, 32_000)))
    assert edge.held() == set(names(range(16_000, 32_000)))


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


@pytest.mark.parametrize("seed", range(2))
def test_room_is_prepared_while_a_map_fills(seed, monkeypatch):
    monkeypatch.setattr(engine_map, "_LARGE_ROWS", 1)
    monkeypatch.setattr(engine_map, "_AHEAD_ROWS", 64)
    random, edge, held, moves = Random(seed), Edge(), {}, 0
    for first in range(0, 6_000, 16):
        rows = edge.normalizer.map
        if rows.is_room_short:
            rows.move_into(rows.prepared())
            assert not rows.is_room_short
            moves += 1
        hashes, tokens = list(range(first + 1, first + 17)), [first] * 64
        edge.feed(stored(hashes, tokens))
        held |= zip(hashes, names(tokens), strict=True)
        gone = random.sample(sorted(held), len(held) // 4)
        edge.feed(removed(gone))
        for each in gone:
            del held[each]
        assert edge.held() == set(held.values())
    assert moves > 4
    assert edge.counts.unknown_removed == edge.counts.refused_events == 0
