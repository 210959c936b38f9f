"""What the two halves of a connector tell each other, and what the engine tells its leader.

    engine ──ScheduledStep──▶ leader ──StepPlan──▶ worker ──StepReport──▶ leader

All of it is JSON-able, for the halves may be in two processes.
"""

from enum import StrEnum

from msgspec import Struct

from router.protocol.values import Tier
from router.slot_errors import RequestKey
from worker_agent.blocks.names import BlockName


class TransferKind(StrEnum):
    """Which way blocks go."""

    LOAD = "load"
    """From a lower tier into blocks of the engine's."""
    STORE = "store"
    """From blocks of the engine's into the lower tiers."""


class RequestType(StrEnum):
    """Whether a transfer waits for the engine."""

    IMMEDIATE = "immediate"
    SCHEDULED = "scheduled"


class IterationComplete(Struct, frozen=True, tag=True):
    """The forward pass of an iteration is over."""

    iteration: int


class LayerComplete(Struct, frozen=True, tag=True):
    """A layer, by its index, was computed in an iteration."""

    layer: int
    iteration: int


class LayerNameComplete(Struct, frozen=True, tag=True):
    """A layer, by the engine's name of it, was computed in an iteration."""

    layer: str
    iteration: int


Requirement = IterationComplete | LayerComplete | LayerNameComplete
"""What has to be over before a scheduled transfer may read what the engine wrote."""


class Operation(Struct, frozen=True):
    """Blocks of one request to be moved: `blocks[i]`, the engine's, is or becomes `names[i]`."""

    uuid: int
    key: RequestKey
    kind: TransferKind
    request_type: RequestType
    tier: Tier
    """Where a load comes from; the tier that a store reaches first."""
    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]
    requirement: IterationComplete | LayerComplete | LayerNameComplete | None = None


class Completion(Struct, frozen=True):
    """What became of an operation, block by block.

    `errors`: why, for the index of each block that was not moved; all others were, and proven.
    """

    uuid: int
    errors: dict[int, str] = {}


def failed(operation: Operation, reason: str) -> Completion:
    """None of its blocks was moved."""
    return Completion(operation.uuid, dict.fromkeys(range(len(operation.blocks)), reason))


class NewSlot(Struct, frozen=True):
    """A request that the worker is to follow, and how many more immediate transfers to expect."""

    key: RequestKey
    immediate: int


class StepPlan(Struct, frozen=True):
    """What a worker is to do in an iteration."""

    iteration: int
    new_slots: list[NewSlot] = []
    operations: list[Operation] = []
    is_decoding: bool = False
    """Whether requests are decoded in it, which storing slows down."""
    voided: list[int] = []
    """Transfers of preempted requests, whose blocks the engine writes over: their results must not
    be kept."""


class StepReport(Struct, frozen=True):
    """What a worker did since the last report."""

    completions: list[Completion] = []
    stored: list[RequestKey] = []
    """Finished requests that it does not follow any more: the engine may free their blocks."""


class EngineRequest(Struct, frozen=True):
    """A request that waits to be computed."""

    key: RequestKey
    tokens: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None


class Matched(Struct, frozen=True):
    """How many tokens can be loaded; asynchronously: the request waits until they are."""

    tokens: int
    is_async: bool


class NewRequest(Struct, frozen=True):
    """A request that is computed for the first time; `blocks`: all it has."""

    key: RequestKey
    blocks: list[int]
    num_computed_tokens: int


class CachedRequest(Struct, frozen=True):
    """A request that was computed before. `blocks` and `tokens`: those that are new."""

    key: RequestKey
    tokens: list[int]
    blocks: list[int]
    num_computed_tokens: int
    is_resumed: bool = False
    """It was preempted; `blocks` are all it has now."""


class ScheduledStep(Struct, frozen=True):
    """What an engine is about to compute."""

    num_scheduled_tokens: dict[RequestKey, int]
    new_requests: list[NewRequest] = []
    cached_requests: list[CachedRequest] = []
    preempted: list[RequestKey] = []


class LeaderTransferRequest(Struct, frozen=True):
    """Whoever moves blocks asks whether it may."""

    key: RequestKey
    uuid: int
    request_type: RequestType
    requirement: IterationComplete | LayerComplete | LayerNameComplete | None = None


class WorkerTransferRequest(Struct, frozen=True):
    """The worker knows of a transfer of one of its slots."""

    key: RequestKey
    uuid: int
    kind: TransferKind
    request_type: RequestType


class SchedulingDecision(StrEnum):
    """Whether a transfer is made."""

    EXECUTE = "execute"
    CANCEL = "cancel"
