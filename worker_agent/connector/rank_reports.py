"""The reports of all workers of a tensor-parallel engine, as the one that its leader understands.

Each worker moves its own part of every block, so a transfer is over when all have answered, and a
block is right when it is right for all of them.
"""

from router.errors import InvalidFieldError
from router.slot_errors import RequestKey
from worker_agent.connector.protocol import Completion, StepReport


class RankReports:
    """What some of the workers said, until the others have."""

    __slots__ = ("_completions", "_num_ranks", "_stored")

    def __init__(self, num_ranks: int) -> None:
        """Raises InvalidFieldError."""
        if num_ranks < 1:
            raise InvalidFieldError("num_ranks", f"{num_ranks}", "at least 1")
        self._num_ranks = num_ranks
        self._completions: dict[int, dict[int, Completion]] = {}
        self._stored: dict[RequestKey, set[int]] = {}

    @property
    def waiting(self) -> int:
        """Transfers and requests that some answered and some did not."""
        return len(self._completions) + len(self._stored)

    def add(self, rank: int, report: StepReport) -> StepReport:
        """What is known of all workers now that this one said so; its saying it twice is nothing.

        Raises InvalidFieldError for a rank that is none.
        """
        if not 0 <= rank < self._num_ranks:
            raise InvalidFieldError("rank", f"{rank}", f"0 to {self._num_ranks - 1}")
        for completion in report.completions:
            self._completions.setdefault(completion.uuid, {})[rank] = completion
        for key in report.stored:
            self._stored.setdefault(key, set()).add(rank)
        told = dict.fromkeys(each.uuid for each in report.completions)
        uuids = [uuid for uuid in told if len(self._completions[uuid]) == self._num_ranks]
        keys = [
            key for key in dict.fromkeys(report.stored) if len(self._stored[key]) == self._num_ranks
        ]
        for key in keys:
            del self._stored[key]
        return StepReport([self._merged(uuid) for uuid in uuids], keys)

    def _merged(self, uuid: int) -> Completion:
        """The first reason for each block, by rank."""
        by_rank = self._completions.pop(uuid)
        errors: dict[int, str] = {}
        for rank in sorted(by_rank):
            for place, reason in by_rank[rank].errors.items():
                errors.setdefault(place, f"rank {rank}: {reason}")
        return Completion(uuid, errors)
