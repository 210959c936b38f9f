"""Views of usage reports against predictions, as callers read them. Read-only."""

from msgspec import Struct, structs

from router.accuracy.accuracy import AccuracyMonitor, Finding, Group
from router.accuracy.diagnosis import Diagnosis
from router.accuracy.sequential_test import Counts, Symptom


class PredictedGroup(Struct, frozen=True):
    """Compared requests of a model and routing group.

    They are of one worker or all (`worker_id` null), and of one tenant or all (`tenant` null).

    `requests`: requests with a usage report; `prompt_tokens`: their prompt tokens. `compared`:
    those with a report of cached tokens; of these, `cached_tokens`, `predicted_tokens`, and
    `mispredicted_tokens`, the sum of the differences of single requests.
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
    """A group that is mispredicted for a reason, by evidence of `requests` in the last `since_s`.

    `tenant`: null for all; "" for one that is not named here.

    `symptoms`: `length`, the engine counts prompt tokens differently; `unshown`, reused blocks are
    never in the index; `more`, more blocks are reused than the index contained; `unused`, none of
    the blocks in the index are reused; `tiers_unused`, none of those in lower tiers are; `earlier`,
    prompts are resumed before the predicted place: of a hybrid model, or by one block. `causes`:
    the likeliest first.
    """

    model_name: str
    routing_group: str
    worker_id: int | None
    tenant: str | None
    symptoms: list[Symptom]
    requests: int
    since_s: float
    causes: list[Diagnosis]


class Predictions(Struct, frozen=True):
    """The accuracy of predictions.

    `findings`: mispredicted groups, the widest first; `groups`: totals; `forgotten`: groups dropped
    beyond the limit; `unjudged`: requests that could not be examined.
    """

    findings: list[Misprediction]
    groups: list[PredictedGroup]
    forgotten: int
    unjudged: int


def predictions(loop: AccuracyMonitor, now_s: float) -> Predictions:
    """Return all views. O(groups)."""
    groups = [_group(group, counts) for group, counts in loop.counts()]
    return Predictions(findings(loop, now_s), groups, loop.forgotten, loop.unjudged)


def findings(loop: AccuracyMonitor, now_s: float) -> list[Misprediction]:
    """Return the mispredicted groups, the widest first. O(groups)."""
    return [_misprediction(each, now_s) for each in loop.findings()]


def public_findings(loop: AccuracyMonitor, now_s: float) -> list[Misprediction]:
    """Return the findings for callers of any tenant.

    Tenants are not named, and appear only if there is no wider finding.
    """
    found = findings(loop, now_s)
    wide = {(each.model_name, each.routing_group) for each in found if each.tenant is None}
    return [
        each if each.tenant is None else structs.replace(each, tenant=_SOMEBODY)
        for each in found
        if each.tenant is None or (each.model_name, each.routing_group) not in wide
    ]


def sentence(found: Misprediction) -> str:
    """Return a finding as a sentence."""
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
