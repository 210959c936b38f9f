"""Settings of every process with a core; `--help` prints them.

Units are in the names: `_s`, `_bytes`.
"""

import socket
from secrets import randbits
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Struct

from router.indexer.base import DEFAULT_MAX_BLOCKS
from router.protocol.subjects import NAMESPACE_PATTERN
from router.runtime.process.settings import COMMON, DECIDES, LIVE, about

if TYPE_CHECKING:
    from router.indexer.factory import IndexSettings


class ServiceConfig(Struct, frozen=True, kw_only=True):
    """The process: its name, workers, connections and end."""

    GROUP: ClassVar[str] = "this process"

    name: Annotated[
        str,
        about(
            "stable name of this router; its id is derived from it", min_length=1, max_length=256
        ),
    ] = socket.gethostname()
    data_dir: Annotated[
        str, about("folder that keeps registered workers across restarts; empty: none", COMMON)
    ] = ""
    max_registered_ranks: Annotated[
        int, about("ranks that can be registered over HTTP; beyond that, 503", ge=1, le=65_536)
    ] = 4096
    allow_public_engines: Annotated[
        bool, about("also connect to event sockets of engines at public addresses")
    ] = False
    check_workers: Annotated[
        bool,
        about(
            "ask the HTTP servers of registered workers whether they answer, and what they serve; "
            "no: only their event sockets are judged"
        ),
    ] = True
    worker_silence_s: Annotated[
        float,
        about(
            "a worker with the reference engine that is silent for this long is removed",
            DECIDES,
            ge=1.5,
        ),
    ] = 2.5
    max_connections: Annotated[
        int, about("HTTP connections; beyond that, 503 and closed", ge=1)
    ] = 4096
    drain_s: Annotated[
        float, about("after SIGTERM: time between reporting not ready and closing", LIVE, ge=0)
    ] = 1.0
    metrics_max_ranks: Annotated[
        int, about("ranks that get metrics of their own; further ranks are only counted", ge=0)
    ] = 1024


class BusConfig(Struct, frozen=True, kw_only=True):
    """The bus, and what is stored on it."""

    GROUP: ClassVar[str] = "NATS"

    namespace: Annotated[
        str,
        about(
            "name of the fleet on the bus",
            COMMON,
            pattern=f"^{NAMESPACE_PATTERN}$",
            form="letters, digits, _ and -, at most 64 of them",
        ),
    ] = "default"
    nats_url: Annotated[
        str,
        about(
            "NATS server with JetStream; empty: no bus, engines are registered over HTTP", COMMON
        ),
    ] = ""
    max_bus_requests: Annotated[
        int, about("requests from NATS answered concurrently; beyond that, 503", ge=1)
    ] = 1024
    event_stream_max_bytes: Annotated[
        int, about("size limit of the event stream, if this router creates it", ge=1 << 20)
    ] = 1 << 30
    snapshot_threshold: Annotated[
        int,
        about(
            "number of events after which a snapshot of the index is stored, for "
            "faster starts; 0: never",
            ge=0,
            unit="EVENTS",
        ),
    ] = 100_000
    reset_state: Annotated[
        bool, about("at start, delete the snapshot and request a checkpoint from every rank")
    ] = False
    num_replicas: Annotated[
        int,
        about(
            "JetStream replicas of the stream and buckets, if this router creates them",
            ge=1,
            le=5,
            unit="REPLICAS",
        ),
    ] = 1


class IndexConfig(Struct, frozen=True, kw_only=True):
    """Threads and size of the index."""

    GROUP: ClassVar[str] = "what caches hold"

    event_threads: Annotated[
        int, about("threads that update the index; above 1, the index is sharded", ge=1, le=64)
    ] = 1
    index_max_blocks: Annotated[
        int,
        about(
            "limit of indexed blocks per model and routing group; a rank that does "
            "not fit is marked degraded",
            DECIDES,
            ge=1024,
            le=1 << 31,
        ),
    ] = DEFAULT_MAX_BLOCKS

    @property
    def settings(self) -> "IndexSettings":
        """Settings of the index for events, with a secret multiplier that spreads its keys."""
        from router.indexer.factory import IndexSettings

        return IndexSettings(
            overlap_score_weight=1.0,
            use_kv_events=True,
            event_threads=self.event_threads,
            max_blocks=self.index_max_blocks,
            multiplier=randbits(64) | 1,
        )
