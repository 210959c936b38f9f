"""Whether a model has workers that compute prompts for others, as far as requests have shown.

    pending ─one was found─▶ active ─none is left─▶ unavailable ─one was found─▶ active

Pure: time is an argument, in seconds of a clock that never goes back.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

PoolState: TypeAlias = Literal["pending", "active", "unavailable"]

LOOK_AGAIN_S = 1.0
"""Where there was none, requests look again no sooner."""
MAX_MODELS = 1024
"""Models that are remembered; clients name them as they like."""


class _Pool(Struct):
    state: PoolState = "pending"
    look_again_s: float = 0.0


class PrefillPools:
    """The state of each model."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def state(self, model_name: str) -> PoolState:
        """How a model's pool stands; pending: none was ever there."""
        pool = self._pools.get(model_name)
        return "pending" if pool is None else pool.state

    def is_worth_asking(self, model_name: str, now_s: float) -> bool:
        """Whether there is one, or nobody has looked for a while; whoever is told so looks."""
        pool = self._pools.get(model_name)
        if pool is None or pool.state == "active":
            return True
        if now_s < pool.look_again_s:
            return False
        pool.look_again_s = now_s + LOOK_AGAIN_S
        return True

    def is_resting(self, model_name: str, now_s: float) -> bool:
        """Whether none was ever there, and nobody is to look yet."""
        pool = self._pools.get(model_name)
        return pool is not None and pool.state == "pending" and now_s < pool.look_again_s

    def found(self, model_name: str) -> None:
        """There is a worker for its prompts."""
        self._noted(model_name).state = "active"

    def missed(self, model_name: str, now_s: float) -> None:
        """There is none."""
        pool = self._noted(model_name)
        pool.state = "pending" if pool.state == "pending" else "unavailable"
        pool.look_again_s = now_s + LOOK_AGAIN_S

    def counts(self) -> dict[PoolState, int]:
        """How many models are in each state."""
        counted: dict[PoolState, int] = {"pending": 0, "active": 0, "unavailable": 0}
        for pool in self._pools.values():
            counted[pool.state] += 1
        return counted

    def _noted(self, model_name: str) -> _Pool:
        if model_name not in self._pools and len(self._pools) >= MAX_MODELS:
            del self._pools[next(iter(self._pools))]
        return self._pools.setdefault(model_name, _Pool())
