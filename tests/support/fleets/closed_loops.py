"""Engines that publish events and usage, wired to a real core rightly or wrongly, in virtual
time: real prompts, the real normaliser, the real core.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random

import numpy as np
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from router.core.commands import (
    Apply,
    ApplyLoad,
    ApplySlice,
    Free,
    MarkBeacon,
    PrefillComplete,
    SelectAndReserve,
    SetConnected,
    Tick,
    Tidy,
    UpsertWorker,
)
from router.core.core import RouterCore
from router.errors import KvRouterError
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.replicas import PromptUsage
from router.protocol.requests import SelectRequest
from router.protocol.values import SCHEME, Identity, Rank
from router.publisher.engine_events.batch import EngineBatch, EngineRemoved, EngineStored
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.sequence.active.errors import ReservationNotFoundError
from router.sequence.active.prompt import prepare
from router.sequence.hashing.block_hashes import chain, local_block_hashes
from router.simulator.agenda import EventQueue
from support.values.builders import announcement, report, settings

TICK_S = 0.2
STEP_S = 0.004
TOKEN_S = 20e-6
DECODE_S = 0.01


@dataclass
class Wiring:
    """How the router sees a fleet; unless said otherwise, as it is."""

    block_size: int = 16
    engine_block_size: int = 16
    engine_tokens: object = lambda tokens: tokens
    router_salt: object = lambda _: None
    engine_salt: object = lambda _: None
    caller_seed: int | None = None
    publishes_events: bool = True
    device_blocks: int = 4_000
    host_blocks: int = 0
    publishes_host: bool = True
    says_cached: bool = True


@dataclass
class Work:
    request_id: str
    tokens: list
    salt: str | None
    osl: int
    done: object
    hashes: list = field(default_factory=list)
    cached_tokens: int = 0


class Engine:
    """First in, first out; a prefix cache that evicts from the ends of prompts, and a host tier of
    what the device evicts.
    """

    def __init__(self, world, worker_id):
        self.world, self.worker_id, self.life = world, worker_id, 0
        self.works, self.wiring = [], world.wiring
        self.start()

    def start(self):
        """A new, empty life; requests in progress are repeated."""
        wiring = self.wiring
        for work in self.works:
            self.world.tell(Free, work, False)
            self.world.agenda.after(0.1, work.done)
        self.works = []
        self.life += 1
        self.busy_until_s = self.world.agenda.now_s
        self.uses, self.idle, self.host = {}, OrderedDict(), OrderedDict()
        self.parents, self.tokens, self.salts = {}, {}, {}
        identity = Identity(SCHEME, wiring.block_size)
        self.journal = EventJournal(Rank(self.worker_id, 0), self.life, identity)
        self.normalizer = Normalizer(self.journal, identity)
        self.announce()

    def announce(self):
        identity = Identity(SCHEME, self.wiring.block_size)
        announced = announcement(self.worker_id, identity=identity, incarnation=self.life)
        self.world.core.handle(UpsertWorker(announced), self.world.agenda.now_s)
        self.deliver(self.journal.take())
        self.report()

    def report(self):
        now_s, core = self.world.agenda.now_s, self.world.core
        beacon = core.handle(MarkBeacon(), now_s)[0]
        state = replace(self.journal.taken_state, doubts=self.journal.doubts)
        fields = {"event_id": self.journal.last_event_id, "state": state}
        heard = {beacon.source_id: beacon.beacon_id}
        core.handle(
            ApplyLoad(report(self.worker_id, incarnation=self.life, heard=heard, **fields)), now_s
        )

    def hashes_of(self, tokens, salt):
        size, hashes, parent = self.wiring.engine_block_size, [], None
        for start in range(0, len(tokens) - size + 1, size):
            block = tokens[start : start + size]
            named = repr((parent, block, salt if parent is None else None)).encode()
            mine = xxh3_64_intdigest(named, 99)
            self.parents[mine], self.tokens[mine], self.salts[mine] = parent, block, salt
            hashes.append(mine)
            parent = mine
        return hashes

    def submit(self, work):
        """Waits for those before it, whatever is cached then is reused."""
        life, now_s = self.life, self.world.agenda.now_s
        self.works.append(work)
        start_s = max(now_s, self.busy_until_s)
        self.busy_until_s = start_s + STEP_S + TOKEN_S * len(work.tokens) / 2
        self.world.agenda.at(start_s, self.begin, work, life)

    def begin(self, work, life):
        if life != self.life:
            return
        size = self.wiring.engine_block_size
        work.hashes = self.hashes_of(work.tokens, work.salt)
        limit = (len(work.tokens) - 1) // size
        held = (self.uses, self.idle, self.host)
        known = [any(each in tier for tier in held) for each in work.hashes[:limit]]
        work.cached_tokens = size * [*known, False].index(False)
        fresh = [h for h in work.hashes if h not in self.uses and h not in self.idle]
        for each in work.hashes:
            self.idle.pop(each, None)
            self.uses[each] = self.uses.get(each, 0) + 1
        self.evict()
        took_s = STEP_S + TOKEN_S * (len(work.tokens) - work.cached_tokens)
        self.world.agenda.after(took_s, self.computed, work, fresh, life)

    def computed(self, work, fresh, life):
        if life != self.life:
            return
        self.publish_stored(fresh, "GPU")
        self.publish()
        self.world.first_token(work)
        self.world.agenda.after(DECODE_S * (work.osl - 1), self.finish, work, life)

    def finish(self, work, life):
        if life != self.life:
            return
        for each in reversed(work.hashes):
            self.uses[each] -= 1
            if not self.uses[each]:
                del self.uses[each]
                self.idle[each] = None
        self.evict()
        self.publish()
        self.works.remove(work)
        self.world.finished(work)

    def evict(self):
        wiring = self.wiring
        room = wiring.device_blocks * 16 // wiring.engine_block_size
        gone, moved = [], []
        while len(self.uses) + len(self.idle) > room and self.idle:
            each, _ = self.idle.popitem(last=False)
            gone.append(each)
            if wiring.host_blocks:
                self.host.pop(each, None)
                self.host[each] = None
                moved.append(each)
        dropped = [
            self.host.popitem(last=False)[0] for _ in range(len(self.host) - wiring.host_blocks)
        ]
        if wiring.publishes_host:
            for each in reversed(moved):
                self.publish_stored([each], "CPU")
            self.publish_removed(dropped, "CPU")
        self.publish_removed(gone, "GPU")

    def publish_stored(self, hashes, medium):
        for each in hashes:
            event = EngineStored(
                np.array([each], np.uint64),
                self.parents[each],
                np.array(self.tokens[each], np.uint32),
                self.wiring.engine_block_size,
                medium,
                cache_salt=self.salts[each],
            )
            self.apply(event)

    def publish_removed(self, hashes, medium):
        if hashes:
            self.apply(EngineRemoved(np.array(hashes, np.uint64), medium))

    def apply(self, event):
        if self.wiring.publishes_events:
            batch = EngineBatch(0, [event], [], [])
            self.normalizer.apply(batch, self.world.agenda.now_s)

    def publish(self):
        if self.journal.has_news:
            lag_s = self.world.rng.uniform(0.3, 1.7) * self.world.event_lag_s
            self.due_s = max(getattr(self, "due_s", 0.0), self.world.agenda.now_s + lag_s)
            self.world.agenda.at(self.due_s, self.deliver, self.journal.take())

    def deliver(self, messages):
        for message in messages:
            self.world.core.handle(Apply(message), self.world.agenda.now_s)
            while self.world.core.handle(ApplySlice(), 0.0)[0]:
                pass


class Fleet:
    """Engines behind a router, and their callers."""

    def __init__(
        self, wiring, workers=2, seed=1, event_lag_s=0.02, publishes_early=False, **fields
    ):
        self.wiring, self.rng, self.event_lag_s = wiring, Random(seed), event_lag_s
        self.publishes_early, self.agenda = publishes_early, EventQueue()
        self.core = RouterCore(settings(**fields), RadixTree, Random(seed))
        self.core.handle(SetConnected(True), 0.0)
        self.engines = [Engine(self, worker_id) for worker_id in range(workers)]
        self.served = 0
        self.detected = {}
        self.agenda.after(TICK_S, self.tick)

    def tick(self):
        self.agenda.after(TICK_S, self.tick)
        for engine in self.engines:
            engine.report()
        for effect in self.core.handle(Tick(), self.agenda.now_s)[1]:
            rank = getattr(effect, "rank", None)
            if type(effect).__name__ == "RequestCheckpoint":
                engine = self.engines[rank.worker_id]
                engine.journal.require_checkpoint()
                engine.publish()
        while self.core.handle(Tidy(), self.agenda.now_s)[0]:
            pass

    def ask(self, tokens, tenant=None, osl=8, done=lambda: None):
        """A request, by the tokens that its caller means; `done` is called at its end."""
        wiring, now_s = self.wiring, self.agenda.now_s
        request_id = f"r{self.rng.getrandbits(60)}"
        asked = self.asked(tokens, tenant, request_id)
        try:
            placement, _ = self.core.handle(SelectAndReserve(asked, prepare(asked, ())), now_s)
        except KvRouterError:
            self.agenda.after(0.2, done)  # asks on, as if it had been answered
            return None
        sent = wiring.engine_tokens(tokens)
        work = Work(request_id, sent, wiring.engine_salt(tenant), osl, done)
        self.engines[placement.rank.worker_id].submit(work)
        return work

    def asked(self, tokens, tenant, request_id):
        wiring, fields = self.wiring, {"tenant": tenant, "request_id": request_id}
        if wiring.caller_seed is None:
            return SelectRequest(token_ids=tokens, cache_salt=wiring.router_salt(tenant), **fields)
        array = np.array(tokens, np.uint32)
        blocks = local_block_hashes(array, wiring.block_size, seed=wiring.caller_seed)
        return SelectRequest(
            sequence_hashes=chain(blocks).tolist(), isl_tokens=len(tokens), **fields
        )

    def usage(self, work):
        return PromptUsage(len(work.tokens), work.cached_tokens, self.wiring.says_cached)

    def first_token(self, work):
        self.tell(PrefillComplete, work, self.publishes_early)

    def finished(self, work):
        self.tell(Free, work, True)
        work.done()

    def tell(self, command, work, with_usage):
        usage = self.usage(work) if with_usage else None
        try:
            self.core.handle(command(work.request_id, usage), self.agenda.now_s)
        except ReservationNotFoundError:
            return
        if with_usage:
            self.served += 1
            self.look()

    def look(self):
        for finding in self.core.closed_loop.findings():
            self.detected.setdefault(finding.group, (self.served, finding))

    def run_until(self, requests):
        while self.served < requests:
            self.agenda.step()


class Conversations:
    """Callers that ask on: what was said, an answer, another question; a system prompt for all of a
    tenant. `at_once` talk at the same time.
    """

    def __init__(self, fleet, tenants=("a", "b"), at_once=12, turns=(1, 6), pause_s=0.3, **lengths):
        self.fleet, self.rng, self.turns, self.pause_s = fleet, fleet.rng, turns, pause_s
        self.lengths = {"system": 160, "question": (10, 120), "osl": (1, 60)} | lengths
        self.systems = {tenant: self.text(self.lengths["system"]) for tenant in tenants}
        self.stopped = False
        for _ in range(at_once):
            fleet.agenda.after(self.rng.uniform(0, 2 * pause_s), self.begin)

    def text(self, tokens):
        return [self.rng.randrange(1, 30_000) for _ in range(tokens)]

    def begin(self):
        tenant = self.rng.choice(list(self.systems))
        self.turn(tenant, list(self.systems[tenant]), self.rng.randint(*self.turns))

    def turn(self, tenant, said, left):
        if self.stopped:
            return
        if not left:
            self.begin()
            return
        said = said + self.text(self.rng.randint(*self.lengths["question"]))
        osl = self.rng.randint(*self.lengths["osl"])

        def done():
            answered = said + self.text(osl)
            self.fleet.agenda.after(
                self.rng.expovariate(1 / self.pause_s), self.turn, tenant, answered, left - 1
            )

        self.fleet.ask(said, tenant, osl, done)
