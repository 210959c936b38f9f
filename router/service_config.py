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
        Meta(min_length=1, max_length=256, description="stable; a router's id is made from it"),
    ] = socket.gethostname()
    namespace: Annotated[
        str, Meta(pattern=f"^{NAMESPACE_PATTERN}$", description="fleet to serve on the bus")
    ] = "default"
    nats_url: Annotated[
        str, Meta(description="NATS server with JetStream; empty: none, engines are registered")
    ] = ""
    data_dir: Annotated[
        str, Meta(description="folder for who is registered, to survive a restart; empty: none")
    ] = ""
    max_registered_ranks: Annotated[
        int, Meta(ge=1, le=65_536, description="registered over HTTP; beyond, 503")
    ] = 4096
    allow_public_engines: Annotated[
        bool, Meta(description="also read engines' sockets at public addresses")
    ] = False
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port; 0 takes a free one")] = 8092
    worker_silence_s: Annotated[
        float, Meta(ge=1.5, description="an agent that is its engine, silent for so long, is gone")
    ] = 2.5
    body_limit_bytes: Annotated[int, Meta(ge=1024, description="request body; beyond, 413")] = (
        32 * 1024 * 1024
    )
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="time to receive a body; beyond, 408")
    ] = 30.0
    max_connections: Annotated[
        int, Meta(ge=1, description="HTTP connections; beyond, 503 and closed")
    ] = 4096
    max_bus_requests: Annotated[
        int, Meta(ge=1, description="requests from NATS answered at once; beyond, 503")
    ] = 1024
    drain_s: Annotated[
        float, Meta(ge=0, description="after SIGTERM: time between not ready and closing")
    ] = 1.0
    metrics_max_ranks: Annotated[
        int, Meta(ge=0, description="ranks with metrics of their own; beyond, only counted")
    ] = 1024
    event_threads: Annotated[
        int, Meta(ge=1, le=64, description="above 1, the index is changed in so many threads")
    ] = 1
    index_max_blocks: Annotated[
        int,
        Meta(ge=1024, le=1 << 31, description="per scope; a rank that does not fit is degraded"),
    ] = DEFAULT_MAX_BLOCKS
    event_stream_max_bytes: Annotated[
        int, Meta(ge=1 << 20, description="event stream, where created here")
    ] = 1 << 30
    snapshot_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="events after which a router keeps a snapshot, for quicker starts; 0: no",
        ),
    ] = 100_000
    reset_state: Annotated[
        bool, Meta(description="at start: drop the snapshot, ask every rank for a checkpoint")
    ] = False
    num_replicas: Annotated[
        int, Meta(ge=1, le=5, description="replicas of stream and buckets, where created here")
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
