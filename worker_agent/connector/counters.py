"""What the two halves of a connector count, from the start."""

from msgspec import Struct


class LeaderCounters(Struct):
    """In the engine's scheduler."""

    matched_tokens: int = 0
    refused: int = 0
    """Calls that the slots refused, or that were about a request nobody follows."""
    failed_blocks: int = 0
    """Were to be loaded, and were not."""
    unsaved_blocks: int = 0
    """Were to be stored, and were not."""
    stray_completions: int = 0
    """Doubled, or of transfers that nobody waits for."""
    lost_transfers: int = 0
    """Not answered before the deadline."""


class WorkerCounters(Struct):
    """In the engine's worker."""

    refused: int = 0
    """Operations of requests nobody had told of, told twice, or of blocks that are none."""
    unknown_finished: int = 0
    """Requests the engine finished that nobody had told of."""
    voided: int = 0
    cancelled_stores: int = 0
    """Of steps in which a load failed, or that never ended: what they computed may be wrong."""
    failed_loads: int = 0
    """Blocks."""
    saved_layers: int = 0
    """Layers that the engine said it had computed (Dynamo's `kvbm_save_kv_layer_requests`)."""
