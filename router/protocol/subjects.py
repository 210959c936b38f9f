"""All names on the bus: subjects, streams and buckets."""

import re

from msgspec import Struct

from router.errors import WireError
from router.protocol.values import MAX_DP_RANK, U64_MAX, Rank, number_in

NAMESPACE_PATTERN = r"[A-Za-z0-9_-]{1,64}"


class Subjects(Struct, frozen=True):
    """Names on the bus, for one namespace. Raises ValueError for one that NATS cannot carry."""

    namespace: str

    def __post_init__(self) -> None:
        if not re.fullmatch(NAMESPACE_PATTERN, self.namespace):
            raise ValueError(f"namespace {self.namespace!r} does not match {NAMESPACE_PATTERN}")

    @property
    def event_stream(self) -> str:
        """The JetStream stream of all events."""
        return f"kv-{self.namespace}-events"

    @property
    def bucket(self) -> str:
        """The key-value bucket of workers, routers and orders."""
        return f"kv-{self.namespace}-workers"

    @property
    def bucket_stream(self) -> str:
        """The stream that keeps the bucket."""
        return f"KV_{self.bucket}"

    @property
    def snapshot_bucket(self) -> str:
        """The object store of routers' snapshots."""
        return f"kv-{self.namespace}-radix"

    @property
    def snapshot_object(self) -> str:
        """The one object in the object store."""
        return "radix-state"

    @property
    def all_events(self) -> str:
        """The events of every rank."""
        return f"kv.{self.namespace}.events.*.*"

    @property
    def all_loads(self) -> str:
        """The load of every rank."""
        return f"kv.{self.namespace}.load.*.*"

    @property
    def router(self) -> str:
        """The subject of commands to routers, in queue group `router`."""
        return f"kv.{self.namespace}.router"

    @property
    def index_queries(self) -> str:
        """The subject of index queries, in queue group `indexer`."""
        return f"kv.{self.namespace}.indexer.query"

    @property
    def all_reservations(self) -> str:
        """The reservations of every router."""
        return f"kv.{self.namespace}.sequences.*"

    @property
    def prefills(self) -> str:
        """The events of forwarding processes about workers of role prefill."""
        return f"kv.{self.namespace}.prefill"

    @property
    def beacons(self) -> str:
        """The beacons of routers, which load reports return."""
        return f"kv.{self.namespace}.beacons"

    def key(self, key: str) -> str:
        """Return the subject to which a key of the bucket is written."""
        return f"$KV.{self.bucket}.{key}"

    def events(self, rank: Rank) -> str:
        """Return the subject of one rank's events. The rank is its only writer."""
        return f"kv.{self.namespace}.events.{rank}"

    def load(self, rank: Rank) -> str:
        """Return the subject of one rank's load."""
        return f"kv.{self.namespace}.load.{rank}"

    def reservations(self, router_id: int) -> str:
        """Return the subject of one router's reservations. The router is its only writer."""
        return f"kv.{self.namespace}.sequences.{router_id}"

    def to_replica(self, router_id: int) -> str:
        """Return the subject of messages from other routers to one router."""
        return f"kv.{self.namespace}.sequences.{router_id}.inbox"

    def ping(self, worker_id: int) -> str:
        """Return the subject on which a worker's live agent responds with its incarnation."""
        return f"kv.{self.namespace}.worker.{worker_id}.ping"

    def tiers(self, worker_id: int) -> str:
        """Return the subject of queries and release requests about a worker's tiers."""
        return f"kv.{self.namespace}.worker.{worker_id}.tiers"

    def checkpoint_wanted(self, rank: Rank) -> str:
        """Return the subject of requests to a rank's agent for a checkpoint."""
        return f"kv.{self.namespace}.worker.{rank}.checkpoint"

    def load_wanted(self, rank: Rank) -> str:
        """Return the subject on which a rank's agent responds with a load report."""
        return f"kv.{self.namespace}.worker.{rank}.load"

    def events_wanted(self, rank: Rank) -> str:
        """Return the subject of event queries to a rank's agent."""
        return f"kv.{self.namespace}.worker.{rank}.events"


def rank_of(subject: str) -> Rank:
    """Return the rank at the end of an event or load subject. Raises WireError."""
    *_, worker, rank = ["", "", *subject.split(".")]
    worker_id, dp_rank = number_in(worker, U64_MAX), number_in(rank, MAX_DP_RANK)
    if worker_id is None or dp_rank is None:
        raise WireError(f"subject {subject[:100]!r} names no rank")
    return Rank(worker_id, dp_rank)
