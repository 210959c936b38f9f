"""The tiers below the device, put together: what each holds, what goes down, what comes up.

    engine's step     offer ─▶ due ─▶ (gather) ─▶ store      load ─▶ Loading ─▶ (scatter)
                        │                           │          │        ▲
    this, same thread   └───── Descent ──────────┐  │          │ Ascent │        poll
                                                 ▼  ▼          ▼        │
    a thread a tier     host ──────▶ disk ──────▶ remote        host, disk, remote

Write-through: what is registered on the device is offered to the first tier, what a tier keeps to
the next. A name waits, not a block, and it is looked up again when its turn comes. The stack never
waits for a tier: what tiers hold it knows from the changes their threads report, and what does not
come in time is computed instead.

All calls but `ask`, `status` and `close` belong to one thread, the owner's, which calls `poll` at
every step, `wait_s` after the last one at the latest, and whenever `on_news` is called.
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
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.sources import PeerSource
from worker_agent.offload.probe import ProbedTier, Recompute, advice
from worker_agent.offload.queue import Waiting
from worker_agent.offload.worth import Worth
from worker_agent.tiers.ascent import Ascent
from worker_agent.tiers.descent import Descent
from worker_agent.tiers.level import Level, Levels, StackSettings, TierStatus, WorkingLevel
from worker_agent.tiers.loading import Loading
from worker_agent.tiers.peers import Connect, Peers
from worker_agent.tiers.starting import Starting
from worker_agent.tiers.way_down import EdgeCounters
from worker_agent.tiers.worker import Call, Finished, Spent
from worker_agent.transfer.block_tier import BlockTier

log = logging.getLogger(__name__)

T = TypeVar("T")


class TierChange(Struct, frozen=True):
    """What happened to a name in a tier."""

    tier: Tier
    change: Change


class TierStack:
    """Tiers below the device, fastest first; there may be none.

    Invariants: `held` says of a name what the changes of its tiers say, in order, as far as `poll`
    has returned them. Whatever `load` gives was proven right, of host memory a sample.
    """

    def __init__(
        self, levels: Sequence[Level], settings: StackSettings, worth: Worth | None = None
    ) -> None:
        """`worth`: None loads whatever is there, however long it takes."""
        self._finished: deque[tuple[WorkingLevel | None, Finished]] = deque()
        self._held = MergedTiers()
        self._levels = [WorkingLevel(level, settings, self._tell) for level in levels]
        self._settings = settings
        self._startings: list[Starting] = []
        tiers = Levels(settings, self._levels, self._held)
        self._ascent = Ascent(tiers, worth)
        self._descent = Descent(tiers)
        self._peers: Peers | None = None
        self.on_news: Callable[[], None] = lambda: None
        """Called from a tier's thread: there is something to `poll`."""

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    @property
    def block_bytes(self) -> int:
        """Of every tier's blocks."""
        return self._settings.block_bytes

    def held(self, identity: bytes) -> int:
        """A mask of the tiers that hold this."""
        return self._held.tiers(identity)

    @property
    def is_storing(self) -> bool:
        """Whether blocks are on their way down, or wait for it."""
        return any(level.way.batches or len(level.way.queue) for level in self._levels)

    def store_of(self, tier: Tier) -> BlockTier | None:
        """What keeps the blocks of a tier, for the calls of it that any thread may make; None where
        there is no such tier.
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
        """Begin to load the leading blocks of a prompt, as many as are worth it; None if none is.

        It ends `timeout_s` from now at the latest, with what has come by then. `is_whole`: all of
        them, or none is of use. `source`: another worker that has the leading `blocks` of them.
        """
        peer, peer_blocks = None, 0
        if source is not None and self._peers is not None and source.blocks > 0:
            peer = self._peers.giver(source, partial(self._tell, None))
            peer_blocks = source.blocks
        return self._ascent.load(
            identities, now_s, timeout_s, is_whole=is_whole, peer=peer, peer_blocks=peer_blocks
        )

    def connect_peers(self, connect: Connect) -> None:
        """From now on blocks come from other workers, too: `connect` makes who gives those of one.

        Before the first `load`.
        """
        self._peers = Peers(connect, self._settings)

    @property
    def pulled(self) -> EdgeCounters:
        """What came from other workers since the start. From any thread."""
        return EdgeCounters() if self._peers is None else self._peers.up

    def loadable(self, identities: Sequence[bytes], timeout_s: float) -> int:
        """How many leading blocks would be loaded now, of those that tiers are known to hold."""
        return self._ascent.loadable(identities, timeout_s)

    def note_prefill(self, tokens: int, busy_s: float) -> None:
        """So many prompt tokens were computed: what loading is measured against."""
        self._ascent.note_prefill(tokens, busy_s)

    def touch(self, identities: Sequence[bytes]) -> None:
        """Somebody uses these: tiers are to keep them longer than others."""
        for level in self._levels:
            here = [each for each in identities if self.held(each) & level.bit]
            if here:
                level.worker.submit(Call(partial(level.store.touch, here), _ignored))

    # ── Down ─────────────────────────────────────────────────────────────────────────────────────

    def offer(self, names: Sequence[BlockName], priority: int = 0, container: int = 0) -> None:
        """These were registered on the device; `container`: what they came with."""
        self._descent.offer(0, names, priority, container)

    def is_offered(self, identity: bytes) -> bool:
        """Whether it waits to be `due`."""
        return bool(self._levels) and identity in self._levels[0].way.queue

    def cancel(self, container: int) -> int:
        """Nobody wants these to be stored any more; how many still waited."""
        return self._descent.cancel(container)

    def due(self, now_s: float) -> list[Waiting]:
        """Blocks to be gathered from the device now, and given to `store`; those that are not there
        any more are left out.
        """
        return self._descent.due(0, now_s)

    def store(self, waiting: Sequence[Waiting], rows: Tensor) -> None:
        """The first tier is to keep these; `rows[i]` is the block of `waiting[i]`, on the host or
        on a device, and is the stack's from now on.
        """
        self._descent.store(waiting, rows)

    # ── Tending ──────────────────────────────────────────────────────────────────────────────────

    def poll(self, now_s: float, *, is_decoding: bool = False) -> list[TierChange]:
        """Take in what the tiers did, and set the next in motion; what happened to names."""
        changes: list[TierChange] = []
        while self._finished:
            level, finished = self._finished.popleft()
            if level is None:  # a peer, whose blocks are not ours
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
        """How long at most until the next `poll`; None: until there are news."""
        if self._ascent.is_waited_for:
            return self._ascent.wait_s(now_s)
        waits = [level.way.wait_s() for level in self._levels]
        return min((wait for wait in waits if wait is not None), default=None)

    def start(self) -> None:
        """Take over what a former life left in the tiers, as far as it is still right, and measure
        each: `status` says what came of it, and what is worth loading is decided by it until blocks
        have come. Others' calls go between.
        """
        self._startings = [Starting(level, self._settings) for level in self._levels]
        for starting in self._startings:
            starting.go_on()

    @property
    def is_probed(self) -> bool:
        """Whether every tier was measured, or cannot be."""
        return all(level.is_probed for level in self._levels)

    def advice(self, device_blocks: int, block_size: int) -> list[str]:
        """What whoever configured the tiers should know, from what was measured until now."""
        tiers = [ProbedTier("device", device_blocks)]
        tiers += [level.probed() for level in self._levels]
        prefill = self._ascent.prefill_tokens_per_s
        if prefill is None:
            return advice(tiers)
        return advice(tiers, Recompute(prefill, block_size, self._settings.block_bytes))

    def clear(self, *, is_shared_kept: bool = False) -> None:
        """Every tier forgets everything, and so does whatever is under way. `is_shared_kept`: but
        for the store in which other workers have blocks, too.
        """
        self._ascent.cancel()
        self._descent.clear()
        for level in self._levels:
            if not (level.is_shared and is_shared_kept):
                level.worker.submit(Call(level.store.clear, _ignored))

    def ask(self, tier: Tier, run: Callable[[BlockTier], T]) -> "Future[T]":
        """Make a call on a tier's thread; for control, from any thread. What it changes is told by
        `poll`. Raises KeyError for a tier that is not here.
        """
        level = {level.tier: level for level in self._levels}[tier]
        return level.worker.ask(lambda: run(level.store))

    def status(self) -> list[TierStatus]:
        """Every tier, and what went through since it was made. From any thread."""
        return [level.status() for level in self._levels]

    def drain(self, hand_over: Callable[[float], None] | None = None) -> int:
        """At the end, before `close`: store what waits, as far as `drain_s` suffices, and it comes
        to a tier that outlives this process; how many blocks were given up. Blocking.

        `hand_over`: gathers what is `due` of the device, and gives it to `store`; None: the device
        is gone, and what waits there is given up.
        """
        news = Event()
        self.on_news = news.set
        self._ascent.cancel()
        given_up = self._descent.end(is_device_gone=hand_over is None)
        until_s = (now_s := time.monotonic()) + self._settings.drain_s
        while self._descent.is_busy and now_s < until_s:
            news.clear()
            self.poll(now_s)
            if hand_over is not None:
                hand_over(now_s)
            if self._descent.is_busy and not self._finished:
                news.wait(until_s - now_s)
            now_s = time.monotonic()
        given_up += self._descent.give_up()
        if given_up:
            log.warning("%d blocks were not stored within %g s", given_up, self._settings.drain_s)
        return given_up

    def close(self, timeout_s: float) -> bool:
        """Store what was given to `store`, and let the tiers go; False if one did not end in time,
        and is left to itself.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._peers is not None:
            self._peers.close()
        ended = [level.worker.close(deadline_s) for level in self._levels]
        for starting in self._startings if all(ended) else []:
            starting.end()
        return all(ended)

    def check_invariants(self) -> None:
        """Assert what must hold after `poll`. O(blocks)."""
        self._ascent.check_invariants()
        for level in self._levels:
            level.way.check_invariants()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, level: WorkingLevel | None, finished: Finished) -> None:
        self._finished.append((level, finished))
        self.on_news()

    def _note(self, level: WorkingLevel, finished: Finished) -> None:
        """First what changed, then what follows from it: who is told that a block could not be
        loaded is not to ask the same tier again. What a tier was found to have goes on down.
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
    """What came of it is in the changes."""
