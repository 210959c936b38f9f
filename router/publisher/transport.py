"""Where a publisher's messages go: an append-only log per subject, and a loudspeaker."""

from typing import Protocol

from nats.js import api

from router.bus_errors import BusUnavailableError, LogConflictError
from router.protocol.subjects import Subjects
from router.publisher.bus import (
    REQUEST_TIMEOUT_S,
    Bus,
    StreamLimits,
    ensure_event_stream,
    last_message,
    translated,
)


class Transport(Protocol):
    """A bus, as publishers see it. All calls raise BusUnavailableError if it is out of reach."""

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        expected_sequence: int,
        replaces_history: bool = False,
    ) -> int:
        """Append to a subject's log, if its last sequence is the expected one; the new sequence.

        `replaces_history` drops everything before. Raises LogConflictError, LogFullError; after
        BusUnavailableError the message may or may not have been appended.
        """

    async def last_sequence(self, subject: str) -> int:
        """Sequence of the last message of a subject's log; 0 if it is empty."""

    async def drop_before(self, subject: str, sequence: int) -> None:
        """Drop the messages of a subject's log before this sequence."""

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Tell whoever listens now. May be lost."""


class NatsTransport:
    """JetStream for the log, core NATS for the loudspeaker."""

    def __init__(self, bus: Bus, subjects: Subjects, limits: StreamLimits) -> None:
        self._bus = bus
        self._client = bus.client
        self._js = bus.js
        self._subjects = subjects
        self._limits = limits

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        expected_sequence: int,
        replaces_history: bool = False,
    ) -> int:
        """See `Transport`; a round trip."""
        headers = {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(expected_sequence)}
        if replaces_history:
            headers[api.Header.ROLLUP.value] = "sub"
        async with translated(subject, expected_sequence):
            published = self._js.publish(
                subject, payload, timeout=REQUEST_TIMEOUT_S, headers=headers
            )
            ack = await self._bus.answered(published)
        return ack.seq

    async def last_sequence(self, subject: str) -> int:
        """See `Transport`; creates the stream where it does not exist (any more)."""
        await ensure_event_stream(self._js, self._subjects, self._limits)
        message = await last_message(self._js, self._subjects.event_stream, subject)
        return 0 if message is None else message.seq or 0

    async def drop_before(self, subject: str, sequence: int) -> None:
        """See `Transport`; a round trip."""
        async with translated(subject):
            await self._js.purge_stream(self._subjects.event_stream, subject=subject, seq=sequence)

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """See `Transport`; nothing is sent, nor queued, while there is no connection."""
        if not self._client.is_connected:
            raise BusUnavailableError("not connected")
        async with translated(subject):
            await self._client.publish(subject, payload)


class MemoryTransport:
    """The same in memory, for one process; `log` and `told` are there to be read."""

    def __init__(self) -> None:
        self.log: list[tuple[int, str, bytes]] = []
        self.told: list[tuple[str, bytes]] = []
        self._sequence = 0

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        expected_sequence: int,
        replaces_history: bool = False,
    ) -> int:
        """See `Transport`."""
        if await self.last_sequence(subject) != expected_sequence:
            raise LogConflictError(subject, expected_sequence)
        self._sequence += 1
        if replaces_history:
            await self.drop_before(subject, self._sequence)
        self.log.append((self._sequence, subject, payload))
        return self._sequence

    async def last_sequence(self, subject: str) -> int:
        """See `Transport`."""
        return max((sequence for sequence, s, _ in self.log if s == subject), default=0)

    async def drop_before(self, subject: str, sequence: int) -> None:
        """See `Transport`."""
        self.log = [m for m in self.log if m[1] != subject or m[0] >= sequence]

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """See `Transport`."""
        self.told.append((subject, payload))
