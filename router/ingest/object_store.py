"""One object in a NATS object store: written atomically and read quickly.

    $O.{bucket}.C.{nuid}          its bytes, in chunks
    $O.{bucket}.M.{base64(name)}  name, size, chunks, SHA-256: one message, written last

Every object-store client can read what is written here. A description is only written if the
description from the start of the write is still the last one, so one of two concurrent writers
fails. Then everything older than the first new chunk is purged: the previous object, and chunks of
writers that were killed. A reader that runs meanwhile finds a torn object, looks it up again, and
raises an error if it is still the same one.

The client's own reader is not used: it copies all received bytes with every chunk, which takes
seconds.
"""

import asyncio
import hashlib
import logging
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from secrets import token_hex
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from msgspec.json import Decoder, encode
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api

from router.errors import WireError
from router.indexer.base import SnapshotError
from router.protocol.values import decode
from router.runtime.bus.connection import (
    REQUEST_TIMEOUT_S,
    Bus,
    ensure_object_stream,
    last_message,
    translated,
)
from router.runtime.bus.errors import BusError, BusUnavailableError

log = logging.getLogger(__name__)

CHUNK_BYTES = 128 * 1024

_BATCH = 64
_SILENCE_S = 2.0
_INACTIVE_S = 10.0


class _Options(Struct, frozen=True):
    max_chunk_size: int


class _Description(Struct, frozen=True):
    """The metadata that object stores keep of an object; other fields are ignored."""

    name: str
    bucket: str
    nuid: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    size: Annotated[int, Meta(ge=0)]
    chunks: Annotated[int, Meta(ge=0)]
    digest: str
    mtime: str = ""
    deleted: bool = False
    options: _Options | None = None


_decoder = Decoder(_Description)


