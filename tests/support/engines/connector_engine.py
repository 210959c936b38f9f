"""An engine with memory of its own, as a connector sees one: it follows vLLM's contract, computes
what its tokens determine, and looks at every byte it reads.

A block's bytes follow from its group and its prompt. Whatever is freed is scribbled over in the
next step, as its next owner would, so that a later read stores, or loads, what no name stands for.
Windows free blocks as they pass.
"""

from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from threading import Event, Semaphore

import msgspec
import torch

from router.protocol.values import Tier
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from support.blocks.connectors import BLOCK_SIZE, NAMING, one_group
from support.blocks.seen_tier import seen_tier
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.connector.slots.leader import ConnectorLeader
from worker_agent.connector.slots.protocol import (
    CachedRequest,
    EngineRequest,
    NewRequest,
    ScheduledStep,
    StepReport,
)
from worker_agent.connector.slots.slot_blocks import NO_BLOCK
from worker_agent.connector.slots.slot_manager import SlotManager
from worker_agent.connector.worker import register_kv_caches
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.groups import LayoutGroup
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.shared_pool import SharedPool
from worker_agent.offload.policies import PassAll
from worker_agent.storage.memory import host_memory
from worker_agent.tiers.level import Level, StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.slots import MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

LAYERS = ("layer.0", "layer.1")
CONFIG = LayoutConfig(24, 2, 2, BLOCK_SIZE, 8, dtype_width_bytes=1)
GROUP = LayoutGroup("attention", LAYERS, CONFIG, LayoutKind.BLOCK_SECOND)
BLOCKS = range(1, CONFIG.num_blocks)
"""The first is the one that a request does not have."""
SCRIBBLE = 0xEE


def stored_tier(num_blocks):
    memory = host_memory(num_blocks * CONFIG.block_bytes)
    pool = SharedPool(num_blocks, LineageEviction())
    return StoredTier(pool, MemorySlots(memory, num_blocks)), memory


class Request:
    """`sent`: number of its tokens that the leader knows; `external`: of those being loaded.

    `tables`: its blocks of each group; `new`: those of the present step.
    """

    def __init__(self, key, tokens, groups):
        self.key = key
        self.groups = groups
        self.sequence = TokenBlockSequence(tokens, BLOCK_SIZE, request_families())
        self.state = "waiting"
        self.is_new = True
        self.is_resumed = False
        self.sent = len(tokens)
        self.tables, self.new = [[] for _ in groups.all], []
        self.computed = self.external = 0

    @property
    def blocks(self):
        return [block for block in chain.from_iterable(self.tables) if block != NO_BLOCK]

    def content(self, group, place):
        """What is computed for a block: (layer, outer, page × inner)."""
        end = (place + 1) * self.groups.all[group].block_size
        return computed_bytes(group, self.sequence.tokens_at(0, end))

    def pass_windows(self):
        """The blocks that windows have passed, which it has no more."""
        passed = []
        for index, group in self.groups.windows:
            table = self.tables[index]
            for place in range(min(group.first_needed(self.computed), len(table))):
                if table[place] != NO_BLOCK:
                    passed.append(table[place])
                    table[place] = NO_BLOCK
        return passed

    def restart(self):
        """It has nothing any more; the blocks that it had."""
        blocks = self.blocks
        self.tables, self.new = [[] for _ in self.tables], []
        self.state, self.computed = "waiting", 0
        self.is_resumed = not self.is_new
        return blocks


