"""Values that tests need in quantity, with what does not matter filled in."""

from itertools import count
from random import Random

from router.core.commands import (
    Apply,
    ApplyLoad,
    MarkBeacon,
    Select,
    SelectAndReserve,
    SetConnected,
    UpsertWorker,
)
from router.core.core import RouterCore
from router.core.fleet import LivenessLimits
from router.core.settings import CoreSettings
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.loads import LoadGauges, LoadReport
from router.protocol.requests import SelectRequest
from router.protocol.values import SCHEME, HeldState, Identity, Rank, Tier
from router.publisher.journal.journal import EventJournal
from router.scheduler.settings import PolicySettings
from router.sequence.active.prompt import prepare

BLOCK_SIZE = 4
IDENTITY = Identity(SCHEME, BLOCK_SIZE)


def announcement(worker_id, **fields):
    defaults = {
        "name": f"w{worker_id}",
        "endpoint": f"http://w{worker_id}",
        "identity": IDENTITY,
        "total_kv_blocks": 1000,
        "max_num_batched_tokens": 8192,
        "incarnation": 1,
    }
    return WorkerAnnouncement(worker_id=worker_id, **{**defaults, **fields})


_report_ids = count(1)


def report(worker_id, dp_rank=0, *, incarnation=1, **fields):
    defaults = {
        "report_id": next(_report_ids),
        "agent_incarnation": incarnation,
        "event_id": 0,
        "state": HeldState(),
        "gauges": LoadGauges(running_requests=2),
    }
    return LoadReport(
        worker_id=worker_id, dp_rank=dp_rank, incarnation=incarnation, **{**defaults, **fields}
    )


def settings(**fields):
    defaults = {
        "router_id": 9,
        "policy": PolicySettings(1.0, 0.0),
        "liveness": LivenessLimits(),
        "reservation_ttl_s": 300.0,
        "max_reservations": 1000,
        "default_policy": "dynamo-1.0",  # whose costs are counted by hand
    }
    return CoreSettings(**{**defaults, **fields})


class World:
    """A core, and agents' journals that speak to it."""

    def __init__(self, make_indexer=RadixTree, selectors=None, rng=None, **fields):
        rng = Random(5) if rng is None else rng
        self.core = RouterCore(settings(**fields), make_indexer, rng, selectors)
        self.core.handle(SetConnected(True), 0.0)
        self.journals = {}

    def worker(self, worker_id, now_s=0.0, **fields):
        """Announce a worker, report for it, and deliver its first checkpoint."""
        announced = announcement(worker_id, **fields)
        self.core.handle(UpsertWorker(announced), now_s)
        for rank in announced.ranks:
            self.journals[rank] = EventJournal(rank, announced.incarnation, announced.identity)
            self.deliver(rank, now_s)
            self.report_load(rank, now_s)
        return announced

    def deliver(self, rank, now_s=0.0):
        return [
            self.core.handle(Apply(message), now_s)[0] for message in self.journals[rank].take()
        ]

    def report_load(self, rank, now_s, **fields):
        journal, beacon = self.journals[rank], self.core.handle(MarkBeacon(), now_s)[0]
        return self.core.handle(
            ApplyLoad(
                report(
                    rank.worker_id,
                    rank.dp_rank,
                    incarnation=journal.incarnation,
                    event_id=journal.last_event_id,
                    state=journal.taken_state,
                    heard={beacon.source_id: beacon.beacon_id},
                    **fields,
                )
            ),
            now_s,
        )[1]

    def cache(self, rank, token_ids, tier=Tier.DEVICE, **fields):
        """Let a rank hold the blocks of a prompt."""
        request = SelectRequest(token_ids=token_ids, **fields)
        prompt = prepare(request, (), naming=self.core.naming)
        hashed = prompt.hashed(self.journals[rank].identity)
        if hashes := hashed.sequence_hashes.tolist():
            self.journals[rank].stored(tier, hashes, None)
        self.deliver(rank)

    def select(self, token_ids, now_s=0.0, **fields):
        request = SelectRequest(token_ids=token_ids, **fields)
        return self.core.handle(
            Select(request, prepare(request, (), naming=self.core.naming)), now_s
        )[0]

    def book(self, request_id, token_ids, now_s=0.0, **fields):
        request = SelectRequest(token_ids=token_ids, request_id=request_id, **fields)
        return self.core.handle(
            SelectAndReserve(request, prepare(request, (), naming=self.core.naming)), now_s
        )


def rank(worker_id, dp_rank=0):
    return Rank(worker_id, dp_rank)
