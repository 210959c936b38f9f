"""Blocks from one layout to another: planned, checked as a whole, and copied in batches.

    both in one piece, same place   block ───────────────────────────────────────────────▶ block
    else                            blocks ─gather▶ staging ─one copy▶ staging ─scatter▶ blocks

Staging is on either side's device, and is one where both are on the same.
"""

from collections.abc import Sequence

import torch

from router.block_errors import TransferError
from worker_agent.transfer.hops import batches_of
from worker_agent.transfer.lane import Lane
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.plan import Copies, checked_copies
from worker_agent.transfer.rows import Rows, block_views

BATCH_BLOCKS = 16


class LayoutCopies:
    """Copies from `source` to `target`, one call at a time; done when a call returns."""

    __slots__ = ("_from", "_lane", "_sides", "_to", "_views")

    def __init__(
        self,
        source: PhysicalLayout,
        target: PhysicalLayout,
        engine_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Raises TransferError for blocks of different sizes."""
        sizes = [side.layout.config.block_bytes for side in (source, target)]
        if sizes[0] != sizes[1]:
            reason, allowed = f"blocks of {sizes[1]} bytes", f"{sizes[0]}, as those of the source"
            raise TransferError("target", reason, allowed, rule="size_mismatch")
        self._sides = source, target
        on_device = source.device if source.device.type == "cuda" else target.device
        self._lane = Lane(on_device, engine_stream)
        of_source, of_target = block_views(source), block_views(target)
        is_here = source.device == target.device
        self._views = None
        if is_here and of_source is not None and of_target is not None:
            self._views = of_source, of_target
        self._from = Rows.of(source, BATCH_BLOCKS)
        self._to = Rows(target, self._from.tensor) if is_here else Rows.of(target, BATCH_BLOCKS)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> list[Outcome]:
        """Copy block `sources[i]` to `targets[i]`: what became of each. Raises TransferError for
        what makes no copy, before a byte moves.
        """
        source, target = self._sides
        copies = checked_copies(
            sources,
            targets,
            source_blocks=source.layout.config.num_blocks,
            target_blocks=target.layout.config.num_blocks,
            is_same_memory=source.is_same_memory(target),
        )
        outcomes = [Outcome.FAILED] * len(copies)
        at_once = BATCH_BLOCKS if self._views is None else len(copies)
        for batch in batches_of(len(copies), at_once):
            try:
                with self._lane.copying():
                    self._copy(copies, slice(batch.start, batch.stop))
            except RuntimeError:  # what torch says of a device that is no more
                break
            outcomes[batch.start : batch.stop] = [Outcome.DONE] * len(batch)
        return outcomes

    def _copy(self, copies: Copies, part: slice) -> None:
        sources, targets = copies.sources[part], copies.targets[part]
        if self._views is not None:
            of_source, of_target = self._views
            for source, target in zip(sources, targets, strict=True):
                of_target[target].copy_(of_source[source])
            return
        self._from.gather(sources)
        if self._to.tensor is not self._from.tensor:
            self._to.tensor.copy_(self._from.tensor, non_blocking=True)
        self._to.scatter(targets)
