"""What engines say of prompts against what was predicted, in the shape that callers read. Mutates
nothing.
"""

from msgspec import Struct, structs

from router.closed_loop.causes import Cause
from router.closed_loop.closed_loop import ClosedLoop, Finding, Group
from router.closed_loop.evidence import Counts
from router.closed_loop.suspicion import Symptom


class PredictedGroup(Struct, frozen=True):
    """Requests of a model and routing group, of one worker or all (`worker_id` null), of one tenant
    or all (`tenant` null).

    `requests` whose engine told their usage, with `prompt_tokens`; of those that said what was
    cached (`compared`), how much was (`cached_tokens`), how much was predicted
    (`predicted_tokens`), and `mispredicted_tokens`, by which the two differ, request by request.
    """

    model_name: str
    routing_group: str
    worker_id: int | None
    tenant: str | None
    requests: int
    prompt_tokens: int
    compared: int
    cached_tokens: int
    predicted_tokens: int
    mispredicted_tokens: int


class Misprediction(Struct, frozen=True):
    """A group that is mispredicted for a reason; `requests` speak for it, in the last `since_s`.
    `tenant`: null for all; "" for one that is not named here.

    `symptoms`: `length`, prompts are counted otherwise; `unshown`, what is reused is at no time in
    the index; `more`, more is reused than the index showed; `unused`, nothing of what it showed;
    `tiers_unused`, nothing of what it showed in lower tiers. `causes`: the likeliest first.
    """

    model_name: str
    routing_group: str
    worker_id: int | None
    tenant: str | None
    symptoms: list[Symptom]
    requests: int
    since_s: float
    causes: list[Cause]


class Predictions(Struct, frozen=True):
    """How well predictions are met. `findings`: those that something is wrong with, the widest
    groups first; `groups`: totals; `forgotten`: groups for which there was no room; `unjudged`:
    requests likewise.
    """

    findings: list[Misprediction]
    groups: list[PredictedGroup]
    forgotten: int
    unjudged: int


def predictions(loop: ClosedLoop, now_s: float) -> Predictions:
    """All of it. O(groups)."""
    groups = [_group(group, counts) for group, counts in loop.counts()]
    return Predictions(findings(loop, now_s), groups, loop.forgotten, loop.unjudged)


def findings(loop: ClosedLoop, now_s: float) -> list[Misprediction]:
    """Who is mispredicted for a reason, the widest groups first. O(groups)."""
    return [_misprediction(each, now_s) for each in loop.findings()]


def public_findings(loop: ClosedLoop, now_s: float) -> list[Misprediction]:
    """Findings for everybody's eyes: of tenants it is not said who they are, and only where nothing
    wider is found.
    """
    found = findings(loop, now_s)
    wide = {(each.model_name, each.routing_group) for each in found if each.tenant is None}
    return [
        each if each.tenant is None else structs.replace(each, tenant=_SOMEBODY)
        for each in found
        if each.tenant is None or (each.model_name, each.routing_group) not in wide
    ]


def sentence(found: Misprediction) -> str:
    """A finding in words."""
    whose = f"model={found.model_name} routing_group={found.routing_group}"
    if found.worker_id is not None:
        whose += f" worker {found.worker_id}"
    if found.tenant is not None:
        whose += " of a tenant"
    cause = found.causes[0]
    return f"cached prefixes of {whose} are mispredicted, likely {cause.name}: {cause.because}"


_SOMEBODY = ""


def _misprediction(found: Finding, now_s: float) -> Misprediction:
    group, since_s = found.group, round(now_s - found.since_s, 3)
    whose = (group.model_name, group.routing_group, group.worker_id, group.tenant)
    return Misprediction(*whose, found.symptoms, found.requests, since_s, found.causes)


def _group(group: Group, counts: Counts) -> PredictedGroup:
    return PredictedGroup(
        group.model_name,
        group.routing_group,
        group.worker_id,
        group.tenant,
        counts.requests,
        counts.prompt_tokens,
        counts.compared,
        counts.cached_tokens,
        counts.predicted_tokens,
        counts.mispredicted_tokens,
    )
