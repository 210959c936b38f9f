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
from collections.abc import Iterable
from contextlib import suppress
from random import Random
from typing import get_args

from prometheus_client import CollectorRegistry

from router.config.discovery import PeerConfig
from router.ingest.peer_reader import PeerReader, StreamEndError
from router.ingest.peer_streams import Kind, PeerStreams, encode_record
from router.ingest.replica_sync import Take
from router.protocol.catalogue import RouterAnnouncement
from router.protocol.replicas import PeerGreeting, PeerState, PeerView
from router.protocol.subjects import Subjects
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.http_client.pool import Origin
from router.runtime.process.metrics import Rows, counter, expose, gauge
from router.runtime.security.config import SecurityConfig
from router.sequence.replicas.replica_set import MAX_REPLICAS

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 4.0
ITSELF_S = 60.0
"""Delay before an address that was this router's own is tried again."""

ROOM_S = 2.0
"""Time for another router to make room for a message that may wait."""


class _Peer:
    """An address of a router. `retry`: set to try it before its pause is over.

    `has_sent`: it has sent a frame since it is connected.
    """

    __slots__ = (
        "greeting",
        "has_sent",
        "is_tried",
        "origin",
        "problem",
        "retry",
        "since_unix_s",
        "state",
    )

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.state: PeerState = "trying"
        self.since_unix_s = time.time()
        self.problem: str | None = None
        self.greeting: PeerGreeting | None = None
        self.is_tried = self.has_sent = False
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
    """The other routers by their addresses. `streams`: those that they have requested here."""

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
        self._reader = PeerReader(config, security, greeting)
        self.streams = PeerStreams(greeting, self._retry_all)
        self._peers: dict[str, _Peer] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._take: Take = lambda _subject, _payload: None
        self._are_known = False
        self._are_greeted = asyncio.Event()
        self.connections = 0
        self.beyond_limit = 0
        expose(registry, "kv_router_replica_", _METRICS, self)

    def name_certificates(self, name: str) -> None:
        """Expect this name in the certificates of the others, in place of their hosts."""
        self._reader.tls_name = name

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
                origin = Origin.of(f"{self._reader.scheme}://{address}")
                self._peers[address] = _Peer(origin)
                self._follow_soon(address)
        self._are_known = True
        self._note_greeted()

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
        """Wait until each address was tried, and each connected router has sent a frame."""
        await self._are_greeted.wait()

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
            except StreamEndError as end:
                if peer.state == "connected":
                    pause_s = FIRST_PAUSE_S
                if peer.become(end.state, end.problem) and end.problem:
                    log.warning("router %s: %s", peer.origin, end.problem)
            self._note_greeted()
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
        """Read the stream of a router until it ends. Raises StreamEndError."""
        ours = self._subjects.to_replica(self._greeting.router_id)
        theirs = ""

        def greet(greeting: PeerGreeting) -> None:
            nonlocal theirs
            self._greet(peer, greeting)
            theirs = self._subjects.reservations(greeting.router_id)

        def take(kind: Kind, payload: bytes) -> None:
            self._take(theirs if kind is Kind.FRAME else ours, payload)
            if kind is Kind.FRAME and not peer.has_sent:
                peer.has_sent = True
                self._note_greeted()

        try:
            await self._reader.read(peer.origin, greet, take)
        finally:
            if peer.state == "connected":
                self._retry_all()  # another address may lead to the same router

    def _greet(self, peer: _Peer, greeting: PeerGreeting) -> None:
        """Note a connected router. Raises StreamEndError if another address leads to it."""
        for other in self._peers.values():
            known = other.greeting
            if other is peer or other.state != "connected" or known is None:
                continue
            if known.router_id == greeting.router_id:
                raise StreamEndError("doubled", f"{other.origin} is the same router")
        peer.greeting, peer.has_sent = greeting, False
        peer.become("connected")
        self.connections += 1
        log.info("router %s at %s shares its reservations", greeting.name, peer.origin)

    def _note_greeted(self) -> None:
        peers = self._peers.values()
        if self._are_known and all(
            each.has_sent if each.state == "connected" else each.is_tried for each in peers
        ):
            self._are_greeted.set()


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
