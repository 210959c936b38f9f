"""An exact, slow model of what a normaliser knows: dicts, and every name computed from its root."""

from collections import Counter

from router.protocol.values import Doubt, Tier
from router.sequence.hashing.block_hashes import (
    chain_hash,
    hash_seed,
    local_block_hash,
    token_array,
)

FULL_GROUPS = (0, 2)


class Block:
    """A block as the engine knows it."""

    def __init__(self, engine_hash, tokens, parent, lora_name, cache_salt):
        self.engine_hash, self.tokens, self.parent = engine_hash, tokens, parent
        self.lora_name, self.cache_salt = lora_name, cache_salt
        local = local_block_hash(token_array(tokens), hash_seed(lora_name, cache_salt))
        self.name = chain_hash(parent and parent.name, local)


class EngineModel:
    """Copies of (group, block) per tier as published, and which of them can be named."""

    def __init__(self, *, held_back_blocks, held_back_s, settings):
        self.settings = settings
        self.held_back_blocks, self.held_back_s = held_back_blocks, held_back_s
        self.begin()

    def begin(self):
        self.copies = {tier: Counter() for tier in Tier}
        self.groups = {tier: set() for tier in Tier}
        self.named = set()
        self.waiting = []
        self.doubts = 0
        self.may_have_lower_tiers = bool(self.settings.has_lower_tiers)

    def known(self, key):
        return key in self.named or any(self.copies[tier][key] for tier in Tier)

    def count(self, tier, key):
        if self.settings.report_mode == "new" or not self.copies[tier][key]:
            self.copies[tier][key] += 1
        else:
            self.doubts |= Doubt.UNCOUNTED

    def store(self, group, blocks, tier, now_s):
        self.may_have_lower_tiers |= bool(tier)
        self.groups[tier].add(group)
        for block in blocks:
            self.count(tier, (group, block))
        parent = blocks[0].parent
        if parent is None or (group, parent) in self.named:
            self.name(group, blocks)
        else:
            self.waiting.append((group, blocks, now_s + self.held_back_s))
            while sum(len(waiting[1]) for waiting in self.waiting) > self.held_back_blocks:
                self.waiting.pop(0)

    def name(self, group, blocks):
        self.named.update((group, block) for block in blocks)
        for waiting in list(self.waiting):
            if waiting in self.waiting and waiting[0] == group and waiting[1][0].parent in blocks:
                self.waiting.remove(waiting)
                self.name(group, waiting[1])

    def place(self, group, blocks, tier):
        self.may_have_lower_tiers |= bool(tier)
        self.groups[tier].add(group)
        for block in blocks:
            self.count(tier, (group, block))

    def remove(self, group, blocks, tier):
        for block in blocks:
            if self.copies[tier][group, block]:
                self.copies[tier][group, block] -= 1

    def clear(self):
        is_complete = self.settings.clears_lower_tiers or not self.may_have_lower_tiers
        for tier in Tier if is_complete else (Tier.DEVICE,):
            self.copies[tier].clear()
        if is_complete:
            self.waiting.clear()
            self.doubts &= Doubt.HYBRID
        elif self.lower_copies():
            self.doubts |= Doubt.LOWER_TIERS
        else:
            self.doubts &= ~Doubt.COPIES

    def lower_copies(self):
        return sum(self.copies[tier].total() for tier in Tier if tier)

    def end_batch(self, now_s):
        self.waiting = [waiting for waiting in self.waiting if waiting[2] > now_s]
        if self.copies[Tier.DEVICE].total() > (self.settings.num_gpu_blocks or 10**9):
            self.doubts |= Doubt.COPIES
        if not self.lower_copies():
            self.doubts &= ~Doubt.LOWER_TIERS

    def orphans(self):
        keys = {key for tier in Tier for key, count in self.copies[tier].items() if count}
        return keys - self.named

    def held(self, tier):
        """A hit needs a block of each group that stores blocks in the tier."""
        keys = [key for key, count in self.copies[tier].items() if count and key in self.named]
        by_group = [
            {block.name for group, block in keys if group == each} for each in self.groups[tier]
        ]
        return set.intersection(*by_group) if by_group else set()

    def received_doubts(self):
        return self.doubts | (Doubt.ORPHANS if self.orphans() else 0)
