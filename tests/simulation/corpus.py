"""The prompts of every run: families that share prefixes, some under a salt. Made once, the same
for all seeds.
"""

from random import Random

from router.sequence.hashing.block_hashes import (
    chain_hash,
    hash_seed,
    local_block_hash,
    token_array,
)

BLOCK_SIZE = 4
SALTS = (None, None, "tenant-a")
_FAMILIES = 4
_DEPTH = 12


class Node:
    """A block in its context: what a prompt has at one place. `number` names it in this corpus."""

    __slots__ = ("number", "parent", "salt", "sequence_hash", "tokens")

    def __init__(self, number, parent, salt, tokens):
        self.number = number
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        above = None if parent is None else parent.sequence_hash
        local_hash = local_block_hash(token_array(tokens), hash_seed(cache_salt=salt))
        self.sequence_hash = chain_hash(above, local_hash)


class Corpus:
    """`prompts`: paths of nodes from a first block, in prefix order."""

    def __init__(self):
        self._random = Random(7)
        self._count = 0
        self.prompts = []
        for family in range(_FAMILIES):
            self._grow([], SALTS[family % len(SALTS)])

    def _grow(self, path, salt):
        """A stem, and two ways to go on, until deep enough."""
        for _ in range(self._random.randint(2, 4)):
            tokens = [self._random.randrange(1, 50_000) for _ in range(BLOCK_SIZE)]
            path = [*path, Node(self._count, path[-1] if path else None, salt, tokens)]
            self._count += 1
        if len(path) >= _DEPTH:
            self.prompts.append(path)
            return
        for _ in range(2):
            self._grow(path, salt)
