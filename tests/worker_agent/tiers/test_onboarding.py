"""Blocks on their way up, in any order: the leading ones that came, and the end of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.tiers.onboarding import Load, Loading

BLOCKS = 12
ENDS = {"late": Load.LATE, "cancel": Load.CANCELLED}
fates = st.lists(st.sampled_from(["came", "lost", "pending"]), min_size=BLOCKS, max_size=BLOCKS)


def loading(*, is_whole=False):
    identities = [number.to_bytes(16, "little") for number in range(BLOCKS)]
    return Loading(identities, torch.empty(BLOCKS, 1), 1.0, is_whole=is_whole)


@given(fates, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([*ENDS]))
def test_leading_blocks_count_in_any_order_of_arrival(fates, rng, is_whole, ending):
    it = loading(is_whole=is_whole)
    came = set()
    for place in rng.sample(range(BLOCKS), BLOCKS):
        before, was_done = it.loaded, it.is_done
        match fates[place]:
            case "came" if it.wants(place):
                came.add(place)
                it.came(place, 1)
            case "lost":
                it.lost(place)
        assert it.loaded >= before
        assert not was_done or (it.is_done and it.loaded == before)
    is_pending = not it.is_done
    getattr(it, ending)()
    leading = next((place for place in range(BLOCKS) if place not in came), BLOCKS)
    assert it.is_done
    assert it.loaded == leading
    assert it.usable_blocks == (0 if is_whole and leading < BLOCKS else leading)
    assert it.outcomes[:leading] == [Load.LOADED] * leading
    assert Load.WAITING not in it.outcomes
    assert Load.LOADED not in it.outcomes[leading:]
    assert not is_pending or ENDS[ending] in it.outcomes[leading:]


def test_first_lost_block_ends_the_load():
    it = loading()
    it.came(4, 4)
    it.lost(8)
    it.lost(2)
    assert not it.is_done
    it.came(0, 2)
    assert (it.is_done, it.loaded, it.outcomes[2]) == (True, 2, Load.LOST)
    assert set(it.outcomes[3:8]) == {Load.CANCELLED}
    it.came(3, 9)
    assert it.loaded == 2
