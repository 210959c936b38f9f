"""Messages between the two halves of a connector, and from the engine to the leader.

    engine ──ScheduledStep──▶ leader ──StepPlan──▶ worker ──StepReport──▶ leader

All of them can be encoded as JSON, because the halves may be in two processes.
"""

from enum import StrEnum

from msgspec import Struct

from router.protocol.values import Tier
from worker_agent.blocks.names import BlockName
from worker_agent.connector.slots.errors import RequestKey


class TransferKind(StrEnum):
    """Direction of a transfer."""

    LOAD = "load"
    """From a lower tier into blocks of the engine."""
    STORE = "store"
    """From blocks of the engine into the lower tiers."""


class RequestType(StrEnum):
    """Condition of a transfer: none, or the engine's progress."""

    IMMEDIATE = "immediate"
    SCHEDULED = "scheduled"


class IterationComplete(Struct, frozen=True, tag=True):
    """End of an iteration's forward pass."""

    iteration: int


class LayerComplete(Struct, frozen=True, tag=True):
    """Computation of a layer, by index, in an iteration."""

    layer: int
    iteration: int


class LayerNameComplete(Struct, frozen=True, tag=True):
    """Computation of a layer, by the engine's name, in an iteration."""

    layer: str
    iteration: int


Requirement = IterationComplete | LayerComplete | LayerNameComplete
"""Condition that must be met before a scheduled transfer reads what the engine writes."""


class Operation(Struct, frozen=True):
    """A transfer of blocks of one request: the engine's `blocks[i]` is, or becomes, `names[i]`."""

    uuid: int
    key: RequestKey
    kind: TransferKind
    request_type: RequestType
    tier: Tier
    """Source of a load; for a store, the tier that the blocks reach first."""
    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]
    requirement: IterationComplete | LayerComplete | LayerNameComplete | None = None
    is_whole: bool = False
    """For a load: True if its blocks are useful only together, those of several groups."""
    is_urgent: bool = False
    """For a store: True if the engine may use the blocks for other tokens in the next step."""


class Completion(Struct, frozen=True):
    """The result of an operation, block by block.

    `errors`: the reason for each block that was not moved, by index; all others were moved and
    verified.
    """

    uuid: int
    errors: dict[int, str] = {}


def failed(operation: Operation, reason: str) -> Completion:
    """Return a completion in which no block was moved."""
    return Completion(operation.uuid, dict.fromkeys(range(len(operation.blocks)), reason))


class NewSlot(Struct, frozen=True):
    """A request that the worker is to follow.

    `immediate`: number of further immediate transfers to expect.
    """

    key: RequestKey
    immediate: int


class StepPlan(Struct, frozen=True):
    """A worker's work in an iteration."""

    iteration: int
    new_slots: list[NewSlot] = []
    operations: list[Operation] = []
    is_decoding: bool = False
    """True if requests are decoded in it, which stores slow down."""
    voided: list[int] = []
    """Transfers of preempted requests; the engine overwrites the blocks, so discard the results."""
    is_preempting: bool = False
    """True if the engine may overwrite blocks of a request that has been loaded."""


class StepReport(Struct, frozen=True):
    """A worker's results since the last report."""

    completions: list[Completion] = []
    stored: list[RequestKey] = []
    """Finished requests that the worker no longer follows; the engine may free their blocks."""


class EngineRequest(Struct, frozen=True):
    """A request that waits to be computed."""

    key: RequestKey
    tokens: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None


class Matched(Struct, frozen=True):
    """The number of tokens that can be loaded.

    `is_async`: the request waits until they are loaded.
    """

    tokens: int
    is_async: bool


class NewRequest(Struct, frozen=True):
    """A request computed for the first time. `blocks`: all that it has, of each group."""

    key: RequestKey
    blocks: list[list[int]]
    num_computed_tokens: int


class CachedRequest(Struct, frozen=True):
    """A request computed before. `blocks` and `tokens`: the new ones; no group's: no block."""

    key: RequestKey
    tokens: list[int]
    blocks: list[list[int]]
    num_computed_tokens: int
    is_resumed: bool = False
    """True if the request was preempted; `blocks` are then all that it has now."""


class ScheduledStep(Struct, frozen=True):
    """The work that the engine is about to compute."""

    num_scheduled_tokens: dict[RequestKey, int]
    new_requests: list[NewRequest] = []
    cached_requests: list[CachedRequest] = []
    preempted: list[RequestKey] = []


class LeaderTransferRequest(Struct, frozen=True):
    """The leader side's request to run a transfer."""

    key: RequestKey
    uuid: int
    request_type: RequestType
    requirement: IterationComplete | LayerComplete | LayerNameComplete | None = None


class WorkerTransferRequest(Struct, frozen=True):
    """The worker side's announcement of a transfer of one of its slots."""

    key: RequestKey
    uuid: int
    kind: TransferKind
    request_type: RequestType


class SchedulingDecision(StrEnum):
    """Decision whether a transfer runs."""

    EXECUTE = "execute"
    CANCEL = "cancel"
