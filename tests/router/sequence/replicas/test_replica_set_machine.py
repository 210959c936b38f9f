"""Several routers on a bus that loses, doubles and reorders their messages.

Model: every router remembers its state at each frame. Whatever happens, a mirror equals the state
of its router at the mirror's frame, and changes applied one by one lead to what all mirrors are.
Once the bus works, every router knows the state of all others, and nothing of dead ones.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from router.protocol.replicas import (
    Progress,
    decode_replica_message,
    encode_replica_message,
)
from router.sequence.replicas import reservation_log
from router.sequence.replicas.replica_set import SILENCE_S, ReplicaSet
from router.sequence.replicas.reservation_log import ReservationLog
from support.chaos.fuzzing import examples
from support.fleets.peers import reservation

FATES = ["in order", "in order", "in order", "in order", "out of order", "twice", "lost"]
ROUTERS = st.integers(1, 3)
IDS = st.sampled_from(["a", "b", "c", "d"])
PICKS = st.integers(0, 10_000)


@pytest.fixture(autouse=True)
def _snapshots_have_parts(monkeypatch):
    monkeypatch.setattr(reservation_log, "MAX_CHANGES", 2)


class Router:
    """One life of a router, reduced to what it has booked and what it knows of others."""

    def __init__(self, router_id, incarnation):
        self.router_id, self.incarnation = router_id, incarnation
        self.ledger = ReservationLog(router_id, incarnation)
        self.replicas = ReplicaSet(router_id)
        self.booked = {}
        self.told = {0: {}}
        self.applied = {}

    def take_frame(self, now_s):
        frame = self.ledger.take_frame(self.booked.get, now_s)
        if frame is not None and frame.change_count:
            before = self.told[frame.sequence - 1]
            named = [each.request_id for each in frame.added] + list(frame.freed)
            named += [request_id for request_id, _ in frame.progressed]
            assert len(set(named)) == frame.change_count
            self.told[frame.sequence] = {
                request_id: self.booked[request_id] if request_id in named else before[request_id]
                for request_id in [*before, *(i for i in named if i not in before)]
                if request_id not in frame.freed
            }
        return frame

    def apply(self, changes):
        for change in changes:
            key = (change.router_id, change.request_id)
            assert self.applied.get(key) == change.before
            if change.after is None:
                del self.applied[key]
            else:
                self.applied[key] = change.after


class Replication(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now_s, self.lives = 0.0, 0
        self.routers, self.histories, self.bus, self.falsified = {}, {}, [], set()
        for router_id in (1, 2, 3):
            self.start(router_id)

    # ── What routers do ──────────────────────────────────────────────────────────────────────────

    def start(self, router_id):
        self.lives += 1
        router = self.routers[router_id] = Router(router_id, self.lives)
        self.histories[router_id, self.lives] = router.told

    @rule(router_id=ROUTERS)
    def die_or_come_back(self, router_id):
        if self.routers.pop(router_id, None) is None:
            self.start(router_id)

    @rule(router_id=ROUTERS, request_id=IDS, what=st.sampled_from(["book", "grow", "free"]),
          rank=st.integers(1, 2), blocks=st.integers(0, 2), is_told=st.booleans())  # fmt: skip
    def happen(self, router_id, request_id, what, rank, blocks, is_told):
        """Several routers may get progress of one id; an id may be reused between frames."""
        router = self.routers.get(router_id)
        if router is None:
            return
        known = router.booked.get(request_id)
        if known is None:
            router.booked[request_id] = reservation(request_id, rank, blocks)
            router.ledger.touch(request_id)
        elif what == "grow":
            progress = Progress(rank == 1, known.progress.output_blocks + 1, 0.5 * blocks)
            router.booked[request_id] = replace(known, progress=progress)
            router.ledger.touch_later(request_id)
        elif what == "free":
            del router.booked[request_id]
            router.ledger.touch(request_id)
        if is_told:
            self.flush(router_id)

    def flush(self, router_id):
        frame = self.routers[router_id].take_frame(self.now_s)
        if frame is not None:
            self.send(frame, *(other for other in self.routers if other != router_id))

    # ── What the bus does ────────────────────────────────────────────────────────────────────────

    def send(self, message, *receivers):
        self.bus += [(receiver, encode_replica_message(message)) for receiver in receivers]

    @rule(fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=12), pick=PICKS)
    def carry(self, fates, pick):
        for fate in fates[: len(self.bus)]:
            chosen = pick % len(self.bus)
            if fate == "in order":
                self.deliver(*self.bus.pop(0))
            elif fate == "out of order":
                self.deliver(*self.bus.pop(chosen))
            elif fate == "twice":
                self.deliver(*self.bus[chosen])
            else:
                self.bus.pop(chosen)

    def deliver(self, receiver, payload):
        router = self.routers.get(receiver)
        if router is not None:
            router.apply(router.replicas.take(decode_replica_message(payload), self.now_s))
            self.ask(router)

    def ask(self, router):
        """Snapshots are answered at once, and travel as everything does."""
        for owner in router.replicas.wanted(self.now_s):
            if owner in self.routers:
                parts = list(self.routers[owner].ledger.snapshot())
                for part in parts:
                    self.send(part, router.router_id)

    @rule(passed_s=st.sampled_from([0.01, 0.3, 2.0, SILENCE_S]), is_connected=st.booleans())
    def tick(self, passed_s, is_connected):
        self.now_s += passed_s
        for router in self.routers.values():
            router.apply(router.replicas.tick(self.now_s, is_connected=is_connected))
            self.ask(router)

    @rule(router_id=ROUTERS, request_id=IDS)
    def falsify(self, router_id, request_id):
        """Make a mirror wrong: its digest shows it."""
        router = self.routers.get(router_id)
        for mirror in router.replicas if router is not None else ():
            if request_id in (each.request_id for each in mirror.reservations):
                wrong = reservation(request_id, rank=7)
                router.apply(router.replicas._noted([mirror._put(wrong)]))
                self.falsified.add(mirror)
                return

    # ── What must hold ───────────────────────────────────────────────────────────────────────────

    @invariant()
    def mirrors_equal_what_was_sent(self):
        for router in self.routers.values():
            router.ledger.check_invariants(router.booked)
            router.replicas.check_invariants()
            known = {}
            for mirror in router.replicas:
                has = {each.request_id: each for each in mirror.reservations}
                known |= {(mirror.router_id, i): each for i, each in has.items()}
                history = self.histories[mirror.router_id, mirror.incarnation]
                if not mirror._differs and mirror not in self.falsified:
                    assert has == history[mirror.sequence]
            assert known == router.applied

    def teardown(self):
        """Heal the bus: what is on its way comes, and time passes."""
        for _ in range(40):
            self.now_s += 0.2
            for router_id in list(self.routers):
                self.flush(router_id)
            while self.bus:
                self.deliver(*self.bus.pop(0))
            for router in self.routers.values():
                router.apply(router.replicas.tick(self.now_s, is_connected=True))
                self.ask(router)
        for router in self.routers.values():
            self.mirrors_equal_what_was_sent()
            others = [each for each in self.routers.values() if each is not router]
            assert router.applied == {
                (other.router_id, request_id): each
                for other in others
                for request_id, each in other.booked.items()
            }
            assert router.replicas.in_doubt == []
            assert len(router.replicas) == len(others)


Replication.TestCase.settings = settings(
    max_examples=examples(50),
    stateful_step_count=60,
)
TestReplication = Replication.TestCase
