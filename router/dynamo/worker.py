"""A worker of a Dynamo fleet, as the core knows it: nobody announces it here, it is heard."""

from typing import ClassVar

from msgspec import Struct

from router.dynamo.settings import DynamoSettings
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Rank


class DynamoSource(Struct, frozen=True):
    """Where such a worker's events come from."""

    namespace: str
    component: str


class DynamoWorker(WorkerAnnouncement, frozen=True, kw_only=True):
    """A worker with the ranks heard so far. Its silence says nothing for a long time."""

    reports_load: ClassVar[bool] = False
    agent_is_engine: bool = False
    dp_ranks: tuple[int, ...]
    component: DynamoSource

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks heard so far, in order."""
        return tuple(Rank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)

    def source(self, _: Rank) -> Struct | None:
        """Where a rank's events come from: not from the agents' bus."""
        return self.component


def dynamo_worker(
    worker_id: int, dp_ranks: tuple[int, ...], incarnation: int, settings: DynamoSettings
) -> DynamoWorker:
    """A worker with these ranks; what the wire does not say is configured."""
    return DynamoWorker(
        worker_id=worker_id,
        name=f"dynamo {worker_id}",
        model_name=settings.model_name,
        routing_group=settings.routing_group,
        endpoint=settings.endpoint(worker_id),
        identity=settings.identity,
        total_kv_blocks=settings.total_kv_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        data_parallel_start_rank=dp_ranks[0],
        data_parallel_size=dp_ranks[-1] - dp_ranks[0] + 1,
        incarnation=incarnation,
        dp_ranks=dp_ranks,
        component=DynamoSource(settings.namespace, settings.component),
    )
