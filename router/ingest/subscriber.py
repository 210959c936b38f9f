"""Input of the core from the bus: the event stream and the load reports.

Foreign bytes are counted, logged (at most once per interval) and dropped, one message at a time. A
dropped message shows as a gap or as a differing digest, which a checkpoint repairs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from router.core.commands import (
    Apply,
    ApplyLoad,
    ApplyPolled,
    ApplySlice,
    BeginFill,
    Settle,
    StreamLost,
)
from router.core.core import RouterCore
from router.errors import WireError
from router.indexer.event_log import LogVerdict
from router.ingest.effect_runner import EffectRunner
from router.ingest.engine_polls import PollDuties
from router.ingest.event_stream import CaughtUp, Message, Restarted, StreamReader, StreamSource
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.protocol.events import LogMessage, decode_log_message
from router.protocol.loads import LoadReport, PolledLoad, decode_any_report
from router.protocol.subjects import Subjects, rank_of
from router.protocol.values import StreamPosition
from router.publisher.follower.loop_slices import SliceScheduler
from router.runtime.bus.connection import Bus, subscribe

log = logging.getLogger(__name__)

_WARN_INTERVAL_S = 5.0


class Subscriber:
    """The input of events and load reports to the core.

    `position`: the position up to which the event stream is applied; None if nothing of it is.
    """

    def __init__(
        self,
        core: RouterCore,
        effect_runner: EffectRunner,
        status: ServiceStatus,
        metrics: RouterMetrics,
        subjects: Subjects,
        turns: SliceScheduler,
        duties: PollDuties,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._duties = duties
        self._core = core
        self._effect_runner = effect_runner
        self._status = status
        self._metrics = metrics
        self._subjects = subjects
        self._turns = turns
        self._clock = clock
        self._warned_s = float("-inf")
        self.position: StreamPosition | None = None

    async def run_events(self, source: StreamSource) -> None:
        """Follow the event stream from `position` on, until cancelled."""
        reader = self._reader(source)
        async for item in reader.read():
            if reopened := reader.take_reopened():
                self._metrics.stream_reopens.labels("events").inc(reopened)
            match item:
                case Message(subject, payload):
                    await self._turns.carry_out(self._applied(subject, payload))
                case CaughtUp():
                    while self._core.handle(Settle(), self._clock())[0]:
                        await asyncio.sleep(0)
                    self._status.events_caught_up = True
                case Restarted():
                    log.warning("event stream recreated; checkpoints are requested")
                    self._core.handle(StreamLost(), self._clock())
            self.position = reader.position

    async def run_loads(self, bus: Bus) -> None:
        """Follow the load reports until cancelled."""
        subscription = await subscribe(bus, self._subjects.all_loads)
        async for message in subscription.messages:
            self.take_load(message.subject, message.data)

    def take_load(self, subject: str, payload: bytes) -> None:
        """Pass a load report to the core, or drop and count it."""
        self._metrics.load_reports.labels(self._apply_load(subject, payload)).inc()

    def _reader(self, source: StreamSource) -> StreamReader:
        """Return a new reader; the index serves no requests before the first catch-up."""
        if not self._status.events_caught_up:
            self._core.handle(BeginFill(), 0.0)
        return StreamReader(source, after=self.position)

    def _applied(self, subject: str, payload: bytes) -> Iterator[None]:
        """Apply a message, slice by slice."""
        self._metrics.log_messages.labels(self._apply(subject, payload)).inc()
        yield
        while self._core.handle(ApplySlice(), 0.0)[0]:
            yield

    def _apply(self, subject: str, payload: bytes) -> str:
        try:
            message = decode_log_message(payload)
            _check_sender(subject, message)
            verdict = self._core.handle(Apply(message), self._clock())[0]
        except WireError as error:
            self._warn("dropped an unreadable message on %s: %s", subject, error)
            return "unreadable"
        if verdict is None:
            return "unannounced"
        if verdict is LogVerdict.FOREIGN:
            self._warn("%s: announced identity differs from %s", message.rank, message.identity)
        elif verdict is LogVerdict.GAP:
            self._warn("%s: events are missing; the next checkpoint repairs it", message.rank)
        return verdict.value

    def _apply_load(self, subject: str, payload: bytes) -> str:
        try:
            report = decode_any_report(payload)
            _check_sender(subject, report)
        except WireError as error:
            self._warn("dropped an unreadable report on %s: %s", subject, error)
            return "unreadable"
        if isinstance(report, PolledLoad):
            return self._apply_polled(report)
        effects = self._core.handle(ApplyLoad(report), self._clock())[1]
        self._effect_runner.perform(effects)
        return "unannounced" if effects else "applied"

    def _apply_polled(self, report: PolledLoad) -> str:
        """Apply the load of an engine that another router polls."""
        now_s = self._clock()
        if not self._duties.take(report, now_s):
            return "own"
        is_known = self._core.handle(ApplyPolled(report), now_s)[0]
        return "applied" if is_known else "unannounced"

    def _warn(self, text: str, *values: object) -> None:
        now_s = self._clock()
        if now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = now_s
            log.warning(text, *values)


def _check_sender(subject: str, message: LogMessage | LoadReport | PolledLoad) -> None:
    if rank_of(subject) != message.rank:
        raise WireError(f"the subject is not that of rank {message.rank}")
