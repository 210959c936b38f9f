"""Messages between the two halves, carried within vLLM's own messages; MessagePack.

scheduler ──Instructions──▶ every worker ──News──▶ scheduler
"""

import msgspec
from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.blocks.names import BlockName
from worker_agent.connector.slots.protocol import StepPlan, StepReport
from worker_agent.tiers.stack import TierChange


class Lookup(Struct, frozen=True):
    """A lookup of blocks in the shared store, and at other engines.

    `source`: the rank that is said to have them; only it is asked, if it is known.
    """

    number: int
    names: tuple[BlockName, ...]
    source: Rank | None = None


class Looked(Struct, frozen=True):
    """A finished lookup. Blocks found in the shared store are reported as changes.

    `at_peer`: the places of those that another engine has.
    """

    number: int
    at_peer: list[int] = []


class GivenUp(Struct, frozen=True):
    """A request that waits for blocks without a load: the engine is to compute them."""

    key: str
    blocks: tuple[int, ...]


class Instructions(Struct, frozen=True):
    """The work of every worker in a step.

    `forgets`: first clear the worker's own tiers, because their blocks cannot be found any more.
    """

    plan: StepPlan
    looks: list[Lookup] = []
    given_up: list[GivenUp] = []
    forgets: bool = False


class WorkerEvents(Struct, frozen=True):
    """A worker's results of a step, and the changes in its tiers.

    `looked`: finished lookups. `is_busy`: blocks are still being offloaded.
    `is_starting`: persisted blocks of an earlier process are still being recovered.
    """

    rank: int
    report: StepReport
    changes: list[TierChange] = []
    looked: list[Looked] = []
    is_busy: bool = False
    is_starting: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_INSTRUCTIONS = msgspec.msgpack.Decoder(Instructions)
_NEWS = msgspec.msgpack.Decoder(WorkerEvents)


def encoded(message: Instructions | WorkerEvents) -> bytes:
    """Encode a message."""
    return _ENCODER.encode(message)


def instructions(message: bytes) -> Instructions:
    """Decode instructions. Raises msgspec.DecodeError."""
    return _INSTRUCTIONS.decode(message)


def worker_events(message: bytes) -> WorkerEvents:
    """Decode a worker's message. Raises msgspec.DecodeError."""
    return _NEWS.decode(message)