class ObjectBucket:
    """One named object, on one connection. All calls raise BusUnavailableError.

    `limit_bytes` bounds what is written and read. A bucket of another owner (`is_ours` false) is
    never created here.
    """

    def __init__(
        self,
        bus: Bus,
        bucket: str,
        name: str,
        *,
        limit_bytes: int,
        num_replicas: int = 1,
        is_ours: bool = True,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._name = name
        self._stream = f"OBJ_{bucket}"
        self._about = f"$O.{bucket}.M.{urlsafe_b64encode(name.encode()).decode()}"
        self._limit_bytes = limit_bytes
        self._num_replicas = num_replicas
        self._is_ours = is_ours

    async def write(self, payload: memoryview) -> None:
        """Replace the object by these bytes, which must not be empty.

        Raises SnapshotError if they exceed the limit, LogConflictError if another writer finished
        first.
        """
        self._check_size(len(payload))
        replaced, _ = await self._look_up()
        nuid = token_hex(11)
        chunk_subject = f"$O.{self._bucket}.C.{nuid}"
        try:
            first = await self._write_chunks(chunk_subject, payload)
            await self._describe(nuid, len(payload), await _digest(payload), replaced)
        except BusError:
            await self._purge(chunk_subject)
            raise
        if first > 1:  # before 2.14.6 NATS takes "older than the first message" for "everything"
            await self._purge(f"$O.{self._bucket}.C.>", first)

    async def read(self) -> memoryview | None:
        """Return the object's bytes.

        Returns None if there is no object. Raises SnapshotError if it is unusable.
        """
        seen = -1
        while True:
            sequence, about = await self._look_up()
            if about is None or about.deleted:
                return None
            if sequence == seen:
                raise SnapshotError("torn", "chunks are missing or differ from the description")
            self._check_size(about.size)
            payload = await self._read_chunks(about)
            if payload is not None and await _digest(payload) == about.digest:
                return payload
            seen = sequence

    async def delete(self) -> None:
        """Delete the object and all remains of earlier ones."""
        await self._look_up()
        await self._purge(f"$O.{self._bucket}.>")

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            detail = f"{size_bytes} bytes (allowed: at most {self._limit_bytes})"
            raise SnapshotError("too large", detail)

    async def _look_up(self) -> tuple[int, _Description | None]:
        """Return the object's sequence and description; creates the bucket if it is ours.

        Returns sequence 0 without a description, and None for a missing or invalid description.
        """
        if self._is_ours:
            await ensure_object_stream(self._bus.js, self._bucket, self._num_replicas)
        message = await last_message(self._bus.js, self._stream, self._about)
        if message is None:
            return 0, None
        try:
            return message.seq or 0, decode(_decoder.decode, message.data or b"")
        except WireError as error:
            log.warning("%s: invalid object description: %s", self._about, error)
            return message.seq or 0, None

    async def _write_chunks(self, subject: str, payload: memoryview) -> int:
        """Write the chunks. Returns the sequence of the first."""
        first = 0
        for start in range(0, len(payload), CHUNK_BYTES):
            sequence = await self._append(subject, bytes(payload[start : start + CHUNK_BYTES]))
            first = first or sequence
        return first

    async def _describe(self, nuid: str, size: int, digest: str, replaced: int) -> None:
        about = _Description(
            name=self._name,
            bucket=self._bucket,
            nuid=nuid,
            size=size,
            chunks=-(-size // CHUNK_BYTES),
            digest=digest,
            mtime=datetime.now(UTC).isoformat(),
            options=_Options(CHUNK_BYTES),
        )
        headers = {
            api.Header.ROLLUP.value: "sub",
            api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(replaced),
        }
        await self._append(self._about, encode(about), headers, replaced)

    async def _append(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        expected_sequence: int = 0,
    ) -> int:
        async with translated(subject, expected_sequence):
            ack = await self._bus.js.publish(
                subject, payload, timeout=REQUEST_TIMEOUT_S, headers=headers
            )
        return ack.seq

    async def _purge(self, subject: str, before_sequence: int = 0) -> None:
        """Purge a subject up to `before_sequence`, exclusively; 0 purges all of it."""
        async with translated(subject):
            await self._bus.js.purge_stream(
                self._stream, subject=subject, seq=before_sequence or None
            )

    async def _read_chunks(self, about: _Description) -> memoryview | None:
        """Return the object's bytes, or None if the chunks are not exactly the described ones."""
        inbox = self._bus.client.new_inbox()
        room_bytes = 2 * _BATCH * self._bus.client.max_payload
        async with translated(self._stream):
            subscription = await self._bus.client.subscribe(inbox, pending_bytes_limit=room_bytes)
            try:
                config = _consumer_config(f"$O.{self._bucket}.C.{about.nuid}")
                consumer = await self._bus.js.add_consumer(self._stream, config)
                if consumer.num_pending != about.chunks:
                    return None
                return await self._pull(subscription, inbox, consumer.name, about)
            finally:
                if not self._bus.client.is_closed:
                    await subscription.unsubscribe()

    async def _pull(
        self, subscription: Subscription, inbox: str, consumer: str, about: _Description
    ) -> memoryview | None:
        payload = np.empty(about.size, np.uint8).data
        written = 0
        for number in range(about.chunks):
            if number % _BATCH == 0:
                await self._ask_for_more(inbox, consumer)
            data = await _next_chunk(subscription, number + 1)
            if data is None or written + len(data) > about.size:
                return None
            payload[written : written + len(data)] = data
            written += len(data)
            await asyncio.sleep(0)  # chunks come many at a time
        return payload if written == about.size else None

    async def _ask_for_more(self, inbox: str, consumer: str) -> None:
        request = {"batch": _BATCH, "expires": int(_SILENCE_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}"
        await self._bus.client.publish(subject, encode(request), reply=inbox)


def _consumer_config(subject: str) -> api.ConsumerConfig:
    return api.ConsumerConfig(
        filter_subject=subject,
        ack_policy=api.AckPolicy.NONE,
        mem_storage=True,
        num_replicas=1,
        inactive_threshold=_INACTIVE_S,
    )


async def _next_chunk(subscription: Subscription, number: int) -> bytes | None:
    """Return the chunk with this number.

    Returns None if another message arrives, because chunks in between were purged or lost.
    """
    try:
        async with asyncio.timeout(_SILENCE_S):
            message: Msg = await anext(subscription.messages)
    except TimeoutError:
        return None
    except StopAsyncIteration as error:
        raise BusUnavailableError("connection closed") from error
    is_status = "Status" in (message.headers or {})
    return None if is_status or message.metadata.sequence.consumer != number else message.data


async def _digest(payload: memoryview) -> str:
    """Return the SHA-256 digest in the notation of object stores."""
    digest = await asyncio.to_thread(lambda: hashlib.sha256(payload).digest())
    return "SHA-256=" + urlsafe_b64encode(digest).decode()
