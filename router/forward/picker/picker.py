"""The streams of gateways: one for each request, read, placed, answered and followed to its end."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from random import getrandbits
from typing import Any

from google.protobuf.message import DecodeError

from router.errors import KvRouterError
from router.forward.picker.answers import BOOKING
from router.forward.picker.grpc_connection import RESOURCE_EXHAUSTED, GrpcStream
from router.forward.picker.metrics import PickerMetrics, StreamEnd
from router.forward.picker.placed_requests import PlacedRequests
from router.forward.picker.placement import Admitted, GatewayPlacement, Placed, refusal_of
from router.forward.picker.steering import LB
from router.forward.picker.stream import GatewayHead, PickerStream, StreamLimits
from router.forward.picker.wire.kv_router_picker_pb2 import AccessLogs, HttpLogEntry
from router.runtime.http_server.admission import TooMuchAtOnceError
from router.runtime.http_server.limits import HeadersTooLargeError
from router.runtime.process.errors import BodyTimeoutError, BodyTooLargeError
from router.runtime.security.errors import TooManyRequestsError

log = logging.getLogger(__name__)

LOG_BYTES = 16 << 20
_AROUND_BYTES = 16_384
"""The limit of what a message has around headers and bodies: metadata, lengths."""


class PickerLimits(StreamLimits, frozen=True):
    """Limits of a picker. `bodies_limit_bytes`: of all bodies that are not placed yet."""

    max_streams: int
    body_timeout_s: float
    bodies_limit_bytes: int


class Picker:
    """Serves streams. `open_streams`, `body_bytes`: of all of them; `last_s`: when one began."""

    def __init__(
        self,
        placement: GatewayPlacement,
        requests: PlacedRequests,
        metrics: PickerMetrics,
        limits: PickerLimits,
    ) -> None:
        self.requests = requests
        self.limits = limits
        self.open_streams = 0
        self.body_bytes = 0
        self.last_s = time.monotonic()
        self._placement = placement
        self._metrics = metrics

    async def run(self) -> None:
        """Keep the bookings of long answers until cancelled; then free all."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    await asyncio.sleep(self.requests.sweep_s)
                    self.requests.sweep()
        finally:
            self.requests.end_all()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work of a stream that waits for something."""
        return self._tasks.create_task(work)

    def admitted(self, head: GatewayHead) -> Admitted:
        """Admit a request by its headers. Raises the error that refuses it."""
        admitted = self._placement.admitted(head)
        if head.length_bytes > self.limits.body_limit_bytes:
            raise BodyTooLargeError(self.limits.body_limit_bytes)
        self.check_bodies(head.length_bytes)
        return admitted

    @property
    def room_bytes(self) -> int:
        """The bytes of bodies that may still be held."""
        return max(self.limits.bodies_limit_bytes - self.body_bytes, 0)

    def check_bodies(self, more_bytes: int = 0) -> None:
        """Raise TooMuchAtOnceError if all bodies, and `more_bytes`, are beyond their limit."""
        if self.body_bytes + more_bytes > self.limits.bodies_limit_bytes:
            raise TooMuchAtOnceError(self.limits.bodies_limit_bytes)

    async def place(self, admitted: Admitted, body: bytes, booking_id: str) -> Placed:
        """Place a request. Raises the error that refuses it."""
        began_s = time.monotonic()
        placed = await self._placement.place(admitted, body, booking_id)
        self._metrics.placing_seconds.note(time.monotonic() - began_s)
        self.requests.begin(booking_id, placed)
        return placed

    def begin(self) -> None:
        """Note the begin of a stream."""
        self.open_streams += 1
        self.last_s = time.monotonic()

    def end(self, booking_id: str, ended: StreamEnd) -> None:
        """Note the end of a stream."""
        self.open_streams -= 1
        self._metrics.requests.count(ended)
        self.requests.leave(booking_id)

    def count_refusal(self, code: str) -> None:
        """Count a refusal."""
        self._metrics.refusals.count(code)


class PickerCall:
    """One stream, which is a request at a gateway, from its headers to the end of its answer."""

    __slots__ = (
        "_admitted",
        "_booking_id",
        "_ended",
        "_expected_bytes",
        "_held_bytes",
        "_is_beyond_limit",
        "_is_closed",
        "_path",
        "_picker",
        "_placing",
        "_state",
        "_stream",
        "_timer",
    )

    def __init__(self, picker: Picker, stream: GrpcStream) -> None:
        picker.begin()
        self._picker = picker
        self._stream = stream
        self._state = PickerStream(picker.limits)
        self._booking_id = f"{getrandbits(128):032x}"
        self._admitted: Admitted | None = None
        self._placing: asyncio.Task[None] | None = None
        self._held_bytes = self._expected_bytes = 0
        self._is_beyond_limit = picker.open_streams > picker.limits.max_streams
        self._is_closed = False
        self._path = ""
        self._ended: StreamEnd = "unplaced"
        limit_s = picker.limits.body_timeout_s
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._refuse_slow)

    @property
    def limit_bytes(self) -> int:
        """The limit of the next message: of the headers alone, until they are admitted."""
        limits = self._picker.limits
        most_bytes = 2 * limits.head.header_limit_bytes + _AROUND_BYTES
        if self._admitted is None:
            return most_bytes
        if self._state.is_settled:  # a part of an answer
            return most_bytes + limits.body_limit_bytes
        return most_bytes + min(limits.body_limit_bytes, self._picker.room_bytes)

    def expects(self, size_bytes: int) -> None:
        """Count a message that is held until it is whole."""
        self._expected_bytes = size_bytes
        self._note_held()

    def received(self, message: bytes) -> None:
        """Answer a message, or begin to place the request that is complete with it."""
        state, self._expected_bytes = self._state, 0
        try:
            answers = state.receive(message)
            self._note_held()
            if state.is_waiting or self._placing is None:
                self._take_request(state)
            if answers:
                self._stream.send(answers)
        except KvRouterError as error:
            self._refuse(error)
        if state.response is not None and self._ended == "no_answer":
            self._ended = "answered"
            self._picker.requests.answered(self._booking_id, state.response)

    def _take_request(self, state: PickerStream) -> None:
        """Admit a request by its headers, before any of its body; place it once it is complete.

        Raises the error that refuses it.
        """
        if state.is_settled or state.head is None:
            return
        if self._admitted is None:
            self._path = state.head.path
            if self._is_beyond_limit:
                raise TooManyRequestsError(self._picker.limits.max_streams)
            self._admitted = self._picker.admitted(state.head)
        self._picker.check_bodies()
        if state.is_complete:
            self._timer.cancel()
            self._placing = self._picker.start(self._place(self._admitted, state.body))

    async def _place(self, admitted: Admitted, body: bytes) -> None:
        try:
            placed = await self._picker.place(admitted, body, self._booking_id)
        except KvRouterError as error:
            self._refuse(error)
        except Exception:  # a bug; other requests continue
            log.exception("request failed: internal error")
            self._refuse(KvRouterError("internal error"))
        else:
            self._ended = "no_answer"
            self._stream.send(self._state.route(placed.route))
            self._note_held()

    def oversized(self) -> None:
        """Refuse a message that is longer than any may be."""
        limits = self._picker.limits
        if self._admitted is None:
            self._refuse(HeadersTooLargeError(limits.head))
        elif self._picker.room_bytes < limits.body_limit_bytes:
            self._refuse(TooMuchAtOnceError(limits.bodies_limit_bytes))
        else:
            self._refuse(BodyTooLargeError(limits.body_limit_bytes))

    def _refuse_slow(self) -> None:
        self._refuse(BodyTimeoutError(self._picker.limits.body_timeout_s))

    def _refuse(self, error: KvRouterError) -> None:
        self._timer.cancel()
        self._picker.count_refusal(error.code)
        self._ended = "refused"
        self._stream.send(self._state.refuse(refusal_of(error, self._path)))
        self._note_held()

    def _note_held(self) -> None:
        if self._is_closed:
            return
        held_bytes = self._state.held_bytes + self._expected_bytes
        self._picker.body_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes

    def ended(self) -> None:
        """End the stream with the gateway."""
        self._stream.finish()
        self.lost()

    def lost(self) -> None:
        """Free what the request holds."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        if self._placing is not None:
            self._placing.cancel()
        self._picker.body_bytes -= self._held_bytes
        self._held_bytes = 0
        self._picker.end(self._booking_id, self._ended)


