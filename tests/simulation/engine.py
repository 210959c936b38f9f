"""An engine's cache: physical blocks, some with the same content, evicted in the order of use.

What it holds is the truth that everything else is measured by: the set of (tier, sequence hash) of
which at least one copy exists, and the time at which it last changed.
"""

from collections import Counter, OrderedDict

from msgspec import Struct

from router.protocol.values import Tier


class BlockStored(Struct, frozen=True):
    """Copies of consecutive blocks were made in a tier; `node.parent` of the first says where."""

    tier: Tier
    nodes: list


class BlockRemoved(Struct, frozen=True):
    """Copies of blocks are gone."""

    tier: Tier
    nodes: list


class CacheCleared(Struct, frozen=True):
    """Everything is gone; `tier`: from that tier alone."""

    tier: Tier | None


class _Pool:
    """Blocks of one tier, least recently used first. Slots are numbered and never used again."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.slots = OrderedDict()
        self.copies = Counter()
        self._next_slot = 0

    def add(self, node):
        self.slots[self._next_slot] = node
        self._next_slot += 1
        self.copies[node] += 1

    def touch(self, node):
        slot = next(s for s, each in self.slots.items() if each is node)
        self.slots.move_to_end(slot)

    def evict(self, keep):
        """The least recently used block that is not in `keep`; None if there is none."""
        slot = next((s for s, node in self.slots.items() if node not in keep), None)
        if slot is None:
            return None
        node = self.slots.pop(slot)
        self.copies[node] -= 1
        if not self.copies[node]:
            del self.copies[node]
        return node


class EngineModel:
    """One rank's cache. Commands change it and return what an engine would say, copy by copy.

    `clears`: the tiers that it clears at times; None: all of them.
    """

    def __init__(self, random, corpus, device_blocks, host_blocks, clears):
        self._random = random
        self._clears = clears
        self._corpus = corpus
        self._pools = {Tier.DEVICE: _Pool(device_blocks), Tier.HOST: _Pool(host_blocks)}

    def held(self):
        """The truth."""
        return frozenset(
            (int(tier), node.sequence_hash)
            for tier, pool in self._pools.items()
            for node in pool.copies
        )

    def step(self):
        """Serve a prompt, or rarely do something else to the cache."""
        chance = self._random.random()
        if chance < 0.02:
            return self.clear(self._random.choice(self._clears))
        if chance < 0.2 and self._pools[Tier.HOST].blocks:
            return self._offload()
        if chance < 0.35:
            return self._evict_some()
        return self._serve(self._random.choice(self._corpus.prompts))

    def clear(self, tier):
        for each in Tier if tier is None else (tier,):
            if each in self._pools:
                self._pools[each] = _Pool(self._pools[each].blocks)
        return [CacheCleared(tier)]

    def _serve(self, prompt):
        prompt = prompt[: self._random.randint(1, len(prompt))]
        pool = self._pools[Tier.DEVICE]
        cached = 0
        while cached < len(prompt) and pool.copies.get(prompt[cached]):
            pool.touch(prompt[cached])
            cached += 1
        # Two requests that compute the same block at the same time make two copies of it.
        start = (
            max(cached - self._random.randint(1, 3), 0) if self._random.random() < 0.2 else cached
        )
        return self._store(Tier.DEVICE, prompt[start:])

    def _store(self, tier, nodes):
        pool, keep = self._pools[tier], frozenset(nodes)
        removed, stored = [], []
        for node in nodes:
            if len(pool.slots) >= pool.blocks:
                evicted = pool.evict(keep)
                if evicted is None:
                    break
                removed.append(evicted)
            pool.add(node)
            stored.append(node)
        changes = (BlockRemoved(tier, removed), BlockStored(tier, stored))
        return [change for change in changes if change.nodes]

    def _evict_some(self):
        pool = self._pools[Tier.DEVICE]
        evicted = [pool.evict(()) for _ in range(min(len(pool.slots), self._random.randint(1, 6)))]
        return [BlockRemoved(Tier.DEVICE, evicted)] if evicted else []

    def _offload(self):
        """Copy some device blocks to the host, with or without dropping them afterwards."""
        device = list(dict.fromkeys(self._pools[Tier.DEVICE].slots.values()))
        chosen = [n for n in device if self._random.random() < 0.3]
        host = self._pools[Tier.HOST]
        changes = []
        for node in chosen:
            if node not in host.copies:
                changes += self._store(Tier.HOST, [node])
        return changes


class SetChanges:
    """What a set-keeping engine says of the same changes: a block's first copy and its last."""

    def __init__(self):
        self._copies = Counter()

    def of(self, change):
        """The nodes that this change makes held, or held no longer, in its tier."""
        match change:
            case BlockStored(tier, nodes):
                return [node for node in nodes if self._add(tier, node) == 1]
            case BlockRemoved(tier, nodes):
                return [node for node in nodes if self._drop(tier, node) == 0]
            case CacheCleared(tier):
                for key in [k for k in self._copies if tier in (None, k[0])]:
                    del self._copies[key]
                return []

    def _add(self, tier, node):
        self._copies[tier, node] += 1
        return self._copies[tier, node]

    def _drop(self, tier, node):
        self._copies[tier, node] -= 1
        return self._copies[tier, node]
