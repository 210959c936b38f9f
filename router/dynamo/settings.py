"""What has to be known of a Dynamo fleet, and what things are called there."""

from msgspec import Struct

from router.dynamo.rank import RankLimits
from router.heard import HeardFrom, HeardWorker
from router.protocol.values import Identity
from router.sequence.naming import PLAIN, BlockNaming

EVENTS, LOADS, SEQUENCES, PASSES = (
    "kv-events",
    "kv_metrics",
    "active_sequences_events",
    "forward-pass-metrics",
)
"""Topics: of blocks, of load, of requests; and of what only planners read."""


class DynamoSettings(Struct, frozen=True, kw_only=True):
    """One component of a Dynamo fleet, and what its wire does not say of its workers."""

    nats_url: str
    namespace: str
    component: str
    model_name: str
    routing_group: str
    block_size: int
    max_num_batched_tokens: int
    total_kv_blocks: int
    max_ranks: int
    silence_s: float
    naming: BlockNaming = PLAIN

    @property
    def identity(self) -> Identity:
        """How blocks are named: by the rule that Dynamo's local hashes follow."""
        return Identity(self.naming.scheme, self.block_size)

    @property
    def limits(self) -> RankLimits:
        """Bounds on what a rank can make us keep."""
        past_blocks = max(2 * self.total_kv_blocks, RankLimits().past_blocks)
        return RankLimits(past_blocks=past_blocks)

    @property
    def stream(self) -> str:
        """The JetStream stream that 1.0.2's workers write by default."""
        return f"{self._slug}-{EVENTS}"

    @property
    def snapshot_bucket(self) -> str:
        """Where 1.0.2's routers keep a dump of what they have purged from the stream."""
        return f"{self._slug}-radix-bucket"

    @property
    def address(self) -> str:
        """What stands for the fleet's address."""
        return f"dynamo://{self.namespace}/{self.component}"

    def worker(self, worker_id: int, dp_ranks: tuple[int, ...], incarnation: int) -> HeardWorker:
        """A worker with these ranks. Its real address only Dynamo's own discovery knows."""
        return HeardWorker(
            worker_id=worker_id,
            name=f"dynamo {worker_id}",
            model_name=self.model_name,
            routing_group=self.routing_group,
            endpoint=f"{self.address}/{worker_id}",
            identity=self.identity,
            total_kv_blocks=self.total_kv_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            data_parallel_start_rank=dp_ranks[0],
            data_parallel_size=dp_ranks[-1] - dp_ranks[0] + 1,
            incarnation=incarnation,
            dp_ranks=dp_ranks,
            heard_from=HeardFrom(self.address),
        )

    def subjects(self, topic: str) -> tuple[str, ...]:
        """Where a topic is spoken of on core NATS: by 1.0.2, and by 1.6.1's endpoints."""
        namespace = f"namespace.{self.namespace}"
        component = f"{namespace}.component.{self.component}"
        place_in_1_0 = namespace if topic == LOADS else component
        return f"{place_in_1_0}.{topic}", f"{component}.endpoint.*.{topic}"

    @property
    def _slug(self) -> str:
        name = f"namespace.{self.namespace}.component.{self.component}"
        return name.replace(".", "-").replace("_", "-").lower()
