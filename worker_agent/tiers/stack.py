"""The tiers below the device as one stack: their contents, offloading and onboarding.

    engine's step     offer ─▶ due ─▶ (gather) ─▶ store      load ─▶ Loading ─▶ (scatter)
                        │                           │          │        ▲
    this, same thread   └───── Descent ──────────┐  │          │ Ascent │        poll
                                                 ▼  ▼          ▼        │
    a thread a tier     host ──────▶ disk ──────▶ remote        host, disk, remote

Write-through: blocks registered on the device are offered to the first tier, and blocks stored in a
tier to the next. The queue holds names, not block contents; a name is looked up again when it is
due. The stack never waits for a tier: it knows the tiers' contents from the changes that their
threads report, and blocks not loaded in time are computed instead.

All calls except `ask`, `status` and `close` belong to one thread, the owner's. It calls `poll` at
every step, at the latest `wait_s` after the previous one, and whenever `on_change` is called.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Event
from typing import TypeVar

from msgspec import Struct
from torch import Tensor

from router.protocol.values import Tier
from worker_agent.blocks.changes import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    Change,
    MergedTiers,
)
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.blocks.names import BlockName
from worker_agent.offload.load_or_recompute import LoadOrRecompute
from worker_agent.offload.probe import ProbedTier, Recompute, advice
from worker_agent.offload.queue import Waiting
from worker_agent.tiers.level import (
    Level,
    Levels,
    StackSettings,
    TierStartup,
    TierStatus,
    WorkingLevel,
)
from worker_agent.tiers.offload_lane import EdgeCounters
from worker_agent.tiers.offloading import Offloading
from worker_agent.tiers.onboarding import Loading, Onboarding
from worker_agent.tiers.peers import Connect, PeerTiers
from worker_agent.tiers.worker import Finished, Spent, TierJob
from worker_agent.transfer.block_tier import BlockTier
from worker_agent.transfer.copy_stream import DeviceCopy

log = logging.getLogger(__name__)

T = TypeVar("T")


class TierChange(Struct, frozen=True):
    """A change of the blocks that a tier holds."""

    tier: Tier
    change: Change


class TierStack:
    """Tiers below the device, fastest first; there may be none.

    Invariants: `held` reflects the changes of all tiers, in order, as far as `poll` has returned
    them. The blocks that `load` returns are verified; of those from host memory, a sample is.
    """

    def __init__(
        self, levels: Sequence[Level], settings: StackSettings, worth: LoadOrRecompute | None = None
    ) -> None:
        """Create the stack. `worth`: None loads every known block, however long it takes."""
        self._finished: deque[tuple[WorkingLevel | None, Finished]] = deque()
        self._held = MergedTiers()
        self._levels = [WorkingLevel(level, settings, self._on_finished) for level in levels]
        self._settings = settings
        self._startings: list[TierStartup] = []
        tiers = Levels(settings, self._levels, self._held)
        self._ascent = Onboarding(tiers, worth)
        self._descent = Offloading(tiers)
        self._peers: PeerTiers | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Callback from a tier's thread when there is something to `poll`."""

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    @property
    def block_bytes(self) -> int:
        """Size of a block in every tier."""
        return self._settings.block_bytes

    def held(self, identity: bytes) -> int:
        """Return a bit mask of the tiers that hold this block."""
        return self._held.tiers(identity)

    @property
    def is_storing(self) -> bool:
        """True if blocks wait to be offloaded or are being stored."""
        return any(level.way.batches or len(level.way.queue) for level in self._levels)

    def store_of(self, tier: Tier) -> BlockTier | None:
        """Return a tier's block store, for the calls that any thread may make.

        Returns None if there is no such tier.
        """
        return next((level.store for level in self._levels if level.tier is tier), None)

    # ── Up ───────────────────────────────────────────────────────────────────────────────────────

    def load(
        self,
        identities: Sequence[bytes],
        now_s: float,
        timeout_s: float,
        *,
        is_whole: bool = False,
        source: PeerSource | None = None,
    ) -> Loading | None:
        """Begin to load leading blocks of a prompt, as many as pay; return None if none does.

        The load ends `timeout_s` from now at the latest, with the blocks loaded by then.
        `is_whole`: the blocks are usable only if all of them are loaded. `source`: another worker
        that has the leading `blocks` of them.
        """
        peer, peer_blocks = None, 0
        if source is not None and self._peers is not None and source.blocks > 0:
            peer = self._peers.giver(source, identities, partial(self._on_finished, None))
            peer_blocks = source.blocks
        return self._ascent.load(
            identities, now_s, timeout_s, is_whole=is_whole, peer=peer, peer_blocks=peer_blocks
        )

    def connect_peers(self, connect: Connect) -> None:
        """Also load blocks from other workers; call it before the first `load`.

        `connect` returns the block source of one worker.
        """
        self._peers = PeerTiers(connect, self._settings)

    @property
    def pulled(self) -> EdgeCounters:
        """Counters of blocks loaded from other workers since the start. Any thread may read it."""
        return EdgeCounters() if self._peers is None else self._peers.up

    def loadable(self, identities: Sequence[bytes], timeout_s: float) -> int:
        """Return how many leading blocks, of those that tiers hold, `load` would load now."""
        return self._ascent.loadable(identities, timeout_s)

    def note_prefill(self, tokens: int, busy_s: float) -> None:
        """Record computed prompt tokens: the prefill rate that loading is compared with."""
        self._ascent.note_prefill(tokens, busy_s)

    def touch(self, identities: Sequence[bytes]) -> None:
        """Mark these blocks as used, so that tiers evict them later."""
        for level in self._levels:
            here = [each for each in identities if self.held(each) & level.bit]
            if here:
                level.worker.submit(TierJob(partial(level.store.touch, here), _ignored))

    # ── Down ─────────────────────────────────────────────────────────────────────────────────────

    def offer(self, names: Sequence[BlockName], priority: int = 0, container: int = 0) -> None:
        """Queue newly registered device blocks for offload.

        `container`: the group of blocks that they belong to, for `cancel`.
        """
        self._descent.offer(0, names, priority, container)

    def is_offered(self, identity: bytes) -> bool:
        """Return whether this block waits for the first tier."""
        return bool(self._levels) and identity in self._levels[0].way.queue

    def cancel(self, container: int) -> int:
        """Remove the waiting blocks of `container` from the queues and return their number."""
        return self._descent.cancel(container)

    def due(self, now_s: float) -> list[Waiting]:
        """Return the blocks to gather from the device now and to pass to `store`.

        The caller leaves out blocks that the device no longer has.
        """
        return self._descent.due(0, now_s)

    def urgent(self, names: Sequence[BlockName], now_s: float) -> list[Waiting]:
        """Return those of these device blocks to gather now and to pass to `store`.

        They do not wait in the queue: the device may use their memory for other tokens soon.
        """
        return self._descent.urgent(names, now_s)

    def store(self, waiting: Sequence[Waiting], rows: Tensor | DeviceCopy) -> None:
        """Store rows in the first tier; those of a copy in progress once `poll` finds it complete.

        `rows[i]` is the block of `waiting[i]`, on the host or on a device; the stack owns it from
        then on.
        """
        self._descent.store(waiting, rows)

    # ── Tending ──────────────────────────────────────────────────────────────────────────────────

    def poll(self, now_s: float, *, is_decoding: bool = False) -> list[TierChange]:
        """Process finished calls, start the next stores, and return the changes of the tiers."""
        changes: list[TierChange] = []
        while self._finished:
            level, finished = self._finished.popleft()
            if level is None:  # It is a peer, and its blocks are not tracked.
                finished.finish()
                continue
            changes += [TierChange(level.tier, change) for change in finished.changes]
            self._note(level, finished)
        self._ascent.end_late(now_s)
        self._descent.is_decoding = is_decoding
        self._descent.is_load_waiting = self._ascent.is_waited_for
        self._descent.move(now_s)
        return changes

    def wait_s(self, now_s: float) -> float | None:
        """Return the longest time until the next `poll`; None if `on_change` alone requires one."""
        if self._ascent.is_waited_for:
            return self._ascent.wait_s(now_s)
        waits = [level.way.wait_s() for level in self._levels]
        return min((wait for wait in waits if wait is not None), default=None)

    def start(self) -> None:
        """Start adopting the blocks that earlier processes left, then measure each tier.

        `status` contains the measurement, which decides what is worth loading until blocks have
        been loaded. Other calls run in between.
        """
        self._startings = [TierStartup(level, self._settings) for level in self._levels]
        for starting in self._startings:
            starting.go_on()

    @property
    def is_probed(self) -> bool:
        """True if every tier was measured or cannot be measured."""
        return all(level.is_probed for level in self._levels)

    def advice(self, device_blocks: int, block_size: int) -> list[str]:
        """Return advice on the tiers' configuration, from the measurements so far."""
        tiers = [ProbedTier("device", device_blocks)]
        tiers += [level.probed() for level in self._levels]
        prefill = self._ascent.prefill_tokens_per_s
        if prefill is None:
            return advice(tiers)
        return advice(tiers, Recompute(prefill, block_size, self._settings.block_bytes))

    def clear(self, *, is_shared_kept: bool = False) -> None:
        """Clear every tier and cancel loads and stores in progress.

        `is_shared_kept`: the store shared with other workers keeps its blocks.
        """
        self._ascent.cancel()
        self._descent.clear()
        for level in self._levels:
            if not (level.is_shared and is_shared_kept):
                level.worker.submit(TierJob(level.store.clear, _ignored))

    def call(self, tier: Tier, run: Callable[[BlockTier], T]) -> "Future[T]":
        """Make a control call on a tier's thread, from any thread, and return its future result.

        `poll` returns the changes that it makes. Raises KeyError if there is no such tier.
        """
        level = {level.tier: level for level in self._levels}[tier]
        return level.worker.call(lambda: run(level.store))

    def status(self) -> list[TierStatus]:
        """Return the state and counters of every tier. Any thread may call it."""
        return [level.status() for level in self._levels]

    def drain(self, hand_over: Callable[[float], None] | None = None) -> int:
        """Store the waiting blocks at shutdown, before `close`, and return how many are given up.

        Blocks for at most `drain_s`, and stores only as far as tiers outlive this process.
        `hand_over`: gathers the blocks that are `due` on the device and passes them to `store`. If
        it is None the device is gone, and the blocks that wait there are given up.
        """
        changed = Event()
        self.on_change = changed.set
        self._ascent.cancel()
        given_up = self._descent.end(is_device_gone=hand_over is None)
        until_s = (now_s := time.monotonic()) + self._settings.drain_s
        while self._descent.is_busy and now_s < until_s:
            changed.clear()
            self.poll(now_s)
            if hand_over is not None:
                hand_over(now_s)
            if self._descent.is_busy and not self._finished:
                changed.wait(until_s - now_s)
            now_s = time.monotonic()
        given_up += self._descent.give_up()
        if given_up:
            log.warning("%d blocks were not stored within %g s", given_up, self._settings.drain_s)
        return given_up

    def close(self, timeout_s: float) -> bool:
        """Finish the stores given to `store` and close the tiers; return whether all ended in time.

        A tier's thread that does not end in time is left running.
        """
        deadline_s = time.monotonic() + timeout_s
        self._descent.await_copies()
        if self._peers is not None:
            self._peers.close()
        ended = [level.worker.close(deadline_s) for level in self._levels]
        for starting in self._startings if all(ended) else []:
            starting.end()
        return all(ended)

    def check_invariants(self) -> None:
        """Assert the invariants after `poll`. O(blocks)."""
        self._ascent.check_invariants()
        for level in self._levels:
            level.way.check_invariants()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _on_finished(self, level: WorkingLevel | None, finished: Finished) -> None:
        self._finished.append((level, finished))
        self.on_change()

    def _note(self, level: WorkingLevel, finished: Finished) -> None:
        """Apply a call's changes, then run its completion.

        The order matters: a completion that learns of a failed load must not try the same tier
        again. Blocks found in a tier are offered to the next tier.
        """
        for change in finished.changes:
            _count_held(level, change)
        self._held.apply(level.bit, finished.changes)
        finished.finish()
        stored = [change.name for change in finished.changes if isinstance(change, BlockStored)]
        self._descent.offer(self._levels.index(level) + 1, stored, 0, 0)


def _count_held(level: WorkingLevel, change: Change) -> None:
    match change:
        case BlockStored():
            level.held_blocks += 1
        case BlockRemoved():
            level.held_blocks -= 1
        case CacheCleared():
            level.held_blocks = 0


def _ignored(answer: object, spent: Spent) -> None:
    """Ignore the result: the changes contain it."""
