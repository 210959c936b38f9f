"""Whatever engines report, and whatever is not known: every policy chooses by finite costs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack, structs

from router.core.commands import ApplyLoad, PrefillComplete, Select, Tick, UpsertWorker
from router.errors import WireError
from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges, decode_load_report
from router.protocol.requests import ConfigOverride, SelectRequest
from router.scheduler.policy.registry import builtin_policies
from router.sequence.active.footprint import TrackedParts
from router.sequence.active.prompt import prepare
from router.sequence.rank_table import DECODE_BLOCKS
from support.chaos.fuzzing import examples
from support.values.builders import World, announcement, rank, report

POLICIES = [policy.name for policy in builtin_policies()]
PARTS = {"counters": LoadCounters, "gauges": LoadGauges, "constants": LoadConstants}
FIELDS = [(part, field.name) for part, of in PARTS.items() for field in structs.fields(of)]
PROMPT = list(range(40))


def of_two(**fields):
    """Two ranks, of which the first has a prompt to compute, and the second one that decodes."""
    world = World(**fields)
    for worker_id in (1, 2):
        world.worker(worker_id)
        world.book(f"r{worker_id}", list(range(100 * worker_id, 100 * worker_id + 30)))
    world.core.handle(PrefillComplete("r2"), 0.5)
    return world


def hear(world, now_s, fields):
    """Rank 1 reports these; false if they are refused on the wire."""
    payload = msgpack.decode(msgpack.encode(report(1)))
    for part, values in fields.items():
        payload[part] = {**payload[part], **values}
    try:
        heard = decode_load_report(msgpack.encode(payload))
    except WireError:
        return False
    world.core.handle(ApplyLoad(heard), now_s)
    return True


def assert_all_choose(world, now_s, expected_output_tokens=None):
    for policy in POLICIES:
        for temperature in (0.0, 0.5):
            override = ConfigOverride(policy=policy, router_temperature=temperature)
            request = SelectRequest(
                token_ids=PROMPT,
                router_config_override=override,
                expected_output_tokens=expected_output_tokens,
            )
            placement = world.core.handle(Select(request, prepare(request, ())), now_s)[0]
            assert placement.rank in (rank(1), rank(2))
            assert np.isfinite(placement.choice.costs).all(), policy
            explained = world.core.explain(request, placement)
            assert np.isfinite(explained.reasons.parts).all(), policy
            assert explained.reasons.chances.sum() == pytest.approx(1.0)
            assert np.isfinite(explained.predicted_s).all()
    world.core.predictor.check_invariants()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e308, 2**64 - 1, 10**18])
@pytest.mark.parametrize(("part", "field"), FIELDS, ids=lambda each: str(each))
def test_no_field_of_a_report_makes_a_policy_choose_by_nonsense(part, field, value):
    world = of_two()
    for second in range(1, 6):
        steps = {"steps": 40 * second, "busy_s": 0.9 * second, "prefill_tokens": 1_000 * second}
        hear(world, float(second), {"counters": steps} if second < 3 else {part: {field: value}})
    assert_all_choose(world, 6.0)


counts = st.integers(0, 2**64 - 1) | st.integers(0, 10_000)
numbers = st.floats() | st.floats(0, 1e4)


def any_of(part):
    kinds = {f.name: numbers if f.type is float else counts for f in structs.fields(part)}
    return st.fixed_dictionaries({}, optional=kinds)


values = {name: any_of(part) for name, part in PARTS.items()}


@settings(max_examples=examples(30))
@given(
    st.lists(st.fixed_dictionaries(values), max_size=6),
    st.none() | counts,
    st.tuples(counts, counts),
)
def test_combined_nonsense_makes_no_policy_choose_by_it(reports, expected_output_tokens, announced):
    world = of_two()
    world.core.handle(
        UpsertWorker(
            announcement(1, total_kv_blocks=announced[0], max_num_batched_tokens=announced[1])
        ),
        0.9,
    )
    for second, fields in enumerate(reports, start=1):
        hear(world, float(second), fields)
        world.core.handle(Tick(), float(second))
    assert_all_choose(world, len(reports) + 0.5, expected_output_tokens)


@pytest.mark.parametrize("models_prefill", [True, False])
def test_untracked_blocks_cost_nothing(models_prefill):
    world = of_two(tracking=TrackedParts(active_blocks=False), models_prefill=models_prefill)
    row = world.select(PROMPT, 1.0).choice.table.values
    assert np.isnan(row[:, DECODE_BLOCKS]).all()
    assert_all_choose(world, 1.0)
