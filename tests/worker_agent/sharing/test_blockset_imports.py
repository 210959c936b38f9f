"""Announced blocksets, taken again and again."""

import pytest
from msgspec import json

from router.protocol.values import Rank
from support.blocks.sharing_process import config_of, shared
from worker_agent.manager.manager import KvBlockManager
from worker_agent.sharing.blockset_imports import BlocksetImports

OURS, THEIRS = Rank(1338, 0), Rank(1337, 0)


@pytest.fixture
def now_s():
    return [0.0]


@pytest.fixture
def sides(now_s):
    """Our sharing, and what another worker announces."""
    with KvBlockManager(config_of(1338)) as ours, KvBlockManager(config_of(1337)) as theirs:
        here, there = shared(ours, clock=lambda: now_s[0]), shared(theirs)
        yield here, json.decode(there.export_local_blockset())
        here.close(60)
        there.close(60)


class Same:
    """Equal to anything, and of no use for anything else."""

    __hash__ = None

    def __eq__(self, _):
        return True


def test_an_unchanged_blockset_is_renewed_without_decoding_it(sides, now_s):
    here, blockset = sides
    imports = BlocksetImports({OURS: here})
    assert imports.take(THEIRS, blockset) is None
    now_s[0] = 50.0
    assert imports.take(THEIRS, {**blockset, "epoch": Same()}) is None
    now_s[0] = 100.0
    assert here.addresses_of(THEIRS)
    imports.renew()
    now_s[0] = 150.0
    assert here.addresses_of(THEIRS)
    now_s[0] = 170.0
    assert not here.addresses_of(THEIRS)


def test_what_is_not_announced_any_more_is_not_renewed(sides):
    here, blockset = sides
    imports = BlocksetImports({OURS: here})
    imports.take(THEIRS, blockset)
    imports.keep(set())
    imports.renew()
    assert not here.addresses_of(THEIRS)
    assert imports.take(THEIRS, blockset) is None
    assert here.addresses_of(THEIRS)


def test_an_unchanged_blockset_is_imported_by_a_rank_that_was_added(sides):
    here, blockset = sides
    ranks = {}
    imports = BlocksetImports(ranks)
    imports.take(THEIRS, blockset)
    ranks[OURS] = here
    assert imports.take(THEIRS, blockset) is None
    assert here.addresses_of(THEIRS)
