"""The order of one engine's batches: which to apply, which to request again, and of which life.

An engine numbers its batches from 0 in every life, and does not publish which life it is; a
reconnecting socket hides a restart, and messages may be dropped. So a connection is trusted only
after one of its live batches was found, byte for byte, in a replay that was requested after the
connection was made. Until then, and from the first anomaly on, live batches are held back and a
replay is requested, from a few batches before the cursor: if it repeats the known batches, the life
continues, otherwise a new one begins.

    connected, anomaly, probe ──▶ REPLAYING ──end──▶ FOLLOWING (live batches at the cursor apply)
                                   │     ▲
                              failed▼     │back-off
                                  WAITING ┘──too often──▶ BLIND: `blind_order`, and from time to
                                                          time all batches are requested again

Assumptions: batches between two connection events are of one life; a replay's batches are of one
life; the engine's buffer has a batch as soon as it is published, and has at least one.
"""

import enum

from msgspec import Struct

from router.publisher.batch_order.order_without_replay import UnreplayedOrder
from router.publisher.batch_order.position import (
    BatchBuffer,
    BufferedBatch,
    Cursor,
    SavedPosition,
)
from router.publisher.batch_order.replay_schedule import (
    PROBE_INTERVAL_S,
    ReplaySchedule,
    ReplayTimes,
)
from router.publisher.batch_order.steps import Batch, BatchOrderCounters, Step, batch_of

UNKNOWN_S = 3_600.0
"""The assumed duration of missing events where the begin is unknown: at the start."""

_TWO_ENGINES = "are both endpoints of one engine?"


class BatchOrderSettings(Struct, frozen=True):
    """Limits and intervals.

    `overlap_batches`: known batches that a replay has to repeat. `reorder_batches` and `reorder_s`:
    the number of batches that wait for a late one, and the time, if no replay is available.
    """

    can_replay: bool = True
    fingerprints: int = 10_000
    overlap_batches: int = 4
    held_batches: int = 10_000
    held_bytes: int = 64 << 20
    replay_times: ReplayTimes = ReplayTimes()
    reorder_batches: int = 64
    reorder_s: float = 0.1


class _State(enum.Enum):
    UNCONNECTED = enum.auto()
    FOLLOWING = enum.auto()
    REPLAYING = enum.auto()
    WAITING = enum.auto()
    BLIND = enum.auto()


_BLIND = _State.BLIND


