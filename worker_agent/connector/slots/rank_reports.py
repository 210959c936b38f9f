"""The counters of a connector's halves, and the reports of all workers merged into one.

The reports of all workers of a tensor-parallel engine, merged into one for the leader.

Each worker moves its own part of every block. A transfer is complete when all workers have reported
it, and a block is right when it is right for all of them.
"""

from msgspec import Struct

from router.errors import InvalidFieldError
from worker_agent.connector.slots.errors import RequestKey
from worker_agent.connector.slots.protocol import Completion, StepReport


class LeaderCounters(Struct):
    """Counters of the half in the engine's scheduler."""

    matched_tokens: int = 0
    refused: int = 0
    """Calls that a slot refused, or that named an unknown request."""
    failed_blocks: int = 0
    """Blocks that should have been loaded and were not."""
    unsaved_blocks: int = 0
    """Blocks that should have been stored and were not."""
    stray_completions: int = 0
    """Repeated completions, and completions of transfers that are no longer waited for."""
    lost_transfers: int = 0
    """Transfers not completed before the deadline."""


class WorkerCounters(Struct):
    """Counters of the half in the engine's worker."""

    refused: int = 0
    """Repeated operations, and those with unknown requests or invalid blocks."""
    unknown_finished: int = 0
    """Finished requests that were never announced to the worker."""
    voided: int = 0
    cancelled_stores: int = 0
    """Stores of a step with a failed load or without an end: their blocks may be wrong."""
    failed_loads: int = 0
    """Blocks that could not be loaded."""
    saved_layers: int = 0
    """Layers that the engine reported as computed (Dynamo's `kvbm_save_kv_layer_requests`)."""


class RankReports:
    """Reports of some of the workers, kept until the others have reported."""

    __slots__ = ("_completions", "_num_ranks", "_stored")

    def __init__(self, num_ranks: int) -> None:
        """Create it for `num_ranks` workers. Raises InvalidFieldError if there are none."""
        if num_ranks < 1:
            raise InvalidFieldError("num_ranks", f"{num_ranks}", "at least 1")
        self._num_ranks = num_ranks
        self._completions: dict[int, dict[int, Completion]] = {}
        self._stored: dict[RequestKey, set[int]] = {}

    @property
    def waiting(self) -> int:
        """Number of transfers and requests that some workers have reported and others have not."""
        return len(self._completions) + len(self._stored)

    def add(self, rank: int, report: StepReport) -> StepReport:
        """Add a worker's report, and return what all workers have now reported.

        A repeated report has no effect. Raises InvalidFieldError for an invalid rank.
        """
        if not 0 <= rank < self._num_ranks:
            raise InvalidFieldError("rank", f"{rank}", f"0 to {self._num_ranks - 1}")
        for completion in report.completions:
            self._completions.setdefault(completion.uuid, {})[rank] = completion
        for key in report.stored:
            self._stored.setdefault(key, set()).add(rank)
        completed = dict.fromkeys(each.uuid for each in report.completions)
        uuids = [uuid for uuid in completed if len(self._completions[uuid]) == self._num_ranks]
        keys = [
            key for key in dict.fromkeys(report.stored) if len(self._stored[key]) == self._num_ranks
        ]
        for key in keys:
            del self._stored[key]
        return StepReport([self._merged(uuid) for uuid in uuids], keys)

    def _merged(self, uuid: int) -> Completion:
        """Return one completion with the first reason for each block, by rank."""
        by_rank = self._completions.pop(uuid)
        errors: dict[int, str] = {}
        for rank in sorted(by_rank):
            for place, reason in by_rank[rank].errors.items():
                errors.setdefault(place, f"rank {rank}: {reason}")
        return Completion(uuid, errors)
