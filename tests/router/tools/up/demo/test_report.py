"""What is printed of a decision is what was decided."""

from router.core.commands import Select
from router.core.views.decisions import explain
from router.protocol.requests import ConfigOverride, SelectRequest
from router.sequence.active.prompt import prepare
from router.tools.up.demo.report import explanation
from support.values.builders import World, rank

PROMPT = list(range(40))


def explained(policy):
    world = World()
    world.worker(1)
    world.worker(2)
    world.cache(rank(2), PROMPT)
    override = ConfigOverride(policy=policy)
    request = SelectRequest(token_ids=PROMPT, explain=True, router_config_override=override)
    placement = world.core.handle(Select(request, prepare(request, ())), 0.0)[0]
    return explain(world.core, request, placement, now_s=1.0)


def test_a_decision_is_explained_by_the_parts_of_its_cost():
    assert explanation(explained("dynamo-1.0")).splitlines() == [
        "Why 2/0 for a prompt of 40 tokens? Policy dynamo-1.0: the lowest cost, "
        "which is the sum of its parts.",
        "  rank  cached tokens  to prefill  prefill_blocks  decode_blocks      cost  trust",
        "   2/0             36           0           0.000         10.000    10.000  exact",
        "   1/0              0          40          10.000         10.000    20.000  exact",
    ]


def test_zero_parts_are_omitted():
    decision = explained("predictive")
    _, header, first, second = explanation(decision).splitlines()
    assert header.split()[5:] == ["prefill_s", "slow_start_s", "cost", "trust"]
    for line, candidate in zip((first, second), decision.candidates[::-1], strict=True):
        numbers = [*candidate.parts.values(), candidate.cost]
        assert [float(cell) for cell in line.split()[3:-1]] == [round(n, 3) for n in numbers]
