"""A tier at work: its thread, the way down into it, and how fast blocks come up from it."""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from router.protocol.values import Tier
from worker_agent.blocks.changes import MergedTiers
from worker_agent.offload.pacing import StorePace
from worker_agent.offload.policies import OffloadPolicy
from worker_agent.offload.probe import ProbedTier, TierProbe
from worker_agent.offload.queue import OffloadQueue
from worker_agent.offload.worth import TierSpeed
from worker_agent.tiers.way_down import EdgeCounters, WayDown
from worker_agent.tiers.worker import Finished, TierWorker
from worker_agent.transfer.block_tier import BlockGiver, BlockTier, TierCounters

BURST_BATCHES = 4
"""May be stored at once after a quiet time."""


class Level(Struct, frozen=True):
    """A tier below the device, and what is worth a place there."""

    tier: Tier
    store: BlockTier
    policy: OffloadPolicy
    is_shared: bool = False
    """Others write there, too: it may have what it was never seen to get."""


class StackSettings(Struct, frozen=True):
    """Of all tiers of a rank."""

    block_bytes: int
    batch_blocks: int = 16
    """Go in one call of a tier, which nothing interrupts."""
    max_waiting_blocks: int = 65_536
    """Wait for each tier; beyond, the least urgent are not stored."""
    max_loading_blocks: int = 4096
    """On their way up; beyond, blocks are computed."""
    store_bytes_per_s: float = 2e9
    """Into each tier; a tenth of it while requests are decoded."""
    adopt_timeout_s: float = 600.0
    """What a former life left and is not proven by then is left where it is."""
    drain_s: float = 10.0
    """At the end, what waits is stored for so long."""
    max_waiting_calls: int = 4096
    """Wait for a tier; beyond, it is as if it had failed."""


class TierStatus(Struct, frozen=True):
    """A tier of the stack, and what went through."""

    tier: Tier
    is_broken: bool
    is_busy: bool
    """Blocks are being stored there."""
    num_blocks: int
    held_blocks: int
    waiting_blocks: int
    dropped_blocks: int
    """They waited, and gave way to more urgent ones, or to the end."""
    pace_blocks_per_s: float
    """At most so many are stored now."""
    store: TierCounters
    down: EdgeCounters
    up: EdgeCounters
    probe: TierProbe | None
    """What was measured of it at start."""


class Giver:
    """Whom blocks come up from, at work: a tier, or another worker. Belongs to the stack's owner,
    but for what `worker` does.
    """

    __slots__ = ("is_sampled", "speed", "store", "up", "worker")

    def __init__(
        self,
        name: str,
        store: BlockGiver,
        settings: StackSettings,
        tell: Callable[[Finished], None],
        *,
        up: EdgeCounters | None = None,
        is_sampled: bool = False,
    ) -> None:
        """`up`: where what came is counted; of its own, unless given. `is_sampled`: of what it
        gives a sample is proven.
        """
        self.store = store
        self.is_sampled = is_sampled
        self.speed = TierSpeed(settings.block_bytes)
        self.up = EdgeCounters() if up is None else up
        self.worker = TierWorker(name, store, settings.max_waiting_calls, tell)


class WorkingLevel(Giver):
    """Belongs to the stack's owner, but for what `worker` does."""

    __slots__ = ("bit", "held_blocks", "is_probed", "is_shared", "probe", "tier", "way")

    store: BlockTier

    def __init__(
        self,
        level: Level,
        settings: StackSettings,
        tell: Callable[["WorkingLevel", Finished], None],
    ) -> None:
        name, is_sampled = level.tier.name.lower(), level.tier is Tier.HOST
        self.tier = level.tier
        self.bit = 1 << level.tier
        self.is_shared = level.is_shared
        self.held_blocks = 0
        self.is_probed = False
        self.probe: TierProbe | None = None
        blocks_per_s = settings.store_bytes_per_s / settings.block_bytes
        self.way = WayDown(
            OffloadQueue(settings.max_waiting_blocks),
            level.policy,
            StorePace(blocks_per_s, BURST_BATCHES * settings.batch_blocks),
            settings.batch_blocks,
        )
        super().__init__(name, level.store, settings, partial(tell, self), is_sampled=is_sampled)

    def status(self) -> TierStatus:
        """What it has, and what went through. From any thread."""
        return TierStatus(
            self.tier,
            self.worker.is_broken,
            bool(self.way.batches),
            self.store.num_blocks,
            self.held_blocks,
            len(self.way.queue),
            self.way.queue.dropped_blocks,
            self.way.pace.blocks_per_s,
            self.store.counters,
            self.way.counters,
            self.up,
            self.probe,
        )

    def probed(self) -> ProbedTier:
        """As advice looks at it."""
        return ProbedTier(self.tier.name.lower(), self.store.num_blocks, self.probe, self.is_probed)

    def note_probe(self, probe: TierProbe | None) -> None:
        """What was measured at start: loads go by it until more is known."""
        self.is_probed = True
        self.probe = probe
        if probe is not None:
            self.speed.note_probe(probe)


class Levels(Struct, frozen=True):
    """The tiers of a stack, fastest first, and what they are known to hold."""

    settings: StackSettings
    levels: Sequence[WorkingLevel]
    held: MergedTiers

    def has(self, index: int, identity: bytes) -> bool:
        """Whether a tier is known to hold this."""
        return bool(self.held.tiers(identity) & self.levels[index].bit)
