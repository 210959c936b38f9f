"""A leased entry in the key-value bucket, which announces a process while it lives.

A key belongs to one incarnation. It is written only on top of the revision that was read last, so
that the loser of a race gets an error. It has a time to live and is renewed within it, so that a
dead owner's key expires; the key of an agent that runs beside its engine does not expire, since the
engine may outlive the agent.
"""

import asyncio
import logging
from contextlib import suppress

from msgspec import Struct, json
from nats.js import JetStreamContext, api

from router.errors import WireError
from router.protocol.subjects import Subjects
from router.protocol.values import decode
from router.runtime.bus.connection import REQUEST_TIMEOUT_S, ensure_bucket, last_message, translated
from router.runtime.bus.errors import BusError, BusUnavailableError, LogConflictError, TwinError

log = logging.getLogger(__name__)

TTL_S = 30
RENEW_S = 10.0
RETRY_S = 1.0
_MARKER_TTL_S = 86_400
"""The time for which a withdrawal stays readable, for routers that are disconnected."""


class _Owner(Struct, frozen=True):
    incarnation: int


class _Entry(Struct, frozen=True):
    """The state of a key: its revision, 0 if it never existed, and its owner's incarnation."""

    revision: int
    incarnation: int | None


class KvLease:
    """The owner of one key. Call `look`, `claim`, `run` until cancelled, then `withdraw`."""

    def __init__(
        self,
        js: JetStreamContext,
        subjects: Subjects,
        key: str,
        incarnation: int,
        *,
        expires: bool = True,
        num_replicas: int = 1,
    ) -> None:
        self._js = js
        self._subjects = subjects
        self._key = key
        self._incarnation = incarnation
        self._ttl_s = TTL_S if expires else None
        self._num_replicas = num_replicas
        self._revision = 0
        self._value: bytes | None = None
        self._renewal_wanted = asyncio.Event()

    async def look(self) -> None:
        """Read the current revision, to be replaced by `claim`.

        Creates the bucket if it is missing.
        """
        await ensure_bucket(self._js, self._subjects, self._num_replicas)
        self._revision = (await self._read()).revision

    async def claim(self, value: bytes) -> None:
        """Write the key. Raises LogConflictError if another process wrote it since `look`."""
        await self._write(value)
        self._value = value

    def change(self, value: bytes) -> None:
        """Write another value at once, and from then on, once the key is claimed."""
        assert self._value is not None, "claimed first"
        self._value = value
        self.renew_soon()

    async def verify(self) -> None:
        """Check that the key has no other owner. Raises TwinError."""
        await self._read_own()

    def renew_soon(self) -> None:
        """Renew the key at once, because the bus may have lost it."""
        self._renewal_wanted.set()

    async def run(self) -> None:
        """Renew the claimed key until cancelled. Raises TwinError if another process took it."""
        delay_s = RENEW_S
        while True:
            await self._until_due(delay_s)
            try:
                await self._renew()
                delay_s = RENEW_S
            except BusError as error:
                log.warning("could not renew %s: %s", self._key, error)
                delay_s = RETRY_S

    async def withdraw(self) -> None:
        """Remove the key if it was claimed, is still owned, and the bus can be reached."""
        if self._value is None:
            return
        headers = {
            "KV-Operation": "PURGE",
            api.Header.ROLLUP.value: "sub",
            api.Header.MSG_TTL.value: str(_MARKER_TTL_S),
        }
        try:
            await self._publish(b"", headers)
        except BusError as error:
            log.info("%s not withdrawn: %s", self._key, error)

    async def _until_due(self, delay_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._renewal_wanted.wait()
        self._renewal_wanted.clear()

    async def _renew(self) -> None:
        """Write on top of the last revision written.

        If that revision is gone, write on top of any other one that is not a twin's.
        """
        assert self._value is not None
        try:
            await self._write(self._value)
        except (LogConflictError, BusUnavailableError):
            await ensure_bucket(self._js, self._subjects, self._num_replicas)
            self._revision = (await self._read_own()).revision
            await self._write(self._value)

    async def _read_own(self) -> _Entry:
        entry = await self._read()
        if entry.incarnation not in (None, self._incarnation):
            raise TwinError(self._key, f"incarnation {entry.incarnation} has taken over")
        return entry

    async def _write(self, value: bytes) -> None:
        headers = {} if self._ttl_s is None else {api.Header.MSG_TTL.value: str(self._ttl_s)}
        self._revision = await self._publish(value, headers)

    async def _publish(self, value: bytes, headers: dict[str, str]) -> int:
        headers[api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(self._revision)
        async with translated(self._key, self._revision):
            ack = await self._js.publish(
                self._subjects.key(self._key),
                value,
                timeout=REQUEST_TIMEOUT_S,
                headers=headers,
            )
        return ack.seq

    async def _read(self) -> _Entry:
        subject = self._subjects.key(self._key)
        message = await last_message(self._js, self._subjects.bucket_stream, subject)
        if message is None:
            return _Entry(0, None)
        return _Entry(message.seq or 0, _owner(message.data))


def _owner(value: bytes | None) -> int | None:
    if not value:
        return None
    try:
        return decode(json.Decoder(_Owner).decode, value).incarnation
    except WireError:
        return None
