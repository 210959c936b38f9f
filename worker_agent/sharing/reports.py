"""Blocksets as agents announce them, and show those that they export, import and refuse."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.sharing.errors import BlocksetError


class SetReport(Struct, frozen=True):
    """Blocks of one tier of a rank."""

    num_blocks: int
    block_bytes: int
    layout: str
    is_readable: bool
    """False for blocks of a file."""


class BlocksetReport(Struct, frozen=True):
    """A blockset: one of ours, or an imported one. `epoch`: of the process that exports it."""

    worker_id: int
    dp_rank: int
    epoch: int
    addresses: list[str]
    sets: dict[int, SetReport]


class RefusedBlockset(Struct, frozen=True):
    """A blockset that this worker cannot use, and why."""

    worker_id: int
    dp_rank: int
    reason: str


class SharingReport(Struct, frozen=True):
    """The blocksets that this agent exports, imports and refuses; imports are by our rank."""

    exported: list[BlocksetReport] = []
    imported: dict[int, list[BlocksetReport]] = {}
    refused: list[RefusedBlockset] = []


class RankBlocksets(Struct, frozen=True):
    """The blocksets of one rank in an engine's process, for the agent beside it.

    `announced`: its export, as the agent announces it; None if it gives no blocks.
    """

    announced: dict[str, Any] | None = None
    report: SharingReport = SharingReport()


def joined(reports: Iterable[SharingReport]) -> SharingReport:
    """Return the report of all ranks; a blockset that several refuse is in it once."""
    each = list(reports)
    return SharingReport(
        [export for one in each for export in one.exported],
        {dp_rank: found for one in each for dp_rank, found in one.imported.items()},
        list(dict.fromkeys(refusal for one in each for refusal in one.refused)),
    )


def check_rank(rank: Rank, blockset: Mapping[str, Any]) -> None:
    """Raise BlocksetError for a blockset of another rank than the one that announces it."""
    named = blockset.get("worker_id"), blockset.get("dp_rank", 0)
    if named != (rank.worker_id, rank.dp_rank):
        reason, allowed = f"{named}", f"{rank}, which announces it"
        raise BlocksetError("worker_id", reason, allowed, rule="other_rank")
