"""The messages of other routers, without a bus: this router requests a stream of each.

    addresses ─▶ one task each: connect ─▶ POST /replica_sync/stream ─▶ greeting ─▶ messages
                     ▲                                                              │
                     └──── after a pause, or once another router has connected ◀────┘ ended

Each pair of routers has two connections, one in each direction. All that a missed message needs is
above: numbered frames, digests and snapshots, as over NATS.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from random import Random
from typing import get_args

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry

from router.config.discovery import PeerConfig
from router.errors import ConfigError, InvalidFieldError, WireError
from router.ingest.errors import PeerItselfError
from router.ingest.peer_streams import (
    Kind,
    PeerStreams,
    RecordReader,
    decode_greeting,
    encode_record,
)
from router.ingest.replica_sync import Take
from router.protocol.catalogue import RouterAnnouncement
from router.protocol.replicas import PeerGreeting, PeerState, PeerView
from router.protocol.subjects import Subjects
from router.protocol.values import UNREADABLE
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.http_client.connection import UpstreamError, UpstreamResponse
from router.runtime.http_client.pool import HttpPool, Origin, PoolLimits, Request
from router.runtime.process.metrics import Rows, counter, expose, gauge
from router.runtime.security.config import SecurityConfig
from router.runtime.security.http_access import ClientTls, HttpAccess
from router.sequence.replicas.replica_set import MAX_REPLICAS
from router.sequence.replicas.reservation_log import HEARTBEAT_S

log = logging.getLogger(__name__)

STREAM_PATH = "/replica_sync/stream"
CONNECT_S = 2.0
SILENT_S = 2.0
"""Time without a byte after which a stream is given up; heartbeats come each HEARTBEAT_S."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 4.0
ITSELF_S = 60.0
"""Delay before an address that was this router's own is tried again."""

ROOM_S = 2.0
"""Time for another router to make room for a message that may wait."""

UNINTERRUPTED_RECORDS = 32
MOST_REFUSAL_BYTES = 64 << 10
MOST_REFUSAL_CHARACTERS = 512


class _StreamError(Exception):
    """A stream that ended, with the state that its router is in from then on."""

    def __init__(self, state: PeerState, problem: str | None) -> None:
        super().__init__(problem)
        self.state: PeerState = state
        self.problem = problem


class _Peer:
    """An address of a router. `retry`: set to try it before its pause is over."""

    __slots__ = ("greeting", "is_tried", "origin", "problem", "retry", "since_unix_s", "state")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.state: PeerState = "trying"
        self.since_unix_s = time.time()
        self.problem: str | None = None
        self.greeting: PeerGreeting | None = None
        self.is_tried = False
        self.retry = asyncio.Event()

    def become(self, state: PeerState, problem: str | None = None) -> bool:
        """Note a state. Returns whether there is something new to say."""
        is_new = (state, problem) != (self.state, self.problem)
        if state != self.state:
            self.since_unix_s = time.time()
        self.state, self.problem, self.is_tried = state, problem, True
        return is_new

    @property
    def view(self) -> PeerView:
        name = None if self.greeting is None else self.greeting.name
        return PeerView(str(self.origin), self.state, self.since_unix_s, name, self.problem)