class Engine:
    """One step at a time. Blocks are free, or of one request, or of a finished one (`delayed`)."""

    def __init__(
        self,
        host_blocks=12,
        disk_blocks=20,
        load_timeout_s=1e6,
        groups=None,
        copy_device=None,
        torch_device="cpu",
        is_layered=False,
        **stack,
    ):
        self.groups = groups or one_group()
        stored = {Tier.HOST: stored_tier(host_blocks), Tier.DISK: stored_tier(disk_blocks)}
        self.tiers = {tier: each for tier, (each, _) in stored.items()}
        self.memories = {tier: memory for tier, (_, memory) in stored.items()}
        levels = [Level(tier, each, PassAll()) for tier, each in self.tiers.items()]
        options = {"batch_blocks": 4, **stack}
        self.stack = TierStack(levels, StackSettings(CONFIG.block_bytes, **options))
        seen = [seen_tier(self.stack, tier, each.pool) for tier, each in self.tiers.items()]
        self.slots = SlotManager(self.groups, NAMING, seen)
        self.leader = ConnectorLeader(self.slots)
        shape = (CONFIG.outer_dim, CONFIG.num_blocks, CONFIG.region_bytes)
        self.caches = {
            name: torch.full(shape, SCRIBBLE, dtype=torch.uint8, device=torch_device)
            for name in LAYERS
        }
        self.load_timeout_s, self.copy_device = load_timeout_s, copy_device
        self.is_layered = is_layered
        self.begin_worker()
        self.free, self._unwritten = list(BLOCKS), []
        self.requests, self.delayed = {}, {}
        self.finished, self.preempted = [], []
        self.now_s = 0.0
        self.loaded_tokens = self.computed_tokens = 0
        self.lost_reports = self.doubled_reports = 0

    def begin_worker(self):
        options = self.load_timeout_s, self.copy_device
        self.worker = register_kv_caches(
            "1", self.stack, self.caches, [GROUP], *options, is_layered=self.is_layered
        )

    # ── What the world does ──────────────────────────────────────────────────────────────────────

    def add(self, key, tokens):
        self.requests[key] = Request(key, list(tokens), self.groups)

    def finish(self, key):
        request = self.requests.pop(key)
        self.finished.append(key)
        if self.leader.request_finished(key, self.now_s):
            self.delayed[key] = request.blocks
        else:
            self.give_back(request.blocks)

    def preempt(self, key):
        if self.requests[key].state == "running":
            self.preempted.append(key)
            self.give_back(self.requests[key].restart())

    def lose_worker(self):
        """It dies, and with it what it was doing; whatever was computed is computed again."""
        self.leader.worker_is_gone()
        self.begin_worker()
        for blocks in self.delayed.values():
            self.give_back(blocks)
        self.delayed, self.finished = {}, []
        for key, request in self.requests.items():
            if request.state == "running":
                self.preempted.append(key)
            self.give_back(request.restart())

    def corrupt(self, tier, block):
        """A bit of what a tier keeps is flipped."""
        place = block * CONFIG.block_bytes + 5
        byte = self.memories[tier].tensor[place]
        self.stack.call(tier, lambda _: byte.bitwise_xor_(1)).result(60)

    @contextmanager
    def stalled(self):
        """The tiers do nothing meanwhile."""
        begun, go_on = Semaphore(0), Event()

        def stall(_):
            begun.release()
            return go_on.wait(60)

        answers = [self.stack.call(tier, stall) for tier in self.tiers]
        assert all(begun.acquire(timeout=60) for _ in answers)
        yield
        go_on.set()
        assert all(answer.result(60) for answer in answers)

    def quiesce(self):
        """The tiers have done what they were asked for."""
        for tier in self.tiers:
            self.stack.call(tier, lambda _: None).result(60)

    # ── A step ───────────────────────────────────────────────────────────────────────────────────

    def step(self, chunk=8, skipped=()):
        """Compute a chunk of everything that can be computed, but what is skipped."""
        self.now_s += 0.01
        scheduled, new, cached = {}, [], []
        for key, request in self.requests.items():
            if key not in skipped and self.place(request, chunk):
                scheduled[key] = min(chunk, len(request.sequence) - request.computed)
                self._tell(request, new, cached)
        preempted, self.preempted = self.preempted, []
        step = ScheduledStep(scheduled, new, cached, preempted)
        plan = over_the_wire(self.leader.build_connector_metadata(step))
        self._work(plan, scheduled)
        self.leader.tick(self.now_s)

    def place(self, request, chunk):
        """Whether something of it is computed in this step; it has the blocks for that."""
        external = 0
        if request.state == "waiting":
            tokens = request.sequence.tokens_at(0, len(request.sequence))
            asked = EngineRequest(request.key, tokens)
            external = self.leader.get_num_new_matched_tokens(asked, 0).tokens
            assert external < len(request.sequence)
        if request.state == "loading":
            return False
        self.give_back(request.pass_windows())
        end = external or min(request.computed + chunk, len(request.sequence))
        if not self._allocate(request, end, external):
            return False
        if request.state != "running":
            tables = list(map(list, request.tables))
            self.leader.update_state_after_alloc(request.key, tables, external, self.now_s)
        request.external = external
        request.state = "loading" if external else "running"
        return not external

    def _allocate(self, request, end, external):
        """Whether there was room; without blocks that windows pass before the first is read."""
        new = []
        for group, table in zip(self.groups.all, request.tables, strict=True):
            passed = 0 if table else group.first_needed(external)
            missing = -(-end // group.block_size) - len(table) - passed
            new.append([NO_BLOCK] * passed + [None] * max(missing, 0))
        if sum(block is None for block in chain.from_iterable(new)) > len(self.free):
            return False
        request.new = [
            [self.free.pop(0) if block is None else block for block in blocks] for blocks in new
        ]
        for table, blocks in zip(request.tables, request.new, strict=True):
            table += blocks
        return True

    def _tell(self, request, new, cached):
        tables = list(map(list, request.tables))
        if request.is_new:
            new.append(NewRequest(request.key, tables, request.computed))
        else:
            tokens = request.sequence.tokens_at(request.sent, len(request.sequence))
            given = tables if request.is_resumed else request.new if any(request.new) else []
            each = (request.key, tokens, given, request.computed, request.is_resumed)
            cached.append(CachedRequest(*each))
        request.sent = len(request.sequence)
        request.is_new = request.is_resumed = False

    def _work(self, plan, scheduled):
        self.worker.void(plan.voided, is_preempting=plan.is_preempting)
        for block in self._unwritten:
            self._write(block, torch.tensor(SCRIBBLE, dtype=torch.uint8))
        self._unwritten = []
        self.worker.bind(plan)
        self.worker.start_load(self.now_s)
        for number in range(len(LAYERS)):
            self.run_layer(number, scheduled)
        for key, count in scheduled.items():
            self._go_on(self.requests[key], count)
        self.worker.end_step(self.now_s)
        finished, self.finished = self.finished, []
        over = self.worker.get_finished(finished, self.now_s)
        self._take_loaded(over, self.worker.take_load_errors())
        self._report(over_the_wire(self.worker.take_report()))
        for key in over.stored:
            self.give_back(self.delayed.pop(key))

    def run_layer(self, number, scheduled):
        self.worker.wait_for_layer(LAYERS[number])
        self.compute(number, scheduled)
        self.worker.save_layer(LAYERS[number])

    def compute(self, number, scheduled):
        for key, count in scheduled.items():
            self._compute(self.requests[key], count, number)

    def _compute(self, request, count, layer):
        """Read all of a layer that was computed before, and write what gets full."""
        before, after = request.computed, request.computed + count
        for index, group in enumerate(self.groups.all):
            table, size = request.tables[index], group.block_size
            for place in range(group.first_needed(before), before // size):
                right = request.content(index, place)[layer]
                assert torch.equal(self._read(table[place], layer), right), "wrong KV"
            for place in range(before // size, after // size):
                self._write_layer(layer, table[place], request.content(index, place)[layer])

    def _go_on(self, request, count):
        request.computed += count
        self.computed_tokens += count
        if request.computed == len(request.sequence):
            request.sequence.append(len(request.sequence))

    def _take_loaded(self, over, errors):
        """As vLLM credits a load: up to the first bad block, or nothing of several groups."""
        for key in over.loaded:
            request = self.requests[key]
            assert request.state == "loading"
            right = [block not in errors for block in request.blocks]
            assert all(right) == (key not in over.failed)
            blocks = [*right, False].index(False) if self.groups.is_single else 0
            request.computed = request.external
            if key in over.failed:
                request.computed = blocks * self.groups.unit
            self.loaded_tokens += request.computed
            request.state = "loaded"
            if not request.computed:
                self.give_back(request.restart())

    def _report(self, report):
        if self.lost_reports:
            self.lost_reports -= 1
            report = StepReport([], report.stored)
        self.leader.update(report)
        if self.doubled_reports:
            self.doubled_reports -= 1
            self.leader.update(report)

    # ── Memory ───────────────────────────────────────────────────────────────────────────────────

    def give_back(self, blocks):
        """Free them; the next step scribbles over them before it computes."""
        self._unwritten += blocks
        self.free += blocks

    def _read(self, block, layer):
        return self.caches[LAYERS[layer]][:, block].cpu()

    def _write(self, block, content):
        for layer in range(len(LAYERS)):
            self._write_layer(layer, block, content)

    def _write_layer(self, layer, block, part):
        cache = self.caches[LAYERS[layer]]
        if cache.is_cuda:  # Without a wait for what the engine has queued.
            part = part.pin_memory().to(cache.device, non_blocking=True)
        cache[:, block] = part

    # ── Its end ──────────────────────────────────────────────────────────────────────────────────

    def check(self):
        """Every block is somewhere, once."""
        owned = [block for each in self.requests.values() for block in each.blocks]
        late = [block for blocks in self.delayed.values() for block in blocks]
        assert sorted(self.free + owned + late) == list(BLOCKS)
        for tier in self.tiers.values():
            tier.pool.check_invariants()

    def drain(self):
        """Everything ends; nothing is held, under way, or counted as lost."""
        for key in list(self.requests):
            self.finish(key)
        self.step()
        self.now_s += 2.0
        self.step()
        self.quiesce()
        self.check()
        assert (self.delayed, len(self.free)) == ({}, len(BLOCKS))
        assert (len(self.slots), self.worker.under_way, self.leader.quarantined_blocks) == (0, 0, 0)
        assert [tier.pool.used_blocks for tier in self.tiers.values()] == [0, 0]

    def close(self):
        assert self.stack.close(60)


def computed_bytes(group, tokens):
    """What is computed for the block of a group that ends with these tokens."""
    digest = blake2b(repr((group, list(tokens))).encode(), digest_size=6).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest, "little"))
    shape = (CONFIG.num_layers, CONFIG.outer_dim, CONFIG.region_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def over_the_wire(message):
    return msgspec.json.decode(msgspec.json.encode(message), type=type(message))
