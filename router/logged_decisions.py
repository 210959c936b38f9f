"""A decision as it is kept: explained, but for the chosen and the cheapest candidates only.

It has no tokens, no salt, no session and no address in it.
"""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from router.core import RouterCore
from router.explain import explained_candidates
from router.placement import Placement
from router.placement_errors import RemovedRanks
from router.protocol.replies import ExplainedCandidate
from router.protocol.requests import SelectRequest


class LoggedDecision(Struct, frozen=True):
    """A decision, kept to be looked at. `at`: seconds since 1970; `candidates`: how many there
    were, of whom `shown` are the chosen one, first, and the cheapest others.
    """

    at: float
    request_id: str | None
    model_name: str
    routing_group: str
    policy: str
    isl_tokens: int
    block_size: int
    worker_id: int
    dp_rank: int
    cost: float
    settings: dict[str, Any]
    candidates: int
    shown: list[ExplainedCandidate]
    removed: list[RemovedRanks]


def without_prompt(request: SelectRequest) -> SelectRequest:
    """A request that can be kept: its prompt may be long."""
    return replace(request, token_ids=None, sequence_hashes=None, block_mm_infos=None)


def logged_decision(
    core: RouterCore,
    request: SelectRequest,
    placement: Placement,
    candidates: int,
    at: float,
    now_s: float,
) -> LoggedDecision:
    """A placement, explained; of so many candidates at most. O(candidates there were)."""
    choice, why = placement.choice, core.explain(request, placement)
    order = [i for i in choice.costs.argsort().tolist() if i != choice.index]
    shown = [choice.index, *order[: candidates - 1]]
    return LoggedDecision(
        at=round(at, 6),
        request_id=request.request_id,
        model_name=request.model_name,
        routing_group=request.routing_group,
        policy=choice.policy,
        isl_tokens=placement.prompt.isl_tokens,
        block_size=placement.prompt.block_size,
        worker_id=placement.rank.worker_id,
        dp_rank=placement.rank.dp_rank,
        cost=float(choice.costs[choice.index]),
        settings=why.settings,
        candidates=len(choice.table),
        shown=explained_candidates(core, placement, why, shown, now_s),
        removed=why.removed,
    )
