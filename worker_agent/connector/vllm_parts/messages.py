"""What the two halves tell each other within vLLM's own messages; MessagePack.

scheduler ──Instructions──▶ every worker ──News──▶ scheduler
"""

import msgspec
from msgspec import Struct

from worker_agent.blocks.names import BlockName
from worker_agent.connector.protocol import StepPlan, StepReport
from worker_agent.tiers.stack import TierChange


class Look(Struct, frozen=True):
    """Which of these are in the store that workers share? What is found is told as a change."""

    number: int
    names: tuple[BlockName, ...]


class GivenUp(Struct, frozen=True):
    """A request waits for blocks that nobody loads: the engine is to compute them."""

    key: str
    blocks: tuple[int, ...]


class Instructions(Struct, frozen=True):
    """What every worker is to do in a step. `forgets`: first of all, to forget what is in tiers
    that are its own, as nobody will ask for that any more.
    """

    plan: StepPlan
    looks: list[Look] = []
    given_up: list[GivenUp] = []
    forgets: bool = False


class News(Struct, frozen=True):
    """What a worker did in a step, and what changed in its tiers.

    `looked`: numbers of looks that are over. `is_busy`: blocks are still going down. `is_starting`:
    what a former life left is still being taken over.
    """

    rank: int
    report: StepReport
    changes: list[TierChange] = []
    looked: list[int] = []
    is_busy: bool = False
    is_starting: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_INSTRUCTIONS = msgspec.msgpack.Decoder(Instructions)
_NEWS = msgspec.msgpack.Decoder(News)


def encoded(message: Instructions | News) -> bytes:
    """For the wire."""
    return _ENCODER.encode(message)


def instructions(message: bytes) -> Instructions:
    """From the wire. Raises msgspec.DecodeError."""
    return _INSTRUCTIONS.decode(message)


def news(message: bytes) -> News:
    """From the wire. Raises msgspec.DecodeError."""
    return _NEWS.decode(message)
