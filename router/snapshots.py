"""Snapshots of the index in an object store: quicker starts, and nothing else.

    position, states ─▶ slices of the index ─▶ bytes ─▶ object      the live router of lowest id,
                                                                    every so many messages
    object ─▶ bytes ─▶ slices into the index ─▶ position + 1        whoever starts

The event stream remains the truth, and routers never shorten it: without a snapshot, or with an
unusable one, the stream is read from its first message. A rank that is not in the snapshot (it did
not add up, or was not announced) is blind until its next checkpoint, which whoever took the
snapshot was about to ask for, or had asked for: it lies behind the position. If not, the rank's
doubt lasts, and it is asked for.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import uniform

from msgspec import Struct

from router.bus_errors import BusError, LogConflictError
from router.core import RouterCore
from router.dumping import dumped
from router.indexer.errors import SnapshotError
from router.indexer.snapshot import Snapshot, decode_snapshot, encode_snapshot
from router.metrics import RouterMetrics
from router.object_bucket import ObjectBucket
from router.protocol.subjects import Subjects
from router.protocol.values import StreamPosition
from router.publisher.bus import Bus

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""How often it is looked whether a snapshot is due; each time half as long to one and a half."""

RETRY_S = 60.0
"""How long after a failure."""

RESTORE_S = 10.0
"""How long a start waits for a snapshot before it goes on without."""

WRITE_S = 120.0

LIMIT_BYTES = 1 << 30
"""Of a snapshot; 8 bytes a block and rank, for each tier it is in."""


class SnapshotSettings(Struct, frozen=True):
    """`threshold`: messages from one snapshot to the next; 0: none are written nor read.

    `reset`: at the start, drop the snapshot and believe no history.
    """

    threshold: int
    reset: bool
    num_replicas: int


class Snapshots:
    """Restores one index at the start of its process, and takes snapshots of it when due."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        subjects: Subjects,
        settings: SnapshotSettings,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._subjects = subjects
        self._settings = settings
        self._latest: StreamPosition | None = None

    async def restore(self, bus: Bus, end: StreamPosition) -> StreamPosition | None:
        """Where the event stream, which ends there, is to be read on from; None: from its start.

        Raises BusUnavailableError only where the state is to be reset.
        """
        if self._settings.reset:
            await self._object(bus).delete()
            log.info("state is reset: every rank is asked for a checkpoint")
            return end
        if not self._settings.threshold:
            return None
        try:
            async with asyncio.timeout(RESTORE_S):
                self._latest = await self._restore(bus, end)
        except TimeoutError:
            self._unusable("slow", f"not restored within {RESTORE_S} s")
        except SnapshotError as error:
            self._unusable(error.problem, error.detail)
        except BusError as error:
            self._unusable(error.code, str(error))
        return self._latest

    async def run(
        self,
        bus: Bus,
        position: Callable[[], StreamPosition | None],
        is_our_turn: Callable[[], bool],
    ) -> None:
        """Take a snapshot whenever one is due and it is our turn, until cancelled.

        `position`: how far the index has followed the event stream; None while it has not.
        """
        delay_s = CHECK_S
        while self._settings.threshold:
            await asyncio.sleep(delay_s * uniform(0.5, 1.5))
            reached, delay_s = position(), CHECK_S
            if reached is None or not self._is_due(reached) or not is_our_turn():
                continue
            try:
                async with asyncio.timeout(WRITE_S):
                    await self._take(bus, reached)
            except LogConflictError:
                log.info("another router has written a snapshot")
            except (BusError, SnapshotError, TimeoutError) as error:
                log.warning("no snapshot is written: %s", error or "it took too long")
                self._metrics.snapshots.failures.inc()
                delay_s = RETRY_S
                continue
            self._latest = reached

    def _is_due(self, reached: StreamPosition) -> bool:
        known = self._latest
        is_same_stream = known is not None and known.created == reached.created
        since = reached.sequence - (known.sequence if known and is_same_stream else 0)
        return since >= self._settings.threshold

    async def _take(self, bus: Bus, position: StreamPosition) -> None:
        with self._timed("take"):
            payload = await self._encoded(position)
        with self._timed("write"):
            await self._object(bus).write(payload)
        self._metrics.snapshots.written.inc()
        self._metrics.snapshots.bytes.inc(len(payload))
        log.info("wrote a snapshot of %d bytes, as of %s", len(payload), position)

    async def _encoded(self, position: StreamPosition) -> memoryview:
        """Nothing awaits between the position, the states and the first slice."""
        states = self._core.index.rank_states()
        dump = await dumped(self._core)
        return await asyncio.to_thread(encode_snapshot, position, states, dump)

    async def _restore(self, bus: Bus, end: StreamPosition) -> StreamPosition | None:
        with self._timed("read"):
            payload = await self._object(bus).read()
        if payload is None:
            return None
        snapshot = await asyncio.to_thread(decode_snapshot, payload)
        position = snapshot.position
        if position.created != end.created or position.sequence > end.sequence:
            raise SnapshotError("other stream", f"of {position}, and the stream ends at {end}")
        with self._timed("restore"):
            await self._load(snapshot)
        return position

    async def _load(self, snapshot: Snapshot) -> None:
        ranks = 0
        self._core.begin_fill()
        for each in snapshot.ranks:
            if not self._core.resume(each, time.monotonic()):
                continue
            ranks += 1
            self._metrics.snapshots.restored_blocks.inc(each.block_count)
            while self._core.apply_slice():
                await asyncio.sleep(0)
        self._metrics.snapshots.restored.inc()
        log.info("restored %d of %d ranks as of %s", ranks, len(snapshot.ranks), snapshot.position)

    def _object(self, bus: Bus) -> ObjectBucket:
        return ObjectBucket(
            bus,
            self._subjects.snapshot_bucket,
            self._subjects.snapshot_object,
            limit_bytes=LIMIT_BYTES,
            num_replicas=self._settings.num_replicas,
        )

    def _unusable(self, reason: str, detail: str) -> None:
        log.warning("starting without a snapshot (%s): %s", reason, detail)
        self._metrics.snapshots.unusable.labels(reason).inc()

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self._metrics.snapshots.seconds.labels(step).observe(time.monotonic() - start_s)