class AccessLogCall:
    """The stream of a gateway's access log."""

    __slots__ = ("_requests", "_stream")

    limit_bytes = LOG_BYTES

    def __init__(self, requests: PlacedRequests, stream: GrpcStream) -> None:
        self._requests = requests
        self._stream = stream

    def expects(self, size_bytes: int) -> None:
        """Do nothing: a gateway has few of these streams."""

    def received(self, message: bytes) -> None:
        """Note the ends of requests."""
        try:
            entries = AccessLogs.FromString(message).http_logs.log_entry
        except DecodeError as error:
            log.warning("access log: a message cannot be read: %s", error)
            return
        for entry in entries:
            self._requests.logged(_booking_in(entry))

    def oversized(self) -> None:
        """End the stream: the gateway begins another one."""
        log.warning("access log: a message is longer than %d bytes", LOG_BYTES)
        self._stream.finish(RESOURCE_EXHAUSTED)

    def ended(self) -> None:
        """Answer the end of the log."""
        self._stream.send([b""])
        self._stream.finish()

    def lost(self) -> None:
        """Do nothing: the gateway begins another log."""


def _booking_in(entry: HttpLogEntry) -> str | None:
    """Return the booking that an entry of an access log names, or None."""
    metadata = entry.common_properties.metadata.filter_metadata
    if LB not in metadata:
        return None
    return metadata[LB].fields[BOOKING].string_value or None
