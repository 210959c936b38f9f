"""Both halves of the connector for vLLM over real tiers, without vLLM.

Objects of its shape stand for its own.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from worker_agent.connector.slots.block_groups import BlockGroup
from worker_agent.connector.vllm_parts.engine import EngineGeometry
from worker_agent.connector.vllm_parts.scheduler_side import SchedulerSide
from worker_agent.connector.vllm_parts.settings import connector_settings
from worker_agent.connector.vllm_parts.worker_side import WorkerSide

BLOCK_SIZE, NUM_BLOCKS = 4, 16
FACTS = EngineGeometry(model="tiny", groups=(BlockGroup(BLOCK_SIZE),), num_blocks=NUM_BLOCKS)
WINDOW = BlockGroup(BLOCK_SIZE, 6, b"window")
HYBRID = EngineGeometry(
    model="tiny", groups=(WINDOW, BlockGroup(BLOCK_SIZE, None, b"full")), num_blocks=NUM_BLOCKS
)
SETTINGS = connector_settings({"host_cache_blocks": 32, "onboard_always": True})


@dataclass
class Request:
    """As vLLM's has it."""

    request_id: str
    prompt_token_ids: list
    lora_request: object = None
    cache_salt: str | None = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: object = None

    def __post_init__(self):
        self.all_token_ids = list(self.prompt_token_ids)


def step_output(new=(), cached=(), resumed=(), preempted=()):
    """A step of (key, blocks of each group, computed, scheduled)."""
    rows = [
        SimpleNamespace(req_id=key, block_ids=tuple(blocks), num_computed_tokens=computed)
        for key, blocks, computed, _ in new
    ]
    return SimpleNamespace(
        scheduled_new_reqs=rows,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[key for key, *_ in cached],
            new_block_ids=[tuple(blocks) if blocks else None for _, blocks, *_ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={key: count for key, _, _, count in (*new, *cached)},
        preempted_req_ids=set(preempted),
    )


class Halves:
    """One worker, stepped as vLLM does, in inference mode, as vLLM is."""

    def __init__(self, settings=SETTINGS, facts=FACTS):
        self.settings = settings
        self.scheduler = SchedulerSide(settings, facts)
        self.caches = {f"layer.{i}": torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 3) for i in range(2)}
        shared = {f"window.{i}": self.caches[f"layer.{i}"] for i in range(len(facts.groups) - 1)}
        self.worker = WorkerSide(settings, facts, self.caches | shared)
        self.now_s = 0.0

    def step(self, finished=(), **output):
        self.now_s += 0.01
        with torch.inference_mode():
            reported = self.scheduler.instructions(step_output(**output), self.now_s)
            self.worker.void(reported)
            self.worker.begin(reported)
            self.worker.worker.start_load(self.now_s)
            for layer in self.caches:
                self.worker.wait_for_layer(layer)
                self.worker.save_layer(layer)
            self.worker.worker.end_step(self.now_s)
            over = self.worker.finished(finished, self.now_s)
            errors = self.worker.worker.take_load_errors()
            self.scheduler.learn([self.worker.take_events()])
        return over, errors

    def close(self):
        self.worker.close()

    def started(self):
        """The tiers have said that nothing was left of a former life."""
        while not self.worker.manager.stack.is_probed:
            self.quiesce()
        self.step()

    def quiesce(self):
        for _ in range(2):
            self.wait()
            self.step()

    def wait(self):
        """Until the tiers have done their jobs: steps have a time of their own."""
        for status in self.worker.manager.stack.status():
            self.worker.manager.stack.call(status.tier, lambda _: None).result(60)

    def fill(self, blocks):
        for layer in self.caches.values():
            layer[blocks] = torch.rand(len(blocks), *layer.shape[1:])
        return [layer[blocks].clone() for layer in self.caches.values()]


def computed(halves, key="a", blocks=(1, 2, 3)):
    """A prompt of ten tokens was computed and stored."""
    halves.scheduler.begin(Request(key, list(range(10))))
    assert halves.scheduler.matched(key, 0, 0.0).tokens == 0
    halves.scheduler.allocated(key, [list(blocks)], 0, 0.0)
    bytes_of = halves.fill(list(blocks))
    halves.step(new=[(key, [list(blocks)], 0, 10)])
    assert halves.scheduler.finished(key, halves.now_s)
    over, _ = halves.step(finished=[key])
    assert halves.scheduler.still_to_free(over.loaded, over.stored) == {key}
    halves.quiesce()
    return bytes_of


def hybrid_computed(halves, key, tokens):
    """A prompt of ten tokens, of which the window's blocks are overwritten after the step."""
    halves.scheduler.begin(Request(key, tokens))
    assert halves.scheduler.matched(key, 0, 0.0).tokens == 0
    tables = [[4, 5, 6], [1, 2, 3]]
    halves.scheduler.allocated(key, tables, 0, 0.0)
    stored = halves.fill([4, 5, 1, 2])
    halves.step(new=[(key, tables, 0, 10)])
    halves.fill([4, 5])
    assert halves.scheduler.finished(key, halves.now_s)
    over, _ = halves.step(finished=[key])
    assert halves.scheduler.still_to_free(over.loaded, over.stored) == {key}
    halves.quiesce()
    return stored
