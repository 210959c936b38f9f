"""What an engine holds, from all the events of its life: copies counted in a dict, nothing else."""

from collections import Counter

from router.sequence.hashing.block_hashes import (
    chain_hash,
    hash_seed,
    local_block_hash,
    token_array,
)


def held_sequence_hashes(events):
    """Sequence hashes of what is held after these events (maps, as vLLM sends them)."""
    copies, names, seeds = Counter(), {}, {}
    for event in events:
        match event["type"]:
            case "BlockStored":
                _name(event, names, seeds)
                copies.update(event["block_hashes"])
            case "BlockRemoved":
                copies.subtract(event["block_hashes"])
            case "AllBlocksCleared":
                copies.clear()
    return {names[block] for block, count in copies.items() if count > 0}


def _name(event, names, seeds):
    """A salt comes with a prompt's first block; the others have it from their parents."""
    parent, size = event["parent_block_hash"], event["block_size"]
    salts = (event["extra_keys"] or [None])[0]
    seed = hash_seed(None, salts and salts[0]) if parent is None else seeds[parent]
    for i, block in enumerate(event["block_hashes"]):
        tokens = token_array(event["token_ids"][i * size : (i + 1) * size])
        parent_name = None if parent is None else names[parent]
        names[block] = chain_hash(parent_name, local_block_hash(tokens, seed))
        seeds[block] = seed
        parent = block
