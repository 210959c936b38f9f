"""Blocks of full attention that are larger than the blocks in which a model's blocks are counted.

Groups of a hybrid model may have blocks of different sizes. The identity's block size divides all
of them, and a larger block of full attention is stored as the units that it consists of. The engine
names its last unit; the others get hashes derived from that.
"""

import numpy as np
from msgspec.structs import replace

from router.protocol.values import U64_MAX, HashArray
from router.publisher.engine_events.batch import EngineStored
from router.publisher.engine_events.extra_keys import EventKeys, read_extra_keys

_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_STEP = 0xA0761D6478BD642F


def unit_hashes(hashes: HashArray, units: int) -> HashArray:
    """Return the hashes of all units of blocks, in order; the last of each is the block's own."""
    out = np.empty((len(hashes), units), np.uint64)
    for unit in range(units - 1):
        out[:, unit] = hashes * _SPREAD + np.uint64((unit + 1) * _STEP % (U64_MAX + 1))
    out[:, -1] = hashes
    return out.ravel()


def divided(event: EngineStored, unit_tokens: int) -> EngineStored | None:
    """Return a stored event with its blocks divided into units.

    Returns None if units do not fill its blocks, or if its blocks contain more than tokens, as the
    unit that contains an object is not known.
    """
    units, rest = divmod(event.block_size, unit_tokens)
    if rest or units < 2 or event.is_eagle or event.local_hashes is not None:
        return None
    keys = None
    if event.extra_keys is not None:
        read = EventKeys(event.lora_name, event.cache_salt)
        blocks, is_root = len(event.block_hashes), event.parent is None
        if read_extra_keys(event.extra_keys, read, blocks, is_root=is_root).blocks:
            return None
        keys = tuple(each for each in event.extra_keys for _ in range(units))
    hashes = unit_hashes(event.block_hashes, units)
    return replace(event, block_hashes=hashes, block_size=unit_tokens, extra_keys=keys)
