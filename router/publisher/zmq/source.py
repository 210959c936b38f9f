"""The source of an engine's batches: its ZMQ sockets, read in the order that the engine's log sets.

One task sleeps until a socket has messages or something is due, then reads what is present, up to a
limit, without waiting, and pauses shortly for more messages. So one wake-up of the event loop
serves several batches, and an idle engine costs only its probes.

    SUB ──live──▶ EngineLog ──▶ steps
    DEALER ──replayed──▶ │
          ◀───Replay─────┘
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import zmq

from router.publisher.batch_order.address import EngineAddress
from router.publisher.batch_order.batch_order import BatchOrder
from router.publisher.batch_order.frames import (
    END_OF_REPLAY,
    parse_live,
    parse_replayed,
    replayed_topic,
)
from router.publisher.batch_order.steps import Replay, Step
from router.publisher.batch_order.topic_check import TopicCheck
from router.publisher.feed.log_limiter import LogLimiter
from router.publisher.feed.pacing import Pacing
from router.publisher.zmq.connection_monitor import Condition
from router.publisher.zmq.sockets import (
    MOST_WAITING_BYTES,
    Context,
    ReplayCalls,
    Subscription,
)
from router.publisher.zmq.wakeups import Wakeups

_MAX_NAMED_FRAMES = 8

REST_S = 0.005
"""The pause between lots if no more messages were waiting."""


class SourceStatus:
    """Counters and state of the sockets since the start.

    `last_seen_s`: the time of the last message; `problem`: the reason why there is currently no
    connection or no replay.
    """

    __slots__ = (
        "complaints",
        "connections",
        "failed_connections",
        "garbage",
        "last_seen_s",
        "messages",
        "overflows",
        "problem",
    )

    def __init__(self) -> None:
        self.messages = 0
        self.garbage = 0
        self.connections = 0
        self.failed_connections = 0
        self.overflows = 0
        self.last_seen_s: float | None = None
        self.problem: str | None = None
        self.complaints = LogLimiter()


class ZmqSource:
    """A reader of one rank's batches; it connects again whenever the connection is lost."""

    def __init__(
        self,
        context: Context,
        address: EngineAddress,
        log: BatchOrder,
        status: SourceStatus,
        pacing: Pacing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._address = address
        self._log = log
        self._status = status
        self._pacing = pacing
        self._clock = clock
        self._wakeups = Wakeups()
        self._subscription: Subscription | None = None
        self._subscribed_s = float("-inf")
        self._failures = 0
        self._calls: ReplayCalls | None = None
        self._is_replaying = False
        self._answered_s = 0.0
        self._number = next(pacing.numbers)
        self._tick_due_s = float("-inf")
        self._unheard = TopicCheck()
        self._steps: list[Step] = []
        self._drained_s = float("-inf")

    async def read(self) -> AsyncGenerator[list[Step], None]:
        """Yield steps in order: many at once, or none at a tick.

        Runs until it is cancelled or closed. Replays are requested here, and are not among the
        steps.
        """
        try:
            while True:
                await self._wakeups.wait(self._due_s() - self._clock())
                self._read_live()
                self._read_replay()
                has_ticked = self._tick()
                if self._steps or has_ticked:
                    steps, self._steps = self._steps, []
                    yield steps
                    if steps and not self._wakeups.is_awake:
                        await asyncio.sleep(REST_S)
        finally:
            self._close_calls()
            self._close_subscription()

    def _due_s(self) -> float:
        pacing = self._pacing
        due_s = [self._tick_due_s, self._log.due_s(pacing.probe_interval_s)]
        if self._subscription is None:
            due_s.append(self._subscribe_due_s())
        elif self._subscription.watch.condition is Condition.CONNECTING:
            due_s.append(self._subscribed_s + pacing.patience_s)
        if self._is_replaying:
            due_s.append(self._answered_s + pacing.patience_s)
        return min(due_s)

    def _read_live(self) -> None:
        if self._subscription is None:
            self._subscribe_when_due()
            return
        before = self._subscription.watch.condition
        now = self._subscription.watch.look()
        if before is Condition.CONNECTING:
            self._connecting(self._subscription, now)
            return
        self._receive_live(self._subscription)
        if self._subscription.is_overflowing:
            self._status.overflows += 1
            limit = f"{MOST_WAITING_BYTES} bytes of its messages wait, and are dropped"
            self._disconnect(f"{limit} (allowed: less, at {self._address.events})")
        elif now is Condition.LOST:
            self._disconnect(f"its connection at {self._address.events} was lost")

    def _disconnect(self, why: str) -> None:
        """Drop the connection and what waits on it; a replay follows the next connection."""
        self._close_subscription()
        self._note_problem(why)
        self._take(self._log.disconnected(self._clock()))

    def _subscribe_due_s(self) -> float:
        return self._subscribed_s + self._pacing.retry_s(self._failures)

    def _subscribe_when_due(self) -> None:
        now_s = self._clock()
        if now_s < self._subscribe_due_s():
            return
        self._subscribed_s = now_s
        try:
            self._subscription = Subscription(
                self._context,
                self._address.events,
                self._address.topic,
                self._wakeups,
            )
        except zmq.ZMQError as error:
            self._connection_failed(str(error))

    def _connecting(self, subscription: Subscription, now: Condition) -> None:
        now_s = self._clock()
        if now is Condition.CONNECTED:
            self._failures = 0
            self._status.connections += 1
            self._status.problem = None
            self._unheard.connected()
            self._drained_s = now_s
            self._take(self._log.connected(now_s))
            self._wakeups.wake()
        elif now is Condition.LOST or now_s >= self._subscribed_s + self._pacing.patience_s:
            self._close_subscription()
            self._connection_failed(subscription.watch.failure)

    def _connection_failed(self, why: str) -> None:
        self._failures += 1
        self._status.failed_connections += 1
        self._note_problem(f"cannot connect to its events at {self._address.events}: {why}")

    def _receive_live(self, subscription: Subscription) -> None:
        now_s = self._clock()
        lot = list(subscription.receive())
        if lot and subscription.is_drained:
            self._drained_s = now_s
        for frames in lot:
            self._status.messages += 1
            self._status.last_seen_s = now_s
            self._unheard.live()
            numbered = parse_live(frames)
            if numbered is None:
                self._status.garbage += 1
                self._note_problem(_no_batch(self._address.events, frames))
            else:
                self._take(self._log.live(*numbered, now_s, self._drained_s))

    def _read_replay(self) -> None:
        calls, now_s = self._calls, self._clock()
        for frames in calls.receive() if calls is not None else ():
            self._answered_s = self._status.last_seen_s = now_s
            self._take_answer(frames, now_s)
            if self._calls is not calls:
                return
        if calls is not None and calls.is_cut_off:
            self._status.overflows += 1
            dropped = f"{MOST_WAITING_BYTES} bytes of it waited, and what followed is dropped"
            self._replay_failed(dropped, now_s)
        elif self._is_replaying and now_s >= self._answered_s + self._pacing.patience_s:
            why = "no socket available" if calls is None else calls.failure
            self._replay_failed(why, now_s)

    def _take_answer(self, frames: list[bytes], now_s: float) -> None:
        numbered = parse_replayed(frames)
        if not self._is_replaying or numbered is None:
            self._status.garbage += 1
            self._replay_failed("the endpoint responds with something other than a batch", now_s)
        elif numbered[0] == END_OF_REPLAY:
            self._end_replay(now_s)
        else:
            self._unheard.replayed(replayed_topic(frames))
            self._take(self._log.replayed(*numbered, now_s))

    def _end_replay(self, now_s: float) -> None:
        if self._calls is not None:
            self._calls.answered()
        self._is_replaying = False
        self._tick_due_s = now_s  # A proof of freshness is used at once.
        self._take(self._log.replay_ended(now_s))
        self._unheard.replay_ended(self._log.cursor)
        if self._log.is_connected:
            self._note_problem(self._unheard.problem(self._address.topic))

    def _replay_failed(self, why: str, now_s: float) -> None:
        self._close_calls()
        reason = f"no replay from {self._address.replay}: {why}"
        self._note_problem(reason)
        self._take(self._log.replay_failed(reason, now_s))

    def _tick(self) -> bool:
        now_s = self._clock()
        self._take(self._log.tick(now_s, self._pacing.probe_interval_s))
        if now_s < self._tick_due_s:
            return False
        self._tick_due_s = self._pacing.next_tick_s(self._number, now_s)
        return True

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Replay):
                self._request_replay(step.first)
            else:
                self._steps.append(step)

    def _request_replay(self, first: int) -> None:
        """Request a replay. An unfinished earlier request is void, and so is its connection."""
        if self._is_replaying:
            self._close_calls()
        self._answered_s = self._clock()
        self._unheard.replay_requested(self._log.cursor)
        try:
            if self._calls is None and self._address.replay is not None:
                self._calls = ReplayCalls(self._context, self._address.replay, self._wakeups)
            if self._calls is not None:
                self._calls.request(first)
        except zmq.ZMQError as error:
            self._close_calls()
            self._note_problem(f"cannot ask for replays at {self._address.replay}: {error}")
        self._is_replaying = True

    def _note_problem(self, problem: str | None) -> None:
        """Set the current problem; a new one is logged once."""
        if problem is not None and problem != self._status.problem:
            self._status.complaints.add(problem)
        self._status.problem = problem

    def _close_calls(self) -> None:
        self._is_replaying = False
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _close_subscription(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


def _no_batch(endpoint: str, frames: list[bytes]) -> str:
    sizes = ", ".join(str(len(frame)) for frame in frames[:_MAX_NAMED_FRAMES])
    return (
        f"messages of {endpoint} are not KV events: frames of {sizes} bytes (allowed: three, "
        "topic, sequence (8 bytes) and batch)"
    )
