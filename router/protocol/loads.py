"""Load reports of ranks: `kv.{ns}.load.{worker_id}.{dp_rank}`, core NATS, msgpack, each second."""

from typing import Annotated

from msgspec import Meta, Struct, msgpack

from router.protocol.values import DpRank, HeldState, Rank, UInt, decode


class LoadCounters(Struct, frozen=True):
    """Cumulative counters of this incarnation, so that a lost report loses no information.

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
    """Values at the time of the report."""

    running_requests: UInt = 0
    waiting_requests: UInt = 0
    waiting_uncached_tokens: UInt = 0
    kv_used_blocks: UInt = 0


class LoadConstants(Struct, frozen=True):
    """Constants of the engine."""

    chunk_tokens: UInt = 0
    max_running_requests: UInt = 0
    num_blocks: UInt = 0


class TimedWork(Struct, frozen=True):
    """Work with a known duration, which is its `busy_s`: sums since a life began.

    `error`: the standard error of a duration, relative to it.
    """

    work: LoadCounters = LoadCounters()
    error: Annotated[float, Meta(ge=0)] = 0.0


class LoadReport(Struct, frozen=True, kw_only=True):
    """The load of a rank and the state of its cache; also its heartbeat.

    `agent_incarnation` is the announced one; `incarnation` that of the rank's cache, which may end
    before its agent's. `report_id` counts the rank's reports, from 1, in its agent's incarnation.
    `event_id` is the last event in the log; `state` describes the blocks after it. `waiting_s`: the
    age of the oldest change that is not in the log yet; 0 if there is none. `heard`: for each
    source of beacons, the last beacon received before this report was made. `timed`: see
    `PolledLoad`; None: the engine itself measures the time of its work, in `counters`.
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
    timed: tuple[TimedWork, ...] | None = None

    @property
    def rank(self) -> Rank:
        """The rank reported on."""
        return Rank(self.worker_id, self.dp_rank)

    @property
    def life(self) -> tuple[int, int]:
        """The life of the counters, which begin at 0 in each."""
        return self.agent_incarnation, 0


class PolledLoad(Struct, frozen=True, kw_only=True, array_like=True):
    """The load of a rank without an agent, from its engine's metrics.

    `source_id`: the router that polls the engine; its `life_id` is another after each restart of
    the engine, and of the router. `counters`: the engine's own. `timed`: parts of that work with a
    known duration; they may overlap.
    """

    worker_id: UInt
    dp_rank: DpRank
    source_id: UInt
    life_id: UInt
    counters: LoadCounters = LoadCounters()
    gauges: LoadGauges = LoadGauges()
    constants: LoadConstants = LoadConstants()
    timed: tuple[TimedWork, ...] = ()

    @property
    def rank(self) -> Rank:
        """The rank reported on."""
        return Rank(self.worker_id, self.dp_rank)

    @property
    def life(self) -> tuple[int, int]:
        """The life of the counters, which begin anew in each."""
        return self.source_id, self.life_id


class Beacon(Struct, frozen=True, array_like=True):
    """A mark in time. A load report that contains a beacon is no older than it."""

    source_id: UInt
    beacon_id: UInt


_decoder = msgpack.Decoder(LoadReport)
_polled_decoder = msgpack.Decoder(PolledLoad)
_beacon_decoder = msgpack.Decoder(Beacon)


def encode_load_report(report: LoadReport | PolledLoad) -> bytes:
    """Return the bytes of a load report, an agent's or that of a router which polls the engine."""
    return msgpack.encode(report)


def decode_load_report(payload: bytes) -> LoadReport:
    """Return an agent's load report. Raises WireError if the bytes are invalid."""
    return decode(_decoder.decode, payload)


def decode_any_report(payload: bytes) -> LoadReport | PolledLoad:
    """Return a load report of either kind. Raises WireError if the bytes are invalid."""
    is_array = payload[:1] >= b"\x90" and payload[:1] not in (b"\xde", b"\xdf")
    if is_array:
        return decode(_polled_decoder.decode, payload)
    return decode(_decoder.decode, payload)


def encode_beacon(beacon: Beacon) -> bytes:
    """Return the bytes of a beacon."""
    return msgpack.encode(beacon)


def decode_beacon(payload: bytes) -> Beacon:
    """Return a beacon. Raises WireError if the bytes are invalid."""
    return decode(_beacon_decoder.decode, payload)
