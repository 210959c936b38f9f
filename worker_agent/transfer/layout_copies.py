"""Copies of blocks between layouts: planned, validated as a whole, and copied in batches.

    both contiguous, same device    block ───────────────────────────────────────────────▶ block
    else                            blocks ─gather▶ staging ─one copy▶ staging ─scatter▶ blocks

Each side has a staging buffer on its device; if both are on one device they share a buffer.
"""

from collections.abc import Sequence

from worker_agent.transfer.copy_stream import CopyStream, copy_device
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.pipeline import batches_of
from worker_agent.transfer.plan import BlockResult, Copies, checked_copies
from worker_agent.transfer.rows import Rows, block_views

BATCH_BLOCKS = 16


class LayoutCopies:
    """Copies from `source` to `target`, one call at a time; complete when a call returns."""

    __slots__ = ("_from", "_sides", "_stream", "_to", "_views")

    def __init__(self, source: PhysicalLayout, target: PhysicalLayout) -> None:
        """Create the copier. Raises TransferError if the sizes of the blocks differ."""
        sizes = [side.layout.config.block_bytes for side in (source, target)]
        if sizes[0] != sizes[1]:
            reason, allowed = f"blocks of {sizes[1]} bytes", f"{sizes[0]}, as those of the source"
            raise TransferError("target", reason, allowed, rule="size_mismatch")
        self._sides = source, target
        on_device = source.device if source.device.type == "cuda" else target.device
        self._stream = CopyStream(copy_device(on_device))
        of_source, of_target = block_views(source), block_views(target)
        is_here = source.device == target.device
        self._views = None
        if is_here and of_source is not None and of_target is not None:
            self._views = of_source, of_target
        self._from = Rows.of(source, BATCH_BLOCKS)
        self._to = Rows(target, self._from.tensor) if is_here else Rows.of(target, BATCH_BLOCKS)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> list[BlockResult]:
        """Copy block `sources[i]` to `targets[i]` and return the outcome of each.

        Raises TransferError for an invalid plan, before any byte is copied.
        """
        source, target = self._sides
        copies = checked_copies(
            sources,
            targets,
            source_blocks=source.layout.config.num_blocks,
            target_blocks=target.layout.config.num_blocks,
            is_same_memory=source.is_same_memory(target),
        )
        outcomes = [BlockResult.FAILED] * len(copies)
        at_once = BATCH_BLOCKS if self._views is None else len(copies)
        for batch in batches_of(len(copies), at_once):
            try:
                with self._stream.after_queued_work():
                    self._copy(copies, slice(batch.start, batch.stop))
                self._stream.copy_of(self._to.tensor).wait()
            except RuntimeError:  # torch raises it for a lost device.
                break
            outcomes[batch.start : batch.stop] = [BlockResult.DONE] * len(batch)
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
