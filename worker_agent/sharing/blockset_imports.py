"""Announced blocksets of other workers: imported by a worker's ranks, or refused, and why."""

import logging
from collections.abc import Iterable, Mapping, Set
from typing import Any

import msgspec
from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.sharing.blockset import BlocksetExport, decode, report_of
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.reports import RefusedBlockset, SharingReport, check_rank
from worker_agent.sharing.sharing import BlockSharing

log = logging.getLogger(__name__)


class _Announced(Struct, frozen=True):
    """A blockset as it was announced, and why it is refused, or None."""

    blockset: Mapping[str, Any]
    reason: str | None


class BlocksetImports:
    """Blocksets that other workers announce: imported by all our ranks, or refused with the reason.

    It belongs to one thread.
    """

    __slots__ = ("_ranks", "_seen", "refusals")

    def __init__(self, ranks: Mapping[Rank, BlockSharing]) -> None:
        """Import into `ranks`, which may still be added to."""
        self._ranks = ranks
        self._seen: dict[Rank, _Announced] = {}
        self.refusals = 0
        """Number of blocksets refused since the start; each counts once."""

    @property
    def refused(self) -> list[RefusedBlockset]:
        """The announced blocksets that are not imported."""
        return [
            RefusedBlockset(rank.worker_id, rank.dp_rank, seen.reason)
            for rank, seen in self._seen.items()
            if seen.reason is not None
        ]

    def renew(self) -> None:
        """Rely for longer on all that is imported: the announcements are those taken last."""
        for rank, seen in self._seen.items():
            if seen.reason is None:
                self._renew(rank)

    def keep(self, announced: Set[Rank]) -> None:
        """Drop the blocksets of all other ranks, which are not announced any more."""
        for rank in self._seen.keys() - announced:
            del self._seen[rank]
            self._forget(rank)

    def take(self, rank: Rank, blockset: Mapping[str, Any]) -> str | None:
        """Import a blockset into all our ranks but this one; return why not, or None.

        One that is imported and has not changed is not decoded again.
        """
        seen, reason = self._seen.get(rank), None
        is_same = seen is not None and seen.reason is None and seen.blockset == blockset
        if is_same and self._renew(rank):
            return None
        try:
            check_rank(rank, blockset)
            data = msgspec.json.encode(blockset)
            for ours, sharing in self._ranks.items():
                if ours != rank:
                    sharing.import_remote_blockset(data)
        except BlocksetError as error:
            reason = str(error)
            if seen is None or seen.reason != reason:
                self.refusals += 1
                log.warning("blockset of worker %s refused: %s", rank, error)
            self._forget(rank)
        self._seen[rank] = _Announced(blockset, reason)
        return reason

    def _renew(self, rank: Rank) -> bool:
        return all(each.renew(rank) for ours, each in self._ranks.items() if ours != rank)

    def _forget(self, rank: Rank) -> None:
        for sharing in self._ranks.values():
            sharing.forget(rank)


def sharing_report(
    ranks: Mapping[Rank, BlockSharing], exports: Iterable[bytes], imports: BlocksetImports
) -> SharingReport:
    """Return what an agent shows of its blocksets. O(imports)."""
    imported = {
        rank.dp_rank: [report_of(each.export) for each in sharing.imported]
        for rank, sharing in ranks.items()
    }
    exported = [report_of(decode(each, BlocksetExport)) for each in exports]
    return SharingReport(exported, imported, imports.refused)
