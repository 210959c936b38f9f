"""Snapshots of the index in an object store, exported in slices; they only make starts faster.

Snapshots of the index in an object store, which only make starts faster.

    position, states ─▶ slices of the index ─▶ bytes ─▶ object      the live router of lowest id,
                                                                    every `threshold` messages
    object ─▶ bytes ─▶ slices into the index ─▶ position + 1        a router that starts

The event stream remains the source of truth, and routers never shorten it: without a snapshot, or
with an unusable one, the stream is read from its first message. A rank that is not in the snapshot
(its state was inconsistent, or it was not announced) is blind until its next checkpoint. The router
that took the snapshot requested that checkpoint, so it follows the position in the stream. If it
does not, the rank stays degraded, and the checkpoint is requested again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import uniform

from router.config.server import BusConfig
from router.core.commands import ApplySlice, BeginFill, Resume
from router.core.core import RouterCore
from router.indexer.base import SnapshotError
from router.indexer.dumps import IndexDump
from router.indexer.snapshot import Snapshot, decode_snapshot, encode_snapshot
from router.ingest.object_store import ObjectBucket
from router.observability.metrics import RouterMetrics
from router.protocol.subjects import Subjects
from router.protocol.values import Scope, StreamPosition
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusError, LogConflictError


async def dumped(core: RouterCore, only: Scope | None = None) -> IndexDump:
    """Return what is held while the export runs, in one scope or in all.

    Raises IndexDisabledError.
    """
    event_ids, slices = core.index.event_ids(), []
    for scope, part in core.dump_slices():
        if only in (None, scope):
            slices.append((scope, part))
        await asyncio.sleep(0)
    return IndexDump(event_ids, slices)


log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Interval of checks for a due snapshot, in seconds; varied by a random factor of 0.5 to 1.5."""

RETRY_S = 60.0
"""Delay after a failure, in seconds."""

RESTORE_S = 10.0
"""Time limit for restoring a snapshot, in seconds; beyond it the start continues without one."""

WRITE_S = 120.0

LIMIT_BYTES = 1 << 30
"""Size limit of a snapshot. It takes 8 bytes per block, rank and tier."""


class Snapshots:
    """Restores one index at the start of its process, and takes snapshots of it when due."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        subjects: Subjects,
        config: BusConfig,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._subjects = subjects
        self._config = config
        self._latest: StreamPosition | None = None

    async def restore(self, bus: Bus, end: StreamPosition) -> StreamPosition | None:
        """Return the position to read the event stream from; None means its start.

        `end` is the position behind the last message. Raises BusUnavailableError only if the state
        is to be reset.
        """
        if self._config.reset_state:
            await self._object(bus).delete()
            log.info("state reset: a checkpoint is requested from every rank")
            return end
        if not self._config.snapshot_threshold:
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
        """Take a snapshot whenever one is due and `is_our_turn`, until cancelled.

        `position` returns how far the index has followed the event stream, or None while it has not
        followed it.
        """
        delay_s = CHECK_S
        while self._config.snapshot_threshold:
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
                log.warning("snapshot not written: %s", error or "time limit exceeded")
                self._metrics.snapshot_failures.inc()
                delay_s = RETRY_S
                continue
            self._latest = reached

    def _is_due(self, reached: StreamPosition) -> bool:
        known = self._latest
        is_same_stream = known is not None and known.created == reached.created
        since = reached.sequence - (known.sequence if known and is_same_stream else 0)
        return since >= self._config.snapshot_threshold

    async def _take(self, bus: Bus, position: StreamPosition) -> None:
        with self._timed("take"):
            payload = await self._encoded(position)
        with self._timed("write"):
            await self._object(bus).write(payload)
        self._metrics.snapshots_written.inc()
        self._metrics.snapshot_bytes.inc(len(payload))
        log.info("wrote a snapshot of %d bytes, as of %s", len(payload), position)

    async def _encoded(self, position: StreamPosition) -> memoryview:
        """Return the encoded index; nothing awaits between position, states and first slice."""
        states = self._core.index.rank_states()
        slices = (await dumped(self._core)).slices
        class_slices = []
        for part in self._core.index.dump_class_slices():
            class_slices.append(part)
            await asyncio.sleep(0)
        return await asyncio.to_thread(encode_snapshot, position, states, slices, class_slices)

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
        self._core.handle(BeginFill(), 0.0)
        for each in snapshot.ranks:
            if not self._core.handle(Resume.of(each), time.monotonic())[0]:
                continue
            ranks += 1
            self._metrics.snapshot_restored_blocks.inc(each.block_count)
            while self._core.handle(ApplySlice(), 0.0)[0]:
                await asyncio.sleep(0)
        self._metrics.snapshots_restored.inc()
        log.info("restored %d of %d ranks as of %s", ranks, len(snapshot.ranks), snapshot.position)

    def _object(self, bus: Bus) -> ObjectBucket:
        return ObjectBucket(
            bus,
            self._subjects.snapshot_bucket,
            self._subjects.snapshot_object,
            limit_bytes=LIMIT_BYTES,
            num_replicas=self._config.num_replicas,
        )

    def _unusable(self, reason: str, detail: str) -> None:
        log.warning("starting without a snapshot (%s): %s", reason, detail)
        self._metrics.snapshots_unusable.labels(reason).inc()

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self._metrics.snapshot_seconds.labels(step).observe(time.monotonic() - start_s)
