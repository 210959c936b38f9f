"""Settings of a Dynamo fleet, and the names of its subjects."""

from msgspec import Struct

from router.core.registered_workers import EventSource, ImplicitWorker
from router.protocol.values import Identity
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying

EVENTS, LOADS, SEQUENCES, PASSES = (
    "kv-events",
    "kv_metrics",
    "active_sequences_events",
    "forward-pass-metrics",
)
"""Topics of blocks, of load, of requests, and of forward passes, which planners read."""


class DynamoSettings(Struct, frozen=True, kw_only=True):
    """One component of a Dynamo fleet, with the facts on its workers that its wire omits."""

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
    naming: HashKeying = PLAIN

    @property
    def identity(self) -> Identity:
        """The identity of the block hashes: Dynamo's hash scheme, and the block size."""
        return Identity(self.naming.scheme, self.block_size)

    @property
    def stream(self) -> str:
        """The JetStream stream that 1.0.2's workers write to by default."""
        return f"{self._slug}-{EVENTS}"

    @property
    def snapshot_bucket(self) -> str:
        """The bucket of 1.0.2's routers for their dump of the messages purged from the stream."""
        return f"{self._slug}-radix-bucket"

    @property
    def address(self) -> str:
        """The pseudo-address of the fleet."""
        return f"dynamo://{self.namespace}/{self.component}"

    def worker(self, worker_id: int, dp_ranks: tuple[int, ...], incarnation: int) -> ImplicitWorker:
        """Return a worker with these ranks; its real address is only in Dynamo's own discovery."""
        return ImplicitWorker(
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
            heard_from=EventSource(self.address),
        )

    def subjects(self, topic: str) -> tuple[str, ...]:
        """Return the core NATS subjects of a topic: 1.0.2's, and that of 1.6.1's endpoints."""
        namespace = f"namespace.{self.namespace}"
        component = f"{namespace}.component.{self.component}"
        place_in_1_0 = namespace if topic == LOADS else component
        return f"{place_in_1_0}.{topic}", f"{component}.endpoint.*.{topic}"

    @property
    def _slug(self) -> str:
        name = f"namespace.{self.namespace}.component.{self.component}"
        return name.replace(".", "-").replace("_", "-").lower()
