"""The availability of prefill workers per model, as shown by requests.

    pending ─one was found─▶ active ─none is left─▶ unavailable ─one was found─▶ active

Pure: time is an argument, in seconds of a monotonic clock.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

PoolState: TypeAlias = Literal["pending", "active", "unavailable"]

LOOK_AGAIN_S = 1.0
"""Interval of new lookups while a model has no prefill worker, in seconds."""
MAX_MODELS = 1024
"""Limit of remembered models; clients choose model names freely."""


class _Pool(Struct):
    state: PoolState = "pending"
    recheck_s: float = 0.0
    pushes: bool = False


class PrefillPools:
    """The pool state of each model."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def state(self, model_name: str) -> PoolState:
        """Return the state of a model's pool; `pending`: it never had a prefill worker."""
        pool = self._pools.get(model_name)
        return "pending" if pool is None else pool.state

    def is_worth_trying(self, model_name: str, now_s: float) -> bool:
        """Return whether to look for a prefill worker now; if True, the caller must look."""
        pool = self._pools.get(model_name)
        if pool is None or pool.state == "active":
            return True
        if now_s < pool.recheck_s:
            return False
        pool.recheck_s = now_s + LOOK_AGAIN_S
        return True

    def is_resting(self, model_name: str, now_s: float) -> bool:
        """Return whether a model never had a prefill worker, and the next lookup is not due."""
        pool = self._pools.get(model_name)
        return pool is not None and pool.state == "pending" and now_s < pool.recheck_s

    def pushes(self, model_name: str) -> bool:
        """Return whether the last prefill worker of a model was one that pushes blocks."""
        pool = self._pools.get(model_name)
        return pool is not None and pool.pushes

    def note_pushes(self, model_name: str, *, pushes: bool) -> None:
        """Record whether a prefill worker is one that pushes blocks."""
        self._noted(model_name).pushes = pushes

    def found(self, model_name: str) -> None:
        """Record that a prefill worker was found."""
        self._noted(model_name).state = "active"

    def missed(self, model_name: str, now_s: float) -> None:
        """Record that no prefill worker was found."""
        pool = self._noted(model_name)
        pool.state = "pending" if pool.state == "pending" else "unavailable"
        pool.recheck_s = now_s + LOOK_AGAIN_S

    def counts(self) -> dict[PoolState, int]:
        """Return the number of models in each state."""
        counted: dict[PoolState, int] = {"pending": 0, "active": 0, "unavailable": 0}
        for pool in self._pools.values():
            counted[pool.state] += 1
        return counted

    def _noted(self, model_name: str) -> _Pool:
        if model_name not in self._pools and len(self._pools) >= MAX_MODELS:
            del self._pools[next(iter(self._pools))]
        return self._pools.setdefault(model_name, _Pool())
