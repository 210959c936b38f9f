"""The section `slo` of `scheduling.py`: requests that meet their objectives, by load.

Seven in ten prompts of at most 16,000 tokens are to get their first token within 3 s and the
others 60 ms apart; all other requests within 30 s and 200 ms. Goodput is the part of all requests
that meet both; a refused one has missed them. For each rival, the load at which that is 90 % is
searched by halving, on the first seed; at the highest of them, all are replayed with all seeds.

Rivals do not refuse. Of llm-d, the published headroom tiers and their scorer are modelled, with
this router's predictions in place of its trained ones, and without its shedding, which concerns
requests below priority 0 alone, and would count as missed here.
"""

from collections.abc import Iterator, Mapping
from math import sqrt

from msgspec import Struct
from msgspec.structs import replace
from rows import Row
from scheduling_runs import Case
from scheduling_sections import OURS, Found, Plan, Settings, mean, row

MET, GOAL = 0.9, 0.95
SLOWEST, FASTEST = 1.0, 4.0
"""The speeds between which the best rival meets 90 %."""

STEPS = 6
RIVALS: tuple[tuple[str, Settings], ...] = (
    ("lmetric", ()),
    ("dynamo-1.6", (("prefill_load_scale", 32.0), ("decode_active_request_weight", 32.0))),
    ("llm-d-slo", (("packs", 0.0),)),
    ("llm-d-slo", (("packs", 1.0),)),
    ("dynamo-1.0", (("prefill_load_scale", 1.0),)),
    ("dynamo-1.0", (("prefill_load_scale", 8.0),)),
    ("dynamo-1.0", (("prefill_load_scale", 64.0),)),
    ("dynamo-1.6", (("prefill_load_scale", 128.0), ("decode_active_request_weight", 128.0))),
    ("llm-d", (("affinity", 0.5), ("penalty_tokens", 80_000.0))),
    ("cache-aware", (("balance_abs", 2.0), ("balance_rel", 1.1), ("cache_threshold", 0.3))),
    ("least-loaded", ()),
)
WORKLOADS = ("multi-turn", "shared-prompts")


def slo_cases(plan: Plan, found: Found) -> Iterator[Case]:
    for traffic in _traffic(plan):
        searches = [_search(traffic, plan, rival, found) for rival in _rivals(plan)]
        best = max(each.slowest for each in searches)
        missing = [each.case for each in searches if each.case and each.fastest > best]
        yield from missing
        if not missing:
            for cases in _compared(traffic, plan, found).values():
                yield from cases


def slo_rows(plan: Plan, found: Found) -> Iterator[Row]:
    """A row for each traffic, with the goodput of each rival and of ours without refusals."""
    for traffic in _traffic(plan):
        compared, speed = _compared(traffic, plan, found), _speed(traffic, plan, found)
        ours, placing, *_ = compared.values()
        rivals = list(compared.values())[2:]
        best = max(rivals, key=lambda cases: mean(found, cases, "goodput"))
        name = f"{traffic.source.rpartition('/')[2]} at {speed:.2f}, {best[0].label}: goodput"
        made = row(name, found, ours, best, "goodput", 1.0)
        refused = mean(found, ours, "refused") / (found[ours[0]].served + found[ours[0]].unserved)
        notes = [f"ours {'≥' if made.ours >= 100 * GOAL else '<'} {GOAL:.0%}"]
        notes += [f"{refused:.1%} refused", f"without refusals {_percent(found, placing)}"]
        notes += [f"{cases[0].label} {_percent(found, cases)}" for cases in rivals]
        yield replace(made, note="; ".join(notes))


def _traffic(plan: Plan) -> Iterator[Case]:
    """Each traffic, as a case that the others are made of."""
    made = Case(source=plan.trace, policy=OURS, half=plan.half, requests=plan.requests, slo=True)
    yield made
    for source in WORKLOADS if plan.workloads else ():
        yield replace(made, source=source, half=0)


def _rivals(plan: Plan) -> tuple[tuple[str, Settings], ...]:
    return RIVALS[: max(len(RIVALS) // plan.stride, 3)]


class _Search(Struct, frozen=True):
    """The speeds between which a rival meets 90 %, and the case that is to be replayed next."""

    slowest: float
    fastest: float
    case: Case | None = None


def _search(traffic: Case, plan: Plan, rival: tuple[str, Settings], found: Found) -> _Search:
    slowest, fastest = SLOWEST, FASTEST
    for _ in range(STEPS if plan.stride == 1 else STEPS - 2):
        speed = round(sqrt(slowest * fastest), 3)
        policy, settings = rival
        case = replace(traffic, policy=policy, settings=settings, arrival_speed=speed)
        case = replace(case, seed=plan.first_seed)
        if case not in found:
            return _Search(slowest, fastest, case)
        if found[case].goodput >= MET:
            slowest = speed
        else:
            fastest = speed
    return _Search(slowest, fastest)


def _speed(traffic: Case, plan: Plan, found: Found) -> float:
    """The load at which the best rival meets 90 %."""
    return max(_search(traffic, plan, rival, found).slowest for rival in _rivals(plan))


def _compared(traffic: Case, plan: Plan, found: Found) -> Mapping[str, list[Case]]:
    """The cases at that load: ours, ours without refusals, and the rivals, by label."""
    speed = _speed(traffic, plan, found)
    policies = [(OURS, ()), (OURS, (("slo_unmet", "place"),)), *_rivals(plan)]
    made = {}
    for policy, settings in policies:
        case = replace(traffic, policy=policy, settings=settings, arrival_speed=speed)
        seeds = range(plan.first_seed, plan.first_seed + plan.seeds)
        made[case.label] = [replace(case, seed=seed) for seed in seeds]
    return made


def _percent(found: Found, cases: list[Case]) -> str:
    return f"{mean(found, cases, 'goodput'):.1%}"
