"""Comparison of choices with those of the incumbent, which decides.

"Ours" is a router that does not decide, or a second policy (`shadow_policy`) of the router that
does. Both choices are weighed at the same moment, on the same index and load, by the terms of ours:
only the choice itself differs. Only the incumbent's choice is reserved, so that the load is the
real one.
"""

from collections import deque
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from router.core.core import RouterCore
from router.core.placement import Placement
from router.core.views.decisions import candidate
from router.protocol.replies import Candidate
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest
from router.protocol.values import Rank, Scope
from router.scheduler.policy._predicted_parts import PREFILL_OWN_S, QUEUE_S
from router.scheduler.policy.predictive import predicted_parts
from router.scheduler.terms import Terms

MAX_DIFFERENCES = 100
"""Limit of differences kept; the oldest are dropped. A kilobyte each."""

MAX_SCOPES = 1_024

Source: TypeAlias = Literal["request", "bus", "policy"]
"""The source of the incumbent's choice: a caller, its messages on the bus, the policy in force."""


class Totals(Struct):
    """Totals of one side's choices, by our own index and reservations."""

    predicted_cached_blocks: int = 0
    predicted_cached_tokens: int = 0
    projected_prefill_tokens: int = 0
    """Prefill load of the chosen ranks in tokens, including the request itself."""

    predicted_ttft_s: float = 0.0
    """Predicted times to the first token, in seconds; 0 for ranks whose speed is unknown."""

    def add(self, terms: Terms, ttft_s: float) -> None:
        """Add a choice."""
        self.predicted_ttft_s += ttft_s
        self.predicted_cached_blocks += terms.predicted_cached_blocks
        self.predicted_cached_tokens += terms.predicted_cached_blocks * terms.block_size
        self.projected_prefill_tokens += terms.potential_prefill_tokens


class ScopeShadow(Struct):
    """One scope's comparisons.

    `tied`: the choices differ, but cost the same by our policy; `unknown_ranks`: choices of ranks
    that are not candidates here, which are not compared.
    """

    model_name: str
    routing_group: str
    ours: Totals
    theirs: Totals
    compared: int = 0
    agreed: int = 0
    tied: int = 0
    unknown_ranks: int = 0
    isl_tokens: int = 0

    def add(self, placement: Placement, theirs: int) -> None:
        """Add a comparison; `theirs`: index of the candidate that the incumbent chose."""
        choice = placement.choice
        self.compared += 1
        self.isl_tokens += placement.prompt.isl_tokens
        parts = predicted_parts(choice.table, placement.settings)
        for totals, index in ((self.ours, choice.index), (self.theirs, theirs)):
            ttft_s = float(np.nan_to_num(parts[index, QUEUE_S : PREFILL_OWN_S + 1].sum()))
            totals.add(choice.table.terms(index), ttft_s)
        if theirs == choice.index:
            self.agreed += 1
        elif choice.costs[theirs] == choice.costs[choice.index]:
            self.tied += 1


class Difference(Struct, frozen=True):
    """A request for which we would have chosen another rank, explained by both ranks' terms.

    `claimed_overlap_blocks`: the overlap that the incumbent assumed, if it publishes it.
    """

    request_id: str | None
    model_name: str
    routing_group: str
    source: Source
    age_s: float
    isl_tokens: int
    policy: str
    ours: Candidate
    theirs: Candidate
    claimed_overlap_blocks: int | None


class ShadowReport(Struct, frozen=True):
    """All comparisons since the beginning, and the last differences, newest first."""

    books: str
    compared_for_s: float
    scopes: list[ScopeShadow]
    differences: list[Difference]


_BOOKS = "only what the incumbent chose: no choice of ours is booked"
_IN_FORCE = "what the policy in force chose, which is theirs; ours is only compared:"


class Shadow:
    """The comparisons so far."""

    __slots__ = ("_differences", "_policy", "_since_s", "scopes", "uncounted")

    def __init__(self, now_s: float) -> None:
        self._differences: deque[tuple[float, Difference]] = deque(maxlen=MAX_DIFFERENCES)
        self.scopes: dict[Scope, ScopeShadow] = {}
        self.uncounted = 0
        self.begin("", now_s)

    def begin(self, policy: str, now_s: float) -> None:
        """Forget all comparisons. `policy`: the one compared with that in force, in one router."""
        self._since_s, self._policy = now_s, policy
        self._differences.clear()
        self.scopes.clear()
        self.uncounted = 0

    def compare(
        self,
        core: RouterCore,
        request: SelectRequest,
        placement: Placement,
        incumbent: Rank,
        source: Source,
        now_s: float,
        claimed_overlap_blocks: int | None = None,
    ) -> None:
        """Count our choice and the incumbent's choice. O(candidates)."""
        totals, choice = self._totals(request.scope), placement.choice
        if totals is None:
            self.uncounted += 1
            return
        theirs = choice.table.find(incumbent)
        if theirs is None:
            totals.unknown_ranks += 1
            return
        totals.add(placement, theirs)
        if theirs != choice.index:
            ours_seen, theirs_seen = (
                candidate(core, choice.table.terms(i), float(choice.costs[i]), now_s)
                for i in (choice.index, theirs)
            )
            seen = (ours_seen, theirs_seen, claimed_overlap_blocks)
            self._differences.append((now_s, _difference(request, placement, source, *seen)))

    def report(self, now_s: float) -> ShadowReport:
        """Return all comparisons, as callers see them."""
        return ShadowReport(
            books=f"{_IN_FORCE} {self._policy}" if self._policy else _BOOKS,
            compared_for_s=round(now_s - self._since_s, 3),
            scopes=[self.scopes[scope] for scope in sorted(self.scopes)],
            differences=[
                replace(difference, age_s=round(now_s - seen_s, 3))
                for seen_s, difference in reversed(self._differences)
            ],
        )

    def _totals(self, scope: Scope) -> ScopeShadow | None:
        if scope not in self.scopes:
            if len(self.scopes) >= MAX_SCOPES:
                return None
            self.scopes[scope] = ScopeShadow(
                scope.model_name, scope.routing_group, Totals(), Totals()
            )
        return self.scopes[scope]


def reserved_at(request: SelectRequest, rank: Rank) -> ReserveRequest:
    """Return the reservation of a request that the incumbent placed at `rank`."""
    shared = {name: getattr(request, name) for name in PromptRequest.__struct_fields__}
    return ReserveRequest(
        **shared,
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
        request_id=request.request_id,
        expected_output_tokens=request.expected_output_tokens,
    )


def _difference(
    request: SelectRequest,
    placement: Placement,
    source: Source,
    ours: Candidate,
    theirs: Candidate,
    claimed_overlap_blocks: int | None,
) -> Difference:
    return Difference(
        request_id=request.request_id,
        model_name=request.model_name,
        routing_group=request.routing_group,
        source=source,
        age_s=0.0,
        isl_tokens=placement.prompt.isl_tokens,
        policy=placement.choice.policy,
        ours=ours,
        theirs=theirs,
        claimed_overlap_blocks=claimed_overlap_blocks,
    )
