"""The pools of workers that a router has served, and the work that arrives at each.

tracker: sums of all bookings on each slot ──sample──▶ Arrivals of the pool of that rank
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from router.core.fleet import Fleet, FleetWorker
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Role, Scope
from router.scheduler.candidates import Positions
from router.scheduler.capacity.arrivals import HELD_BLOCKS, WORK_COLUMNS, Arrivals
from router.scheduler.terms import FloatArray
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import DECODE_BLOCKS, REQUESTS, RankTable

MOST_POOLS = 256
"""Number of pools above which those that lost all their workers longest ago are forgotten."""

SAMPLES = 60
"""Samples per window."""


class CapacitySettings(Struct, frozen=True):
    """The window of averages, and the saturation to which workers are counted."""

    window_s: float = 60.0
    target_saturation: float = 0.7


class Pool(Struct, frozen=True, order=True):
    """The workers of one model, routing group and role."""

    scope: Scope
    role: Role

    @classmethod
    def of(cls, announcement: WorkerAnnouncement) -> "Pool":
        """Return the pool of a worker."""
        return cls(announcement.scope, announcement.role)


class PoolMembers(Struct, frozen=True, eq=False):
    """The workers of a pool, and the slots of all their ranks."""

    workers: list[FleetWorker]
    slots: Positions


class CapacityMonitor:
    """The work that arrived at each pool. `settings`: see there.

    Sampled at ticks: a booking costs only the sums of the tracker.
    """

    __slots__ = (
        "_arrivals",
        "_fleet",
        "_from_zero",
        "_members",
        "_ranks",
        "_sampled_s",
        "_seen",
        "_tracker",
        "_version",
        "settings",
    )

    def __init__(
        self,
        settings: CapacitySettings,
        from_zero: Sequence[Scope],
        fleet: Fleet,
        ranks: RankTable,
        tracker: Tracker,
    ) -> None:
        """Initialise without workers. `from_zero`: scopes that are known before they have one."""
        self.settings = settings
        self._from_zero = [Pool(scope, "aggregated") for scope in from_zero]
        self._fleet = fleet
        self._ranks = ranks
        self._tracker = tracker
        self._arrivals: dict[Pool, Arrivals] = {}
        self._members: dict[Pool, PoolMembers] = {}
        self._version = (-1, -1)
        self._seen: FloatArray = np.zeros((0, HELD_BLOCKS))
        self._sampled_s = -np.inf

    def pools(self, now_s: float) -> list[Pool]:
        """Return the pools that have or had workers, in order."""
        self._arrange(now_s)
        return sorted(self._arrivals)

    def knows(self, scope: Scope) -> bool:
        """Return whether a scope has or had workers, or is to be scaled from zero."""
        pools = (Pool(scope, "aggregated"), Pool(scope, "decode"), Pool(scope, "prefill"))
        return any(each in self._arrivals for each in pools) or pools[0] in self._from_zero

    @property
    def knows_any(self) -> bool:
        """True if it knows any scope."""
        return bool(self._arrivals or self._from_zero)

    @property
    def without_workers(self) -> list[Scope]:
        """The known scopes without any worker, in order."""
        scopes = {pool.scope for pool in self._arrivals}
        return sorted(scopes - {pool.scope for pool in self._members})

    def members(self, pool: Pool) -> PoolMembers:
        """Return the workers of a pool, which may have lost all."""
        return self._members.get(pool, _NO_MEMBERS)

    def arrivals(self, pool: Pool) -> Arrivals:
        """Return the work that arrived at a known pool."""
        return self._arrivals[pool]

    def sample(self, now_s: float) -> None:
        """Add to each pool what arrived since the last sample, if it is time. O(ranks)."""
        self._arrange(now_s)
        if now_s < self._sampled_s + self.settings.window_s / SAMPLES:
            return
        self._sampled_s = now_s
        arrived, values = self._tracker.arrived(), self._ranks.values
        new = arrived.copy()
        new[: len(self._seen)] -= self._seen
        self._seen = arrived
        for pool, members in self._members.items():
            work, slots = np.zeros(WORK_COLUMNS), members.slots
            work[:HELD_BLOCKS] = new[slots[slots < len(new)]].sum(axis=0)
            work[HELD_BLOCKS:] = values[slots][:, [DECODE_BLOCKS, REQUESTS]].sum(axis=0)
            self._arrivals[pool].add(work, now_s)

    def _arrange(self, now_s: float) -> None:
        """Assign ranks to pools anew, after changes of the fleet."""
        version = self._fleet.version, self._ranks.version
        if version == self._version:
            return
        self._version = version
        workers: dict[Pool, list[FleetWorker]] = {}
        for worker in self._fleet:
            workers.setdefault(Pool.of(worker.announcement), []).append(worker)
        self._members = {pool: self._of(here) for pool, here in workers.items()}
        for pool in workers:
            known = self._arrivals.pop(pool, None)
            self._arrivals[pool] = known or Arrivals(self.settings.window_s, now_s)
        self._arrange_from_zero(now_s)
        for pool in list(self._arrivals)[: max(len(self._arrivals) - MOST_POOLS, 0)]:
            if pool not in workers and pool not in self._from_zero:
                del self._arrivals[pool]

    def _arrange_from_zero(self, now_s: float) -> None:
        """Add pools to be scaled from zero; a scope has none if its pools are of other roles."""
        split = {pool.scope for pool in self._arrivals if pool.role != "aggregated"}
        for pool in self._from_zero:
            if pool.scope in split and pool not in self._members:
                self._arrivals.pop(pool, None)
            elif pool not in self._arrivals:
                self._arrivals[pool] = Arrivals(self.settings.window_s, now_s)

    def _of(self, workers: list[FleetWorker]) -> PoolMembers:
        slots = [self._ranks.slot(rank) for worker in workers for rank in worker.ranks]
        return PoolMembers(workers, np.array(slots, np.int64))


_NO_MEMBERS = PoolMembers([], np.empty(0, np.int64))
