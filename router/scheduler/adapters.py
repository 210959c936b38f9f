"""Which LoRA adapters a rank has loaded, most likely: those it was sent requests for last."""

from collections.abc import Sequence

import numpy as np

from router.protocol.values import Rank
from router.scheduler.busy import Mask


class LoadedAdapters:
    """The last adapters of each rank, as many as its engine keeps.

    Invariants: no rank is kept without adapters; an adapter is once in a rank's list, the last one
    served at its end.
    """

    __slots__ = ("_by_rank",)

    def __init__(self) -> None:
        self._by_rank: dict[Rank, list[str]] = {}

    def note(self, rank: Rank, lora_name: str, capacity: int) -> None:
        """A rank that keeps so many adapters, at least one, is sent a request for this one.
        O(capacity).
        """
        loaded = self._by_rank.setdefault(rank, [])
        if lora_name in loaded:
            loaded.remove(lora_name)
        loaded.append(lora_name)
        del loaded[:-capacity]

    def drop(self, rank: Rank) -> None:
        """Forget a rank."""
        self._by_rank.pop(rank, None)

    def having(self, ranks: Sequence[Rank], lora_name: str) -> Mask:
        """Which of these have it loaded. O(ranks)."""
        nothing: list[str] = []
        return np.array([lora_name in self._by_rank.get(each, nothing) for each in ranks], np.bool_)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(adapters)."""
        for loaded in self._by_rank.values():
            assert len(set(loaded)) == len(loaded) > 0
