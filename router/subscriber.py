"""From the bus into the core: the event stream and the load reports.

Foreign bytes are counted, told (at most once per interval) and dropped, one message at a time. What
a dropped message would have said shows as a gap or a differing digest, and is healed by a
checkpoint.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from router.core import RouterCore
from router.errors import WireError
from router.indexer.event_log import Verdict
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.protocol.events import LogMessage, decode_log_message
from router.protocol.loads import LoadReport, decode_load_report
from router.protocol.subjects import Subjects, rank_of
from router.protocol.values import StreamPosition
from router.publisher.bus import Bus, subscribe
from router.publisher.turns import Turns
from router.status import ServiceStatus
from router.stream_reader import CaughtUp, Message, Restarted, StreamReader, StreamSource

log = logging.getLogger(__name__)

_WARN_INTERVAL_S = 5.0


class Subscriber:
    """Feeds events and load reports to the core.

    `position`: how far the event stream is applied; None: nothing of it is.
    """

    def __init__(
        self,
        core: RouterCore,
        outbox: Outbox,
        status: ServiceStatus,
        metrics: RouterMetrics,
        subjects: Subjects,
        turns: Turns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._outbox = outbox
        self._status = status
        self._metrics = metrics
        self._subjects = subjects
        self._turns = turns
        self._clock = clock
        self._warned_s = float("-inf")
        self.position: StreamPosition | None = None

    async def run_events(self, source: StreamSource) -> None:
        """Follow the event stream until cancelled, on from `position`."""
        reader = self._reader(source)
        async for item in reader.read():
            if reopened := reader.take_reopened():
                self._metrics.bus.stream_reopens.labels("events").inc(reopened)
            match item:
                case Message(subject, payload):
                    await self._turns.carry_out(self._applied(subject, payload))
                case CaughtUp():
                    while self._core.settle(self._clock()):
                        await asyncio.sleep(0)
                    self._status.events_caught_up = True
                case Restarted():
                    log.warning("the event stream was made anew; asking for checkpoints")
                    self._core.stream_lost(self._clock())
            self.position = reader.position

    async def run_loads(self, bus: Bus) -> None:
        """Follow the load reports until cancelled."""
        subscription = await subscribe(bus, self._subjects.all_loads)
        async for message in subscription.messages:
            self.take_load(message.subject, message.data)

    def take_load(self, subject: str, payload: bytes) -> None:
        """Give a load report to the core, or drop and count it."""
        self._metrics.events.load_reports.labels(self._apply_load(subject, payload)).inc()

    def _reader(self, source: StreamSource) -> StreamReader:
        """Until it has caught up once, the process is not ready, and nobody asks."""
        if not self._status.events_caught_up:
            self._core.begin_fill()
        return StreamReader(source, after=self.position)

    def _applied(self, subject: str, payload: bytes) -> Iterator[None]:
        """Apply a message, slice by slice."""
        self._metrics.events.log_messages.labels(self._apply(subject, payload)).inc()
        yield
        while self._core.apply_slice():
            yield

    def _apply(self, subject: str, payload: bytes) -> str:
        try:
            message = decode_log_message(payload)
            _check_sender(subject, message)
            verdict = self._core.apply(message, self._clock())
        except WireError as error:
            self._warn("a message on %s is unreadable and dropped: %s", subject, error)
            return "unreadable"
        if verdict is None:
            return "unannounced"
        if verdict is Verdict.FOREIGN:
            self._warn("%s announced another identity than %s", message.rank, message.identity)
        elif verdict is Verdict.GAP:
            self._warn("%s: events are missing; a checkpoint will heal it", message.rank)
        return verdict.value

    def _apply_load(self, subject: str, payload: bytes) -> str:
        try:
            report = decode_load_report(payload)
            _check_sender(subject, report)
        except WireError as error:
            self._warn("a report on %s is unreadable and dropped: %s", subject, error)
            return "unreadable"
        effects = self._core.apply_load(report, self._clock())
        self._outbox.perform(effects)
        return "unannounced" if effects else "applied"

    def _warn(self, text: str, *values: object) -> None:
        now_s = self._clock()
        if now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = now_s
            log.warning(text, *values)


def _check_sender(subject: str, message: LogMessage | LoadReport) -> None:
    if rank_of(subject) != message.rank:
        raise WireError(f"speaks for rank {message.rank}")