class BatchOrder:
    """The order of one rank's batches. Every input returns the steps to take, in order.

    `saved`: the position that a former process had reached, to continue if the engine still lives.
    """

    __slots__ = (
        "_asked_cursor",
        "_asked_first",
        "_blind",
        "_disconnected_s",
        "_doubt_since_s",
        "_held",
        "_is_trusted",
        "_is_verified",
        "_position",
        "_problem",
        "_proven_s",
        "_replayed_to",
        "_schedule",
        "_settings",
        "_state",
        "_wants_all",
        "counters",
    )

    def __init__(
        self, now_s: float, settings: BatchOrderSettings, saved: SavedPosition | None = None
    ) -> None:
        self.counters = BatchOrderCounters()
        self._settings = settings
        self._position = Cursor(settings.fingerprints, self.counters, saved)
        self._blind = UnreplayedOrder(
            self._position, self.counters, settings.reorder_batches, settings.reorder_s
        )
        self._held = BatchBuffer(settings.held_batches, settings.held_bytes)
        self._state = _State.UNCONNECTED
        self._is_trusted = False
        self._is_verified = False
        self._wants_all = False
        self._schedule = ReplaySchedule(settings.replay_times, now_s)
        self._asked_first = self._asked_cursor = 0
        self._problem: str | None = None
        self._replayed_to: int | None = None
        self._disconnected_s: float | None = now_s - UNKNOWN_S
        self._doubt_since_s: float | None = None
        self._proven_s = now_s - UNKNOWN_S

    @property
    def cursor(self) -> int:
        """The sequence number of the next batch."""
        return self._position.cursor

    @property
    def problem(self) -> str | None:
        """The reason why the last replay failed, or None."""
        return self._problem

    @property
    def is_connected(self) -> bool:
        """True if there is a connection to the engine."""
        return self._disconnected_s is None

    @property
    def is_blind(self) -> bool:
        """True if replays have failed too often; they are tried again later."""
        return self._state is _BLIND

    @property
    def is_following(self) -> bool:
        """True if a replay has proven the life of the connection; remains true during a probe."""
        return self._is_verified and self._state in (_State.FOLLOWING, _State.REPLAYING)

    def save(self) -> SavedPosition:
        """Return the position after the steps so far."""
        return self._position.save()

    def waiting_s(self, now_s: float) -> float:
        """Return for how long batches may have been missing.

        Batches missed without a connection are missing until a replay has delivered them. The
        engine may also have published more, or begun a new life, since the last proof of the
        contrary: an expected batch, or a replay's end.
        """
        since = (self._disconnected_s, self._doubt_since_s, self._proven_s)
        return now_s - min(since_s for since_s in since if since_s is not None)

    def connected(self, now_s: float) -> list[Step]:
        """Process a new connection: the live batches that follow are all of one life."""
        self._doubt(now_s if self._disconnected_s is None else self._disconnected_s)
        self._disconnected_s = None
        self._distrust()
        self._held.take()  # They are older than the replay that is requested next.
        self._schedule.succeeded()
        if self._settings.can_replay:
            self._request_replay(now_s)
        else:
            self._give_up("connected, and no replay is available", now_s)
        return self._position.take_steps()

    def disconnected(self, now_s: float) -> list[Step]:
        """Process the loss of the connection, after all its batches were passed on."""
        if self._disconnected_s is None:
            self._disconnected_s = now_s
        self._distrust()
        self._blind.flush()
        return self._position.take_steps()

    def live(self, sequence: int, payload: bytes, now_s: float, fresh_at_s: float) -> list[Step]:
        """Process a live batch.

        `fresh_at_s`: the connection has delivered all batches published before that time.
        """
        batch = batch_of(sequence, payload)
        self._schedule.live(now_s)
        if self._state is _BLIND:
            self._blind.live(batch, now_s)
            if not self._blind.early:
                self._proven_s = max(self._proven_s, fresh_at_s)
        elif self._is_trusted and sequence == self._position.cursor:
            self._position.apply(batch)
            self._proven_s = max(self._proven_s, fresh_at_s)
        else:
            self._live_in_doubt(batch, now_s)
        return self._position.take_steps()

    def replayed(self, sequence: int, payload: bytes, now_s: float) -> list[Step]:
        """Process a batch of the last requested replay."""
        if self._state is _State.REPLAYING:
            self._replayed(batch_of(sequence, payload), now_s)
        return self._position.take_steps()

    def replay_ended(self, now_s: float) -> list[Step]:
        """Process the end of the replay."""
        if self._state is _State.REPLAYING:
            self._replay_ended(now_s)
        return self._position.take_steps()

    def replay_failed(self, reason: str, now_s: float) -> list[Step]:
        """Process a replay that was rejected, timed out, or broke off."""
        if self._state is _State.REPLAYING:
            self._retry(reason, now_s)
        return self._position.take_steps()

    def tick(self, now_s: float, probe_interval_s: float = PROBE_INTERVAL_S) -> list[Step]:
        """Process the passing of time; to be called at `due_s`, or more often."""
        if self._state is _BLIND:
            self._blind.tick(now_s)
        if now_s >= self._replay_due_s(probe_interval_s):
            self._request_replay(now_s)
        return self._position.take_steps()

    def due_s(self, probe_interval_s: float = PROBE_INTERVAL_S) -> float:
        """Return the time at which the next tick has work to do."""
        due_s = self._replay_due_s(probe_interval_s)
        return min(due_s, self._blind.due_s) if self._state is _BLIND else due_s

    def _replay_due_s(self, probe_interval_s: float) -> float:
        can_replay = self._settings.can_replay and self._disconnected_s is None
        if self._state is _State.FOLLOWING:
            return self._schedule.probe_due_s(probe_interval_s)
        if self._state is _State.WAITING or (self._state is _BLIND and can_replay):
            return self._schedule.retry_due_s
        return float("inf")

    def _live_in_doubt(self, batch: Batch, now_s: float) -> None:
        is_following = self._state is _State.FOLLOWING
        if is_following and self._is_verified and self._position.has(batch):
            self.counters.duplicates += 1
            self._is_trusted = True
            return
        if not self._held.add(BufferedBatch(batch, self.counters.replays)):
            self.counters.held_overflows += 1
        self._doubt(now_s)
        if is_following:
            self._request_replay(now_s)

    def _request_replay(self, now_s: float) -> None:
        position = self._position
        if self._state is _BLIND:
            self._blind.flush()
            self._wants_all = not position.is_whole
        if self._wants_all or position.first_known == position.cursor:
            self._asked_first = self._asked_cursor = 0
        else:
            overlap = self._settings.overlap_batches
            self._asked_first = max(position.first_known, position.cursor - overlap)
            self._asked_cursor = position.cursor
        self._state = _State.REPLAYING
        self._schedule.replay_requested(now_s)
        self._replayed_to = None
        self._doubt(now_s)
        position.request_replay(self._asked_first)

    def _replayed(self, batch: Batch, now_s: float) -> None:
        if self._replayed_to is None and batch.sequence >= self._asked_first:
            self._begin_replay(batch)
        elif batch.sequence != self._replayed_to:
            self._retry(f"replay: unexpected batch {batch.sequence}", now_s)
            return
        self._replayed_to = batch.sequence + 1
        if batch.sequence == self._position.cursor:
            self._position.apply(batch)
        elif batch.sequence >= self._position.first_known and not self._position.has(batch):
            self._other_life(f"batch {batch.sequence} differs from the one applied before", now_s)

    def _begin_replay(self, first: Batch) -> None:
        """Process a replay's first batch; if no known batch can be compared, start a new life."""
        position = self._position
        is_whole = self._asked_cursor == 0
        if is_whole and not position.is_fresh:
            self._new_life("its whole history is replayed")
        elif first.sequence >= position.cursor and not self._is_reached(first) and not is_whole:
            self._new_life(f"the engine's buffer begins after batch {position.cursor - 1}")
        self._wants_all = False
        if first.sequence > position.cursor:
            position.lose(first.sequence - 1, "history: the engine's buffer begins later")

    def _is_reached(self, first: Batch) -> bool:
        """Apply the held batches that lead from the cursor to a replay's first batch.

        Returns False, without a change, if one of these batches or the first one is not held, or if
        no replay has verified the connection and the life is not fresh. Otherwise the connection is
        of the replay's life, and of the life verified since the connection was made.
        """
        position, held = self._position, self._held.by_sequence()
        missing = range(position.cursor, first.sequence)
        is_known = position.is_fresh or self._is_verified
        if not is_known or held.get(first.sequence) != first or not held.keys() >= set(missing):
            return False
        for sequence in missing:
            position.apply(held[sequence])
        return True

    def _replay_ended(self, now_s: float) -> None:
        if (self._replayed_to or 0) < self._asked_cursor:
            self._other_life(f"it has no batch {self._asked_cursor - 1}", now_s)
            return
        if self._replayed_to is None and not self._position.is_fresh:
            self._new_life("the engine has published nothing")
        self._wants_all = False
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Process the held batches after a replay.

        Each one is known, or follows, or has to be requested again, or is of another life. It is of
        another life if it arrived before the replay was requested and is not in the replay.
        """
        self._state = _State.FOLLOWING
        self._is_verified = self._disconnected_s is None
        self._proven_s = self._schedule.asked_s
        overflowed = self._held.overflowed
        stale = self.counters.stale
        for held in self._held.take():
            self._settle_one(held)
        if self._held or overflowed:
            self._retry(f"live batches are not in the replay: {_TWO_ENGINES}", now_s)
        elif self.counters.stale > stale and not self._is_trusted:
            self._fail(
                f"live batches are of another life than the replay: {_TWO_ENGINES}",
                now_s,
            )
        else:
            self._schedule.succeeded()
            self._problem = None
        if self._state is _State.FOLLOWING:
            self._doubt_since_s = None

    def _settle_one(self, held: BufferedBatch) -> None:
        batch = held.batch
        if self._position.has(batch):
            self.counters.duplicates += 1
            self._is_trusted = self._is_verified
        elif batch.sequence < self._position.cursor or held.replays_asked < self.counters.replays:
            self.counters.stale += 1
        elif self._is_trusted and batch.sequence == self._position.cursor:
            self._position.apply(batch)
        else:
            self._held.add(held)

    def _other_life(self, reason: str, now_s: float) -> None:
        self._new_life(reason)
        self._request_replay(now_s)

    def _new_life(self, reason: str) -> None:
        self._distrust()
        self._position.new_life(reason)

    def _distrust(self) -> None:
        self._is_trusted = self._is_verified = False

    def _doubt(self, since_s: float) -> None:
        if self._doubt_since_s is None or since_s < self._doubt_since_s:
            self._doubt_since_s = since_s

    def _retry(self, reason: str, now_s: float) -> None:
        """Retry later. A failed replay with new batches restarts the count of failures."""
        if (self._replayed_to or 0) > max(self._asked_cursor, self._asked_first + 1):
            self._schedule.succeeded()
        self._state = _State.WAITING
        self._fail(reason, now_s)

    def _fail(self, reason: str, now_s: float) -> None:
        self.counters.replay_failures += 1
        self._problem = reason
        if not self._schedule.failed(now_s):
            self._give_up(reason, now_s)

    def _give_up(self, reason: str, now_s: float) -> None:
        """Continue without replays; batches of a trusted connection remain applied."""
        if not self._is_trusted:
            self._lose_track(reason)
        self._state = _BLIND
        self._is_trusted = self._disconnected_s is None
        self._schedule.given_up(now_s)
        self._doubt_since_s = None
        for held in self._held.take():
            if not self._position.has(held.batch):
                self._blind.live(held.batch, now_s)

    def _lose_track(self, reason: str) -> None:
        if not self._position.is_fresh:
            self._position.new_life(reason)
        self._position.lose(None, reason)
        self._blind.reopen()
