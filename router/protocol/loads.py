"""How busy a rank is: `kv.{ns}.load.{worker_id}.{dp_rank}`, core NATS, msgpack, each second."""

from typing import Annotated

from msgspec import Meta, Struct, msgpack

from router.protocol.codec import decode
from router.protocol.values import DpRank, HeldState, Rank, UInt


class LoadCounters(Struct, frozen=True):
    """Since the start of this incarnation, so that a lost report costs nothing.

    `prefill_token_contexts` sums c · (context before + c / 2) over prefill chunks of c tokens: the
    attention work. `decode_requests` and `resident_kv_tokens` are summed over steps.
    """

    steps: UInt = 0
    busy_s: float = 0.0
    prefill_tokens: UInt = 0
    prefill_token_contexts: float = 0.0
    decode_requests: UInt = 0
    resident_kv_tokens: UInt = 0
    requests_received: UInt = 0
    requests_finished: UInt = 0
    cached_tokens: UInt = 0


class LoadGauges(Struct, frozen=True):
    """At the moment of the report."""

    running_requests: UInt = 0
    waiting_requests: UInt = 0
    waiting_uncached_tokens: UInt = 0
    kv_used_blocks: UInt = 0


class LoadConstants(Struct, frozen=True):
    """Of the engine."""

    chunk_tokens: UInt = 0
    max_running_requests: UInt = 0
    num_blocks: UInt = 0


class LoadReport(Struct, frozen=True, kw_only=True):
    """How busy a rank is and what it holds as of `event_id`; also its heartbeat.

    `agent_incarnation` is the announced one; `incarnation` the life of the rank's cache, which may
    end before its agent's. `report_id` counts the rank's reports, from 1, in its agent's life.
    `event_id` is the last event that the log has. `waiting_s`: for how long the oldest change has
    waited that is not in the log yet; 0 if none has. `heard`: of each source of beacons, the last
    one heard before this report was made.
    """

    worker_id: UInt
    dp_rank: DpRank
    agent_incarnation: UInt
    incarnation: UInt
    report_id: UInt
    event_id: UInt
    state: HeldState
    waiting_s: Annotated[float, Meta(ge=0)] = 0.0
    heard: dict[UInt, UInt] = {}
    counters: LoadCounters = LoadCounters()
    gauges: LoadGauges = LoadGauges()
    constants: LoadConstants = LoadConstants()

    @property
    def rank(self) -> Rank:
        """The rank reported on."""
        return Rank(self.worker_id, self.dp_rank)


class Beacon(Struct, frozen=True, array_like=True):
    """A mark in time, for reports to carry: what they say is no older than it."""

    source_id: UInt
    beacon_id: UInt


_decoder = msgpack.Decoder(LoadReport)
_beacon_decoder = msgpack.Decoder(Beacon)


def encode_load_report(report: LoadReport) -> bytes:
    """The bytes of a load report."""
    return msgpack.encode(report)


def decode_load_report(payload: bytes) -> LoadReport:
    """A load report. Raises WireError for foreign bytes."""
    return decode(_decoder.decode, payload)


def encode_beacon(beacon: Beacon) -> bytes:
    """The bytes of a beacon."""
    return msgpack.encode(beacon)


def decode_beacon(payload: bytes) -> Beacon:
    """A beacon. Raises WireError for foreign bytes."""
    return decode(_beacon_decoder.decode, payload)
