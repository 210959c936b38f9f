"""Agents without engines, as they run in an agent's process; all they ever held is remembered.

Their blocks come and go as a test sets them, everything behind is what real agents have: journal,
publisher, announcement, reports.
"""

import asyncio
import time
from math import inf

from router.protocol.catalogue import encode_entry, worker_key
from router.protocol.loads import LoadReport
from router.protocol.requests import SelectRequest
from router.protocol.values import Tier
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.journal.journal import EventJournal, JournalLimits
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.runtime.bus.connection import StreamLimits, connection
from router.runtime.bus.errors import BusError, TwinError
from router.runtime.bus.kv_lease import KvLease
from router.runtime.bus.transport import NatsTransport
from router.sequence.active.prompt import prepare
from support.processes.running import SUBJECTS
from support.values.builders import IDENTITY, announcement
from worker_agent.process.control import (
    answer_checkpoint_requests,
    answer_pings,
    listen_for_beacons,
    listen_for_pings,
    refuse_twin,
)

SMALL = JournalLimits(checkpoint_part_blocks=24, tail_blocks=96)
"""So that checkpoints come often, and in parts."""

PROMPTS = [
    [group] * 16 + list(range(100 * own, 100 * own + 24))
    for group in range(4)
    for own in range(1, 4)
]
HASHES = [
    prepare(SelectRequest(token_ids=p), ()).hashed(IDENTITY).sequence_hashes.tolist()
    for p in PROMPTS
]


class Life:
    """All that a rank held in one life: as of each event, and until when that was all."""

    def __init__(self, incarnation):
        self.incarnation = incarnation
        self.ended_s = inf
        self.held = {}
        self.outdated_s = {}
        self._last_event_id = 0

    def note_taken(self, event_id, hashes):
        self.held[event_id] = frozenset(hashes)
        self._last_event_id = event_id

    def note_change(self):
        self.outdated_s.setdefault(self._last_event_id, time.monotonic())

    def was(self, event_id, since_s):
        """What was held as of an event, unless it was outdated before that moment."""
        is_over = self.ended_s < since_s or self.outdated_s.get(event_id, inf) < since_s
        return None if is_over else self.held.get(event_id)


class RecordingJournal(EventJournal):
    """Remembers what it has said."""

    def __init__(self, rank, life, limits):
        super().__init__(rank, life.incarnation, IDENTITY, limits)
        self._life = life

    def take(self):
        messages = super().take()
        self._life.note_taken(self.last_event_id, self.held(Tier.DEVICE).tolist())
        return messages


class _Rank:
    """One rank of an edge, in one life."""

    def __init__(self, edge, rank):
        self.life = Life(edge.incarnation)
        self.journal = RecordingJournal(rank, self.life, edge.limits)
        self.events = KvEventPublisher(self.journal, SUBJECTS.events(rank), flush_interval_s=0.02)
        self.loads = LoadPublisher(self._report, SUBJECTS.load(rank), interval_s=0.4)
        self._edge = edge
        self._rank = rank
        self._report_count = 0

    def change(self, rng):
        """Blocks come or go, mostly in order."""
        before = self.held
        hashes = rng.choice(HASHES)
        first, kind = rng.choice([0, 0, 0, rng.randrange(len(hashes))]), rng.random()
        last = first + rng.randint(1, len(hashes))
        if kind < 0.6:
            parent = hashes[first - 1] if first else None
            self.events.stored(Tier.DEVICE, hashes[first:last], parent)
        elif kind < 0.98:
            self.events.removed(Tier.DEVICE, hashes[-rng.randint(1, len(hashes)) :])
        else:
            self.events.cleared()
        if self.held != before:
            self.life.note_change()
        self.loads.changed()

    @property
    def held(self):
        return set(self.journal.held(Tier.DEVICE).tolist())

    def _report(self):
        self._report_count += 1
        return LoadReport(
            worker_id=self._rank.worker_id,
            dp_rank=self._rank.dp_rank,
            agent_incarnation=self._edge.incarnation,
            incarnation=self._edge.incarnation,
            report_id=self._report_count,
            event_id=self.events.published.event_id,
            state=self.events.reported_state,
            waiting_s=self.events.waiting_s,
            heard=self._edge.beacons.last(time.monotonic()),
        )


class Edge:
    """One worker's agent. `clock_error_s`: by how much its wall clock is wrong."""

    def __init__(self, url, worker_id, dp_size=1, limits=SMALL):
        self.worker_id = worker_id
        self.clock_error_s = 0
        self.lives = {}
        self.ranks = {}
        self._url = url
        self._dp_size = dp_size
        self.limits = limits
        self._task = None

    @property
    def is_dead(self):
        return self._task.done()

    @property
    def held(self):
        """What it holds now: {(worker, rank): hashes}, ranks that hold nothing left out."""
        return {
            (self.worker_id, r.dp_rank): rank.held for r, rank in self.ranks.items() if rank.held
        }

    def start(self):
        """Begin a life, with nothing held."""
        self.incarnation = (time.time_ns() + int(self.clock_error_s * 1e9)) // 1000
        self.beacons = ReceivedBeacons()
        self._announcement = announcement(
            self.worker_id, incarnation=self.incarnation, data_parallel_size=self._dp_size
        )
        self.ranks = {rank: _Rank(self, rank) for rank in self._announcement.ranks}
        for rank, here in self.ranks.items():
            self.lives.setdefault(rank.dp_rank, []).append(here.life)
        self._task = asyncio.create_task(self._run())

    async def kill(self):
        """End this life without a word; after its link was cut, it is a sudden death."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=60)
        assert self.is_dead
        if not self._task.cancelled():
            self._task.result()  # it had ended by itself
        for here in self.ranks.values():
            here.life.ended_s = time.monotonic()

    async def change_forever(self, rng, pause_s=0.02):
        while True:
            if not self.is_dead:
                rng.choice(list(self.ranks.values())).change(rng)
            await asyncio.sleep(rng.random() * 2 * pause_s)

    async def _run(self):
        while True:
            async with connection(self._url, f"edge {self.worker_id}", self._connected) as bus:
                try:
                    await self._live(bus)
                except* (BusError, TwinError):  # a supervisor starts an agent again
                    await asyncio.sleep(0.2)

    def _connected(self, connected):
        if connected and (announcer := getattr(self, "_announcer", None)):
            announcer.renew_soon()

    async def _live(self, bus):
        key = worker_key(self.worker_id)
        self._announcer = announcer = KvLease(bus.js, SUBJECTS, key, self.incarnation)
        transport = NatsTransport(bus, SUBJECTS, StreamLimits())
        publishers = {rank: here.events for rank, here in self.ranks.items()}
        async with asyncio.TaskGroup() as group:
            await announcer.look()
            await refuse_twin(bus, SUBJECTS, self.worker_id)
            pings = await listen_for_pings(bus, SUBJECTS, self.worker_id)
            group.create_task(answer_pings(pings, self.incarnation))
            await announcer.claim(encode_entry(self._announcement))
            group.create_task(announcer.run())
            group.create_task(answer_checkpoint_requests(bus, SUBJECTS, publishers))
            group.create_task(listen_for_beacons(bus, SUBJECTS, self.beacons))
            for here in self.ranks.values():
                group.create_task(here.events.run(transport, announcer.verify))
                group.create_task(here.loads.run(transport))
