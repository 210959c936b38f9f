"""The transport of a publisher's messages: an append-only log per subject, and broadcasts."""

from typing import Protocol

from nats.js import api

from router.protocol.subjects import Subjects
from router.runtime.bus.connection import (
    REQUEST_TIMEOUT_S,
    Bus,
    StreamLimits,
    ensure_event_stream,
    last_message,
    translated,
)


class Transport(Protocol):
    """A bus, as publishers use it. All calls raise BusUnavailableError if it is unreachable."""

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        expected_sequence: int,
        replaces_history: bool = False,
    ) -> int:
        """Append to a subject's log if its last sequence number is the expected one.

        Returns the new sequence number. `replaces_history` drops all earlier messages. Raises
        LogConflictError or LogFullError; after BusUnavailableError the message may or may not have
        been appended.
        """

    async def last_sequence(self, subject: str) -> int:
        """Return the sequence number of the last message of a subject's log, 0 if it is empty."""

    async def drop_before(self, subject: str, sequence: int) -> None:
        """Drop the messages of a subject's log before this sequence number."""

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Publish to the current subscribers. The message may be lost."""


class NatsTransport:
    """A transport over NATS: JetStream for the log, core NATS for broadcasts."""

    def __init__(self, bus: Bus, subjects: Subjects, limits: StreamLimits) -> None:
        self._bus = bus
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
        """Append as in `Transport`, in one round trip."""
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
        """Return the sequence as in `Transport`; creates the stream if it does not exist."""
        await ensure_event_stream(self._js, self._subjects, self._limits)
        message = await last_message(self._js, self._subjects.event_stream, subject)
        return 0 if message is None else message.seq or 0

    async def drop_before(self, subject: str, sequence: int) -> None:
        """Drop messages as in `Transport`, in one round trip."""
        async with translated(subject):
            await self._js.purge_stream(self._subjects.event_stream, subject=subject, seq=sequence)

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Publish as in `Transport`; without a connection nothing is sent or queued."""
        await self._bus.send(subject, payload)
