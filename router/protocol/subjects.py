"""Every name on the bus."""

import re

from msgspec import Struct

from router.errors import WireError
from router.protocol.values import Rank

NAMESPACE_PATTERN = r"[A-Za-z0-9_-]{1,64}"


class Subjects(Struct, frozen=True):
    """Names on the bus, for one namespace. Raises ValueError for one that NATS could not carry."""

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
        """The one object in it."""
        return "radix-state"

    @property
    def all_events(self) -> str:
        """Events of every rank."""
        return f"kv.{self.namespace}.events.*.*"

    @property
    def all_loads(self) -> str:
        """Load of every rank."""
        return f"kv.{self.namespace}.load.*.*"

    @property
    def router(self) -> str:
        """Where routers answer commands, in queue group `router`."""
        return f"kv.{self.namespace}.router"

    @property
    def index_queries(self) -> str:
        """Where whoever keeps an index answers questions about it, in queue group `indexer`."""
        return f"kv.{self.namespace}.indexer.query"

    @property
    def all_reservations(self) -> str:
        """What every router says of its reservations."""
        return f"kv.{self.namespace}.sequences.*"

    @property
    def prefills(self) -> str:
        """What processes that forward tell each other of workers of role prefill."""
        return f"kv.{self.namespace}.prefill"

    @property
    def beacons(self) -> str:
        """Where routers mark time, for load reports to carry."""
        return f"kv.{self.namespace}.beacons"

    def key(self, key: str) -> str:
        """Where a key of the bucket is written."""
        return f"$KV.{self.bucket}.{key}"

    def events(self, rank: Rank) -> str:
        """Events of one rank, which is their only writer."""
        return f"kv.{self.namespace}.events.{rank}"

    def load(self, rank: Rank) -> str:
        """Load of one rank."""
        return f"kv.{self.namespace}.load.{rank}"

    def reservations(self, router_id: int) -> str:
        """What one router, which is its only writer, says of its reservations."""
        return f"kv.{self.namespace}.sequences.{router_id}"

    def to_replica(self, router_id: int) -> str:
        """What other routers say to one router."""
        return f"kv.{self.namespace}.sequences.{router_id}.inbox"

    def ping(self, worker_id: int) -> str:
        """Answered with its incarnation by the live agent of this worker."""
        return f"kv.{self.namespace}.worker.{worker_id}.ping"

    def tiers(self, worker_id: int) -> str:
        """Where the agent of this worker is asked of its tiers, and told to give blocks up."""
        return f"kv.{self.namespace}.worker.{worker_id}.tiers"

    def checkpoint_wanted(self, rank: Rank) -> str:
        """Asks the agent of this rank for a checkpoint."""
        return f"kv.{self.namespace}.worker.{rank}.checkpoint"

    def load_wanted(self, rank: Rank) -> str:
        """Answered with a load report by the agent of this rank."""
        return f"kv.{self.namespace}.worker.{rank}.load"

    def events_wanted(self, rank: Rank) -> str:
        """Answered with recent events, or all that is held, by the agent of this rank."""
        return f"kv.{self.namespace}.worker.{rank}.events"


def rank_of(subject: str) -> Rank:
    """The rank that an event or load subject ends in. Raises WireError."""
    *_, worker_id, dp_rank = ["", "", *subject.split(".")]
    if not (worker_id.isdecimal() and dp_rank.isdecimal()):
        raise WireError(f"subject {subject!r} names no rank")
    return Rank(int(worker_id), int(dp_rank))
