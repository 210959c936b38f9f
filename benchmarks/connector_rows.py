"""Rows of what the connector costs an engine's scheduler, in processor time."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter_ns, process_time_ns

from connector_peer import PeerWorld
from report import Benchmark, Section, report
from rows import Row
from timing import Bounded, alternate

from router.protocol.values import Tier
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.names import Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.connector.slots.block_groups import BlockGroup, BlockGroups
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.leader import ConnectorLeader
from worker_agent.connector.slots.protocol import (
    CachedRequest,
    EngineRequest,
    NewRequest,
    ScheduledStep,
)
from worker_agent.connector.slots.slot_manager import SlotManager

BLOCK_SIZE = 16
NAMING = Naming(b"benchmark secret", "benchmark")
GROUPS = BlockGroups([BlockGroup(BLOCK_SIZE)])
SLOT_OPERATIONS_PER_S = 200.0
PLAN_US = 2000.0
PREFIX_US = 2000.0
REQUESTS = 256
PREFIX_TOKENS = 100_000
ROUNDS = 7
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE)


class Size:
    """How often things are measured."""

    def __init__(self, quick: bool) -> None:
        self.slots = 5_000 if quick else 20_000
        self.peer_blocks = 32 if quick else 128
        self.rounds = 10 if quick else 30


def slot_rows(size: Size) -> list[Row]:
    """Seven operations of a slot's life, on slots that there are."""
    slots = SlotManager(GROUPS, NAMING)
    for key in range(size.slots):
        slots.create_slot(key, [1, 2, 3])

    def live() -> None:
        for key in range(size.slots):
            slot = slots.get_slot(key)
            slot.append_mutable_device_blocks(((key,),))
            slot.mark_as_prefilling(1)
            slot.mark_as_not_scheduled(2)
            slot.mark_as_decoding(3)
            slot.take_pending_operations()
            slot.mark_as_finished(4, 0.0)

    rate = 7 * size.slots / _cpu_us(live) * 1e3
    goal = SLOT_OPERATIONS_PER_S
    return [Bounded("operations of slots", rate, goal, "k/s", goal, lower=False)]


def plan_rows(size: Size) -> list[Row]:
    """Steps in which every request gets a token, and every sixteenth fills a block; and ones in
    which an eighth of them are new prompts.
    """
    times_us = {"256 decode": [], "224 decode, 32 prompts": []}
    for label, num_new in (("256 decode", 0), ("224 decode, 32 prompts", 32)):
        for _ in range(size.rounds):
            leader, counts, new = _running_leader()
            first = dict(list(counts.items())[num_new:])
            leader.build_connector_metadata(ScheduledStep(first, new[num_new:]))
            cached = [CachedRequest(key, [1], [], count) for key, count in first.items()]
            scheduled = {**counts, **dict.fromkeys(first, 1)}
            step = ScheduledStep(scheduled, new[:num_new], cached)
            took_us = _cpu_us(partial(leader.build_connector_metadata, step))
            times_us[label].append(took_us)
            assert leader.counters.refused == 0
    return [
        Bounded(f"plan, {label}", median(taken_us), PLAN_US, "us", PLAN_US, lower=True)
        for label, taken_us in times_us.items()
    ]


def _running_leader() -> tuple[ConnectorLeader, dict[int, int], list[NewRequest]]:
    """One that knows 256 requests with prompts of 400 tokens and some, about to be computed."""
    leader = ConnectorLeader(SlotManager(GROUPS, NAMING, [_tier(Tier.HOST, 16)]))
    counts = {key: 400 + key % BLOCK_SIZE for key in range(REQUESTS)}
    new = [NewRequest(key, [list(range(key * 40, key * 40 + 40))], 0) for key in counts]
    for each in new:
        prompt = list(range(counts[each.key]))
        leader.get_num_new_matched_tokens(EngineRequest(each.key, prompt), 0)
        leader.update_state_after_alloc(each.key, each.blocks, 0, 0.0)
    return leader, counts, new


def prefix_rows(size: Size) -> list[Row]:
    """A prompt whose blocks are spread evenly over four tiers."""
    del size
    sequence = TokenBlockSequence(list(range(PREFIX_TOKENS)), BLOCK_SIZE, request_families())
    names = NAMING.named(sequence.blocks, NAMING.root(None, None))
    share = -(-len(names) // len(TIERS))
    tiers = [_tier(tier, share) for tier in TIERS]
    for place, tier in enumerate(tiers):
        part = names[place * share : (place + 1) * share]
        tier.pool.release(tier.pool.register(tier.pool.allocate(len(part)), part))
    identities = [name.identity for name in names]

    def find() -> None:
        left: Sequence[bytes] = identities
        for tier in tiers:
            left = left[tier.pool.matching(left) :]
        assert not left

    found_us = median(_cpu_us(find) for _ in range(11))
    row = Bounded("100 k tokens in four tiers", found_us, PREFIX_US, "us", PREFIX_US, lower=True)
    return [row]


def _tier(tier: Tier, num_blocks: int) -> LowerTier:
    return LowerTier(tier, BlockPool(num_blocks, LineageEviction()))


def _cpu_us(run: Callable[[], None]) -> float:
    start = process_time_ns()
    run()
    return (process_time_ns() - start) / 1e3


def peer_rows(size: Size) -> list[Row]:
    """Wall time: two processes share it."""
    with PeerWorld(size.peer_blocks) as world:
        sides = [
            world.get_plainly,
            world.get,
            world.copy_plainly,
            world.get_mapped,
            world.get_through_nixl,
            world.get_with_tls,
        ]
        plain, over_tcp, copied, mapped, read, with_tls = (
            world.size_bytes / median(times_ns)
            for times_ns in alternate(list(map(_wall_ns, sides)), ROUNDS, warm_up=True)
        )
    return [
        Row("get over TCP, plain socket and a tag", over_tcp, plain, "GB/s", 0.8, lower=False),
        Row("get over TCP with TLS, without", with_tls, over_tcp, "GB/s", 0.5, lower=False),
        Row("get, shared memory, memcpy", mapped, copied, "GB/s", 0.8, lower=False),
        Row("get through NIXL without RDMA, over TCP", read, over_tcp, "GB/s", 0.8, lower=False),
    ]


def _wall_ns(run: Callable[[], None]) -> Callable[[int], int]:
    def time(_: int) -> int:
        start = perf_counter_ns()
        run()
        return perf_counter_ns() - start

    return time


SECTIONS: dict[str, tuple[str, Callable[[Size], list[Row]]]] = {
    "slots": ("operations of slots, thousand a second", slot_rows),
    "plan": ("build_connector_metadata for 256 slots", plan_rows),
    "peer": (
        "2 MiB blocks of another process, beside a plain socket with a tag, and a plain copy",
        peer_rows,
    ),
    "prefix": ("the blocks of a prompt found in four tiers", prefix_rows),
}


def measured(arguments: Namespace) -> int:
    """Measure sections and print them; 0 if every row meets its goal."""
    size = Size(arguments.quick)
    sections = {
        name: Section(title, partial(measure, size))
        for name, (title, measure) in SECTIONS.items()
        if name in arguments.only
    }
    scale = "medians; processor time, but for `peer`"
    return report(sections, Benchmark("connector", "peer", scale), arguments)
