"""An engine's batches off its ZMQ sockets, in the order that the engine's log makes of them.

One loop polls everything at once, then takes what is there, up to a bound, without waiting: a wake-
up of the event loop is paid for hundreds of batches, and nothing runs beside it.

    SUB ──live──▶ EngineLog ──▶ steps
    DEALER ──replayed──▶ │
          ◀───Replay─────┘
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import zmq
import zmq.asyncio
from msgspec import Struct

from router.publisher.engine_address import EngineAddress
from router.publisher.engine_frames import END_OF_REPLAY, parse_live, parse_replayed
from router.publisher.engine_log import EngineLog
from router.publisher.engine_steps import Replay, Step
from router.publisher.zmq_sockets import Condition, ReplayCall, Subscription

MAX_LOT = 256
"""So many messages are taken at once from a socket."""


class SourceTimes(Struct, frozen=True):
    """Bounds of waiting. `replay_s` is for each answer, not for all of them."""

    tick_s: float = 0.05
    connect_s: float = 2.0
    retry_s: float = 0.1
    replay_s: float = 2.0


class SourceCounters:
    """What happened on the sockets since the start; `heard_s`: when the last message came."""

    __slots__ = ("connections", "failed_connections", "garbage", "heard_s", "messages")

    def __init__(self) -> None:
        self.messages = 0
        self.heard_s: float | None = None
        self.garbage = 0
        self.connections = 0
        self.failed_connections = 0


class ZmqSource:
    """Reader of one rank's batches; connects again whenever the connection is lost."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: EngineAddress,
        log: EngineLog,
        times: SourceTimes,
        counters: SourceCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._address = address
        self._log = log
        self._times = times
        self._clock = clock
        self._subscription: Subscription | None = None
        self._subscribed_s = float("-inf")
        self._replay: ReplayCall | None = None
        self._answered_s = 0.0
        self._ticked_s = float("-inf")
        self._steps: list[Step] = []
        self._counters = counters

    async def read(self) -> AsyncGenerator[list[Step], None]:
        """Steps in order, many at once, or none at a tick, without end; only cancellation or
        closing stops it. Replays are asked for here, and are not among the steps.
        """
        try:
            while True:
                await self._wait()
                self._read_live()
                self._read_replay()
                has_ticked = self._tick()
                if self._steps or has_ticked:
                    steps, self._steps = self._steps, []
                    yield steps
                await asyncio.sleep(0)
        finally:
            self._close_replay()
            self._close_subscription()

    async def _wait(self) -> None:
        poller = zmq.asyncio.Poller()
        if self._subscription is not None:
            poller.register(self._subscription.socket, zmq.POLLIN)
            poller.register(self._subscription.monitor, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay.socket, zmq.POLLIN)
        await poller.poll(int(self._times.tick_s * 1000))

    def _read_live(self) -> None:
        if self._subscription is None:
            self._subscribe_when_due()
            return
        before = self._subscription.condition
        now = self._subscription.look()
        if before is Condition.CONNECTING:
            self._connected(now)
        if self._subscription is not None and Condition.CONNECTING not in (before, now):
            self._receive_live(self._subscription)
        if before is Condition.CONNECTED and now is Condition.LOST:
            self._close_subscription()
            self._take(self._log.disconnected(self._clock()))

    def _subscribe_when_due(self) -> None:
        now_s = self._clock()
        if now_s >= self._subscribed_s + self._times.retry_s:
            self._subscribed_s = now_s
            self._subscription = Subscription(
                self._context, self._address.events, self._address.topic
            )

    def _connected(self, condition: Condition) -> None:
        now_s = self._clock()
        is_late = now_s >= self._subscribed_s + self._times.connect_s
        if condition is Condition.CONNECTED:
            self._counters.connections += 1
            self._take(self._log.connected(now_s))
        elif condition is Condition.LOST or is_late:
            self._counters.failed_connections += 1
            self._close_subscription()

    def _receive_live(self, subscription: Subscription) -> None:
        now_s = self._clock()
        for frames in subscription.receive(MAX_LOT):
            self._counters.messages += 1
            self._counters.heard_s = now_s
            numbered = parse_live(frames)
            if numbered is None:
                self._counters.garbage += 1
            else:
                self._take(self._log.live(*numbered, now_s))

    def _read_replay(self) -> None:
        replay = self._replay
        if replay is None:
            return
        now_s = self._clock()
        for frames in replay.receive(MAX_LOT):
            self._answered_s = self._counters.heard_s = now_s
            self._take_answer(frames, now_s)
            if self._replay is not replay:
                return
        if now_s >= self._answered_s + self._times.replay_s:
            self._close_replay()
            self._take(self._log.replay_failed("replay: no answer", now_s))

    def _take_answer(self, frames: list[bytes], now_s: float) -> None:
        numbered = parse_replayed(frames)
        if numbered is not None and numbered[0] != END_OF_REPLAY:
            self._take(self._log.replayed(*numbered, now_s))
            return
        self._close_replay()
        if numbered is None:
            self._counters.garbage += 1
            self._take(self._log.replay_failed("replay: an answer that is none", now_s))
        else:
            self._take(self._log.replay_ended(now_s))

    def _tick(self) -> bool:
        now_s = self._clock()
        if now_s < self._ticked_s + self._times.tick_s:
            return False
        self._ticked_s = now_s
        self._take(self._log.tick(now_s))
        return True

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Replay):
                self._ask(step.first)
            else:
                self._steps.append(step)

    def _ask(self, first: int) -> None:
        self._close_replay()
        if self._address.replay is not None:
            self._answered_s = self._clock()
            self._replay = ReplayCall(self._context, self._address.replay, first)

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _close_subscription(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
