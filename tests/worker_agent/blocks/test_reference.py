"""Dynamo's rules of blocks: that each has tests, and the slots' table row by row.

`worker_agent/blocks/README.md` is the list.
"""

import re
from pathlib import Path

import pytest

from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import Duplicates

ROOT = Path(__file__).parents[3]
LIST = (ROOT / "worker_agent/blocks/README.md").read_text().partition("rule by rule")[2]
RULES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in LIST.splitlines()
    if line.startswith("| ") and not line.startswith("| rule |")
]
NAMES = [BlockName(number.to_bytes(16, "little"), number) for number in range(4)]


def test_every_rule_has_tests_and_they_exist():
    assert len(RULES) > 25
    for rule, _, tests in RULES:
        named = re.findall(r"`((?:\w+/)*test_\w+)::(\w+)`", tests)
        assert named or tests == "—", rule
        for file, test in named:
            source = (ROOT / "tests/worker_agent" / f"{file}.py").read_text()
            assert re.search(rf"def {test}\(", source), (file, test)


def allocated(tier):
    return tier.pool.allocate(1)[0]


def registered(tier, number=0):
    [block] = tier.pool.register([allocated(tier)], [NAMES[number]])
    return block


def inactive(tier):
    block = registered(tier)
    tier.pool.release([block])
    return block


def duplicate(tier):
    registered(tier)
    return registered(tier)


def dropped(block_of):
    def drop(tier):
        block = block_of(tier)
        tier.pool.release([block])
        return block

    return drop


def rejected(tier):
    registered(tier)
    block = allocated(tier)
    [primary] = tier.pool.register([block], [NAMES[0]])
    assert primary != block
    return block


def forgotten(tier):
    block = registered(tier)
    tier.pool.forget([NAMES[0].identity])
    tier.pool.release([block])
    return block


def matched(tier):
    block = inactive(tier)
    assert tier.pool.match([NAMES[0].identity]) == [block]
    return block


def upgraded(tier):
    with tier.allocate(1).register([NAMES[0]]) as blocks:
        [block] = blocks.block_ids
        weak = blocks.weak()
    with weak.upgrade() as strong:
        assert strong.block_ids == (block,)
        tier.pool.use_again([block])
    return block


def evicted(tier):
    block = inactive(tier)
    others = tier.pool.allocate(2)
    assert block in others
    return block


ROWS = {
    "Reset, allocate: Mutable": (allocated, "private"),
    "Mutable, drop: Reset": (dropped(allocated), "free"),
    "Mutable, register, new: Primary": (registered, "shared"),
    "Mutable, register, known, allowed: Duplicate": (duplicate, "nameless"),
    "Mutable, register, known, rejected: Reset": (rejected, "free"),
    "Primary, last drop: Inactive": (dropped(registered), "unused"),
    "Primary, last drop, reset on release: Reset": (forgotten, "free"),
    "Duplicate, drop: Reset": (dropped(duplicate), "free"),
    "Inactive, match: Primary": (matched, "shared"),
    "Inactive, upgrade of a weak handle: Primary": (upgraded, "shared"),
    "Inactive, eviction: Mutable": (evicted, "private"),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_slot_table_holds(row):
    brought, expected = ROWS[row]
    is_kept = Duplicates.REJECTED if "rejected" in row else Duplicates.KEPT
    tier = Tier(BlockPool(2, LruEviction(), is_kept))
    block = brought(tier)
    assert tier.pool.state(block) == expected
    tier.pool.check_invariants()
