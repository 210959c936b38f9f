"""The streams of gateways: one for each request, read, placed, answered and followed to its end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol
from uuid import uuid4

from google.protobuf.message import DecodeError

from router.errors import KvRouterError
from router.forward.picker.answers import BOOKING
from router.forward.picker.lives import Lives
from router.forward.picker.metrics import PickerMetrics, StreamEnd
from router.forward.picker.placement import Admitted, GatewayPlacement, Placed, refusal_of
from router.forward.picker.steering import LB
from router.forward.picker.stream import GatewayHead, PickerStream, StreamLimits
from router.forward.picker.wire.kv_router_picker_pb2 import AccessLogs, HttpLogEntry
from router.runtime.http_server.admission import TooMuchAtOnceError
from router.runtime.process.errors import BodyTimeoutError, BodyTooLargeError
from router.runtime.security.errors import TooManyRequestsError

log = logging.getLogger(__name__)

SWEEP_S = 5.0


class Channel(Protocol):
    """A stream's connection: grpc.aio's `ServicerContext`."""

    async def read(self) -> Any:
        """Return the next message, or an object that is not bytes at the end."""

    async def write(self, message: bytes) -> None:
        """Send a message."""


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
        lives: Lives,
        metrics: PickerMetrics,
        limits: PickerLimits,
    ) -> None:
        self.lives = lives
        self.limits = limits
        self.open_streams = 0
        self.body_bytes = 0
        self.last_s = time.monotonic()
        self._placement = placement
        self._metrics = metrics

    async def run(self) -> None:
        """Keep the bookings of long answers until cancelled; then free all."""
        try:
            while True:
                await asyncio.sleep(SWEEP_S)
                self.lives.sweep()
        finally:
            self.lives.end_all()

    async def process(self, _: object, channel: Channel) -> None:
        """Serve the stream of one request, to its end."""
        self.open_streams += 1
        self.last_s = time.monotonic()
        call = _Call(self, channel)
        try:
            await call.run()
        finally:
            self.open_streams -= 1
            call.close()

    async def take_logs(self, messages: AsyncIterator[bytes], _: object) -> bytes:
        """Read the access logs of a gateway, to the end of their stream."""
        async for data in messages:
            try:
                entries = AccessLogs.FromString(data).http_logs.log_entry
            except DecodeError as error:
                log.warning("access log: a message cannot be read: %s", error)
                continue
            for entry in entries:
                self.lives.logged(_booking_in(entry))
        return b""

    def admitted(self, head: GatewayHead) -> Admitted:
        """Admit a request by its headers. Raises the error that refuses it."""
        admitted = self._placement.admitted(head)
        if head.length_bytes > self.limits.body_limit_bytes:
            raise BodyTooLargeError(self.limits.body_limit_bytes)
        self.check_bodies(head.length_bytes)
        return admitted

    def check_bodies(self, more_bytes: int = 0) -> None:
        """Raise TooMuchAtOnceError if all bodies, and `more_bytes`, are beyond their limit."""
        if self.body_bytes + more_bytes > self.limits.bodies_limit_bytes:
            raise TooMuchAtOnceError(self.limits.bodies_limit_bytes)

    async def place(self, admitted: Admitted, body: bytes, booking_id: str) -> Placed:
        """Place a request. Raises the error that refuses it."""
        began_s = time.monotonic()
        placed = await self._placement.place(admitted, body, booking_id)
        self._metrics.placing_seconds.note(time.monotonic() - began_s)
        self.lives.begin(booking_id, placed)
        return placed

    def count(self, ended: StreamEnd) -> None:
        """Count the end of a stream."""
        self._metrics.requests.count(ended)

    def count_refusal(self, code: str) -> None:
        """Count a refusal."""
        self._metrics.refusals.count(code)


class _Call:
    """One stream."""

    __slots__ = (
        "_booking_id",
        "_channel",
        "_ended",
        "_held_bytes",
        "_is_beyond_limit",
        "_path",
        "_picker",
        "_reading",
        "_stream",
    )

    def __init__(self, picker: Picker, channel: Channel) -> None:
        self._picker = picker
        self._channel = channel
        self._stream = PickerStream(picker.limits)
        self._booking_id = uuid4().hex
        self._reading: asyncio.Future[Any] | None = None
        self._held_bytes = 0
        self._is_beyond_limit = picker.open_streams > picker.limits.max_streams
        self._path = ""
        self._ended: StreamEnd = "unplaced"

    async def run(self) -> None:
        """Serve the stream to its end."""
        try:
            admitted = await self._read_request()
            placed = None if admitted is None else await self._placed(admitted)
        except KvRouterError as error:
            await self._refuse(error)
        else:
            if placed is None:
                return
            self._ended = "no_answer"
            await self._send(self._stream.route(placed.route))
        self._note_held()
        await self._follow()

    async def _read_request(self) -> Admitted | None:
        """Read a request to its end. Returns None if the stream ends before.

        Its headers admit it, before any of its body is read. Raises KvRouterError.
        """
        limit_s, admitted = self._picker.limits.body_timeout_s, None
        try:
            async with asyncio.timeout(limit_s):
                while self._stream.is_waiting:
                    data = await self._channel.read()
                    if not isinstance(data, bytes):
                        return None
                    answers = self._stream.receive(data)
                    if admitted is None and self._stream.head is not None:
                        admitted = self._admitted(self._stream.head)
                    self._note_held()
                    self._picker.check_bodies()
                    await self._send(answers)
        except TimeoutError:
            raise BodyTimeoutError(limit_s) from None
        return admitted

    def _admitted(self, head: GatewayHead) -> Admitted:
        self._path = head.path
        if self._is_beyond_limit:
            raise TooManyRequestsError(self._picker.limits.max_streams)
        return self._picker.admitted(head)

    async def _placed(self, admitted: Admitted) -> Placed | None:
        """Place the request. Returns None if the stream ends before. Raises KvRouterError."""
        body = self._stream.body
        placing = asyncio.ensure_future(self._picker.place(admitted, body, self._booking_id))
        try:
            while not placing.done():
                reading = self._read()
                await asyncio.wait((placing, reading), return_when=asyncio.FIRST_COMPLETED)
                if placing.done():
                    break
                data = await self._taken()
                if not isinstance(data, bytes):
                    return None
                await self._send(self._stream.receive(data))
            return placing.result()
        finally:
            placing.cancel()

    async def _follow(self) -> None:
        """Answer what follows the request, until the stream ends."""
        while isinstance(data := await self._taken(), bytes):
            try:
                answers = self._stream.receive(data)
            except KvRouterError as error:
                await self._refuse(error)
                continue
            await self._send(answers)
            response = self._stream.response
            if response is not None and self._ended != "answered":
                self._ended = "answered" if self._ended != "refused" else "refused"
                await self._picker.lives.answered(self._booking_id, response)

    def _read(self) -> asyncio.Future[Any]:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._channel.read())
        return self._reading

    async def _taken(self) -> Any:
        """Return the next message; a read that has begun is continued."""
        if self._reading is None:
            return await self._channel.read()
        reading, self._reading = self._reading, None
        return await reading

    async def _refuse(self, error: KvRouterError) -> None:
        self._picker.count_refusal(error.code)
        self._ended = "refused"
        await self._send(self._stream.refuse(refusal_of(error, self._path)))

    async def _send(self, answers: list[bytes]) -> None:
        for answer in answers:
            await self._channel.write(answer)

    def _note_held(self) -> None:
        held_bytes = self._stream.held_bytes
        self._picker.body_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes

    def close(self) -> None:
        """Note the end of the stream."""
        if self._reading is not None:
            self._reading.cancel()
        self._picker.body_bytes -= self._held_bytes
        self._picker.count(self._ended)
        self._picker.lives.leave(self._booking_id)


def _booking_in(entry: HttpLogEntry) -> str | None:
    """Return the booking that an entry of an access log names, or None."""
    metadata = entry.common_properties.metadata.filter_metadata
    if LB not in metadata:
        return None
    return metadata[LB].fields[BOOKING].string_value or None