class PeerBus:
    """The other routers by their addresses. `streams`: those that they have requested here.

    `tls_name`: the name in the others' certificates; empty: the host of each address.
    """

    def __init__(
        self,
        config: PeerConfig,
        security: SecurityConfig,
        greeting: PeerGreeting,
        registry: CollectorRegistry,
        random: Random,
    ) -> None:
        """Register the metrics. Raises ConfigError."""
        self._greeting = greeting
        self._subjects = Subjects(greeting.namespace)
        self._random = random
        self._scheme = "https" if security.tls_cert_file else "http"
        self._access = HttpAccess(config.router_peers_token_file)
        self.tls_name = ""
        own = ("", "")
        if security.tls_client_ca_file:
            own = (security.tls_cert_file, security.tls_key_file)
        self._tls = ClientTls(config.router_peers_ca_file, *own, prefix="router_peers")
        self.streams = PeerStreams(greeting, self._retry_all)
        self._peers: dict[str, _Peer] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._take: Take = lambda _subject, _payload: None
        self._are_known = False
        self._are_tried = asyncio.Event()
        self.connections = 0
        self.beyond_limit = 0
        expose(registry, "kv_router_replica_", _METRICS, self)

    # ── The other routers ────────────────────────────────────────────────────────────────────────

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Replace the addresses, as host:port. Those beyond MAX_REPLICAS are left out."""
        wanted = list(dict.fromkeys(addresses))
        self.beyond_limit = max(0, len(wanted) - MAX_REPLICAS)
        del wanted[MAX_REPLICAS:]
        for gone in self._peers.keys() - set(wanted):
            del self._peers[gone]
            if gone in self._following:
                self._following.pop(gone).cancel()
        for address in wanted:
            if address not in self._peers:
                origin = Origin.of(f"{self._scheme}://{address}")
                self._peers[address] = _Peer(origin)
                self._follow_soon(address)
        self._are_known = True
        self._note_tried()

    def views(self) -> list[PeerView]:
        """Return the state of each address."""
        return [each.view for each in self._peers.values()]

    def announcements(self) -> list[RouterAnnouncement]:
        """Return the connected routers."""
        return [
            RouterAnnouncement(
                router_id=each.router_id,
                name=each.name,
                endpoint=str(peer.origin),
                incarnation=each.incarnation,
            )
            for peer in self._peers.values()
            if peer.state == "connected" and (each := peer.greeting) is not None
        ]

    def problems(self) -> list[str]:
        """Return a sentence about each router that shares nothing."""
        found = [
            f"router {each.origin} shares no reservations: {each.problem}"
            for each in self._peers.values()
            if each.state in ("unreachable", "refused")
        ]
        if self.beyond_limit:
            found.append(f"{self.beyond_limit} routers beyond the limit of {MAX_REPLICAS}")
        return found

    @property
    def states(self) -> dict[str, int]:
        """The number of addresses in each state."""
        counts = dict.fromkeys(get_args(PeerState), 0)
        for each in self._peers.values():
            counts[each.state] += 1
        return counts

    # ── As a bus ─────────────────────────────────────────────────────────────────────────────────

    async def publish(self, payload: bytes) -> None:
        """Send a frame to every router that has room for it. Never waits."""
        self.streams.publish(encode_record(Kind.FRAME, payload))

    async def send(self, router_id: int, payload: bytes) -> None:
        """Send a message to one router, once it has room for it. Raises BusUnavailableError."""
        record = encode_record(Kind.TO_ONE, payload)
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                while not (stream := self.streams.to(router_id)).offer(record):
                    await stream.until_read()
                return
        raise _too_slow(router_id)

    def offer(self, router_id: int, payload: bytes) -> None:
        """Send a message to one router without waiting. Raises BusUnavailableError."""
        if not self.streams.to(router_id).offer(encode_record(Kind.TO_ONE, payload)):
            self.streams.overflows += 1
            raise _too_slow(router_id)

    async def receive(self, take: Take) -> None:
        """Take the messages of all routers until cancelled. Raises what `take` raises."""
        self._take = take
        async with asyncio.TaskGroup() as self._group:
            for address in self._peers:
                self._follow_soon(address)
            await asyncio.Event().wait()

    async def until_greeted(self) -> None:
        """Wait until each address was tried, and connected routers had time for a frame."""
        await self._are_tried.wait()
        await asyncio.sleep(1.5 * HEARTBEAT_S)

    def close(self) -> None:
        """End the streams to the other routers, and accept no more."""
        self.streams.close()

    # ── Streams of other routers ─────────────────────────────────────────────────────────────────

    def _follow_soon(self, address: str) -> None:
        if self._group is not None and address not in self._following:
            following = self._follow(self._peers[address])
            self._following[address] = self._group.create_task(following)

    async def _follow(self, peer: _Peer) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._read(peer)
            except _StreamError as end:
                if peer.state == "connected":
                    pause_s = FIRST_PAUSE_S
                if peer.become(end.state, end.problem) and end.problem:
                    log.warning("router %s: %s", peer.origin, end.problem)
            self._note_tried()
            await self._pause(peer, pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _pause(self, peer: _Peer, longest_s: float) -> None:
        """Wait for half of a time to all of it, or until `retry` is set."""
        peer.retry.clear()
        longest_s = ITSELF_S if peer.state == "itself" else longest_s
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s * (0.5 + self._random.random() / 2)):
                await peer.retry.wait()

    def _retry_all(self) -> None:
        """Try the addresses that are not connected: a router that connects can be reached."""
        for peer in self._peers.values():
            if peer.state != "itself":
                peer.retry.set()

    async def _read(self, peer: _Peer) -> None:
        """Read the stream of a router until it ends. Raises _StreamError."""
        body = msgspec.json.encode(self._greeting)
        try:
            headers = self._access.headers("router_peers")
            tls = self._tls.context() if self._scheme == "https" else None
        except ConfigError as error:
            raise _StreamError("refused", str(error)) from error
        lines = [(b"content-type", b"application/json")]
        lines += [(name.encode(), value.encode("ascii")) for name, value in headers.items()]
        limits = PoolLimits(1, CONNECT_S, head_timeout_s=SILENT_S)
        pool = HttpPool(limits, tls, self.tls_name)
        try:
            request = Request("POST", STREAM_PATH, body, tuple(lines))
            async with pool.response(peer.origin, request) as response:
                if response.status != 200:
                    raise _refusal(await response.read(MOST_REFUSAL_BYTES, SILENT_S), response)
                await self._take_all(peer, response)
        except UpstreamError as error:
            problem = f"{error.problem}{f': {error.detail}' if error.detail else ''}"
            raise _StreamError("unreachable", problem) from error
        except (WireError, InvalidFieldError) as error:
            raise _StreamError("refused", f"its stream cannot be read: {error}") from error
        finally:
            pool.close()
            if peer.state == "connected":
                self._retry_all()  # another address may lead to the same router
        raise _StreamError("unreachable", "it has ended its stream")

    async def _take_all(self, peer: _Peer, response: UpstreamResponse) -> None:
        """Take the messages of a stream until it ends. Raises _StreamError, WireError."""
        records, count = RecordReader(), 0
        subjects: Mapping[Kind, str] = {}
        async for chunk in response.chunks(SILENT_S):
            for kind, payload in records.feed(chunk):
                if not subjects:
                    subjects = self._greet(peer, decode_greeting(payload))
                    continue
                self._take(subjects[kind], payload)
                count += 1
                if count % UNINTERRUPTED_RECORDS == 0:
                    await asyncio.sleep(0)

    def _greet(self, peer: _Peer, greeting: PeerGreeting) -> Mapping[Kind, str]:
        """Note a connected router; return the subjects that its messages have on a bus.

        Raises _StreamError.
        """
        for other in self._peers.values():
            known = other.greeting
            if other is peer or other.state != "connected" or known is None:
                continue
            if known.router_id == greeting.router_id:
                raise _StreamError("doubled", f"{other.origin} is the same router")
        peer.greeting = greeting
        peer.become("connected")
        self.connections += 1
        log.info("router %s at %s shares its reservations", greeting.name, peer.origin)
        self._note_tried()
        ours = self._subjects.to_replica(self._greeting.router_id)
        theirs = self._subjects.reservations(greeting.router_id)
        return {Kind.GREETING: ours, Kind.FRAME: theirs, Kind.TO_ONE: ours}

    def _note_tried(self) -> None:
        if self._are_known and all(each.is_tried for each in self._peers.values()):
            self._are_tried.set()


class _Refusal(Struct):
    """The error response of a router; one of another process may lack its fields."""

    error: str = ""
    code: str = ""


def _refusal(body: bytes, response: UpstreamResponse) -> _StreamError:
    """Return the error of a response that is no stream."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except UNREADABLE:
        refusal = _Refusal()
    if refusal.code == PeerItselfError.code:
        return _StreamError("itself", None)
    reason = f": {refusal.error[:MOST_REFUSAL_CHARACTERS]}" if refusal.error else ""
    return _StreamError("refused", f"{response.status}{reason}")


def _too_slow(router_id: int) -> BusUnavailableError:
    return BusUnavailableError(f"router {router_id} reads too slowly")


_METRICS: Rows = {
    "peers": gauge("Addresses of other routers without a bus, by state", "states", "state"),
    "peer_connections": counter("Streams of other routers that have begun", "connections"),
    "peer_overflows": counter(
        "Messages dropped because a router reads too slowly; it requests a snapshot",
        "streams.overflows",
    ),
}
