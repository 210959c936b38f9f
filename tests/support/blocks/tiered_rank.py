"""An engine whose device holds few blocks, over real tiers, for tests."""

import threading

import torch

from router.protocol.values import Tier
from support.blocks.tier_stacks import level
from worker_agent.blocks.changes import BlockRemoved, BlockStored
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.reference.engine.batching import GenerationRequest
from worker_agent.reference.engine.cache import CacheLayout
from worker_agent.reference.engine.engine import (
    EngineConfig,
    ReferenceEngine,
    StepInput,
    cache_shape,
)
from worker_agent.reference.engine.model import Model, ModelConfig
from worker_agent.reference.engine.tiering import RankMemory
from worker_agent.tiers.level import StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.physical import physical

TEXT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom, " * 4)
MODEL = Model(ModelConfig(2, 64, 4, 2, 512, 0), torch.device("cpu"))
NUM_BLOCKS = 24
LAYOUT = cache_shape(MODEL.config, NUM_BLOCKS, 16).layout()
BLOCK_BYTES = LAYOUT.block_bytes
NAMING = Naming(bytes(16), "model")

ROWS = CacheLayout()


class TieredRank:
    """An engine whose device holds few blocks, over real tiers; `told`: what it published."""

    def __init__(self, *stores, layout=ROWS, timeout_s=60.0, first=Tier.HOST):
        levels = [level(Tier(tier), store) for tier, store in enumerate(stores, first)]
        self.stack = TierStack(levels, StackSettings(BLOCK_BYTES, batch_blocks=4))
        laid_out = physical("0").configured(LAYOUT).laid_out(layout.kind).allocated_on_host()
        self.pool = BlockPool(NUM_BLOCKS, LruEviction())
        memory = RankMemory(self.pool, laid_out, self.stack)
        config = EngineConfig(NUM_BLOCKS, 16, 64, 8, layout, timeout_s)
        self.engine = ReferenceEngine(MODEL, config, NAMING, memory)
        self.news = threading.Event()
        self.engine.on_change(self.news.set)
        self.told = {tier: set() for tier in Tier}
        self.cached_tokens = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.stack.close(60)
        self.pool.check_invariants()

    def step(self, **arrived):
        self.news.clear()
        output = self.engine.step(StepInput(**arrived))
        for each in output.tier_changes:
            self.note(each.tier, each.change)
        for change in output.changes:
            self.note(Tier.DEVICE, change)
        self.stack.check_invariants()
        return output

    def note(self, tier, change):
        match change:
            case BlockStored(name):
                self.told[tier].add(name.sequence_hash)
            case BlockRemoved(name):
                self.told[tier].remove(name.sequence_hash)
            case _:
                self.told[tier].clear()

    def run(self, prompt, max_tokens=8, request_id="x", **fields):
        """Tokens of a request; `cached_tokens` of its prompt."""
        tokens = []
        output = self.step(added=[GenerationRequest(request_id, prompt, max_tokens, **fields)])
        while True:
            for generated in output.generated:
                if generated.request_id != request_id:
                    continue
                tokens.append(generated.token)
                self.cached_tokens = generated.cached_tokens
                if generated.is_last:
                    return tokens
            if not output.has_work:
                self.wait(output)
            output = self.step()

    def wait(self, output):
        """As long as the engine is to be left alone."""
        if output.wait_s is None:
            assert self.news.wait(60)
        else:
            self.news.wait(output.wait_s)

    def settle(self):
        """Until everything that waits to be stored is."""
        while any(s.waiting_blocks or s.is_busy for s in self.stack.status()):
            self.news.wait(0.05)
            self.step()

    def fill(self):
        """Other prompts, until nothing else is on the device."""
        for number in range(2):
            self.run(TEXT[50 + number : 250 + number], cache_salt=str(number))
            self.settle()


def cold(prompt, max_tokens=8):
    config = EngineConfig(128, 16, 64, 8)
    engine, tokens = ReferenceEngine(MODEL, config, NAMING), []
    output = engine.step(StepInput(added=[GenerationRequest("x", prompt, max_tokens)]))
    while output.has_work or output.generated:
        tokens += [generated.token for generated in output.generated]
        output = engine.step(StepInput())
    return tokens
