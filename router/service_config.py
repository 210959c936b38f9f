"""Configuration that every process with a core has; `--help` prints it."""

import socket
from secrets import randbits
from typing import Annotated

from msgspec import Meta

from router.indexer.radix_tree import DEFAULT_MAX_BLOCKS
from router.indexer.selection import IndexSettings
from router.process.process_config import ProcessConfig
from router.protocol.subjects import NAMESPACE_PATTERN
from router.sequence.naming import BlockNaming


class ServiceConfig(ProcessConfig, frozen=True, kw_only=True):
    """What every process with a core can be told. Seconds and bytes as the names end."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=256,
            description="stable name of this router; its id is derived from it",
        ),
    ] = socket.gethostname()
    namespace: Annotated[
        str, Meta(pattern=f"^{NAMESPACE_PATTERN}$", description="name of the fleet on the bus")
    ] = "default"
    nats_url: Annotated[
        str,
        Meta(
            description=(
                "NATS server with JetStream; empty: no bus, engines are registered over HTTP"
            )
        ),
    ] = ""
    data_dir: Annotated[
        str, Meta(description="folder that keeps registered workers across restarts; empty: none")
    ] = ""
    max_registered_ranks: Annotated[
        int,
        Meta(
            ge=1, le=65_536, description="ranks that can be registered over HTTP; beyond that, 503"
        ),
    ] = 4096
    allow_public_engines: Annotated[
        bool, Meta(description="also connect to event sockets of engines at public addresses")
    ] = False
    http_port: Annotated[
        int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 8092
    worker_silence_s: Annotated[
        float,
        Meta(
            ge=1.5,
            description=(
                "a worker with the reference engine that is silent for this long is removed"
            ),
        ),
    ] = 2.5
    body_limit_bytes: Annotated[
        int, Meta(ge=1024, description="size of a request body; beyond that, 413")
    ] = 32 * 1024 * 1024
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="time to receive a body; beyond that, 408")
    ] = 30.0
    max_connections: Annotated[
        int, Meta(ge=1, description="HTTP connections; beyond that, 503 and closed")
    ] = 4096
    max_bus_requests: Annotated[
        int, Meta(ge=1, description="requests from NATS answered concurrently; beyond that, 503")
    ] = 1024
    drain_s: Annotated[
        float, Meta(ge=0, description="after SIGTERM: time between reporting not ready and closing")
    ] = 1.0
    metrics_max_ranks: Annotated[
        int,
        Meta(
            ge=0, description="ranks that get metrics of their own; further ranks are only counted"
        ),
    ] = 1024
    event_threads: Annotated[
        int,
        Meta(
            ge=1, le=64, description="threads that update the index; above 1, the index is sharded"
        ),
    ] = 1
    index_max_blocks: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 31,
            description=(
                "limit of indexed blocks per model and routing group; a rank that does "
                "not fit is marked degraded"
            ),
        ),
    ] = DEFAULT_MAX_BLOCKS
    event_stream_max_bytes: Annotated[
        int,
        Meta(ge=1 << 20, description="size limit of the event stream, if this router creates it"),
    ] = 1 << 30
    snapshot_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "number of events after which a snapshot of the index is stored, for "
                "faster starts; 0: never"
            ),
        ),
    ] = 100_000
    reset_state: Annotated[
        bool, Meta(description="at start, delete the snapshot and ask every rank for a checkpoint")
    ] = False
    num_replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=5,
            description=(
                "JetStream replicas of the stream and buckets, if this router creates them"
            ),
        ),
    ] = 1

    @property
    def naming(self) -> BlockNaming:
        """What blocks are called on the bus and in the index. Raises ConfigError."""
        return BlockNaming(self.read_block_key)

    @property
    def index(self) -> IndexSettings:
        """The index that events are applied to, with a secret way of spreading its keys."""
        return IndexSettings(
            overlap_score_weight=1.0,
            use_kv_events=True,
            event_threads=self.event_threads,
            max_blocks=self.index_max_blocks,
            multiplier=randbits(64) | 1,
        )
