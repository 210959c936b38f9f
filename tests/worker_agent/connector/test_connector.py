"""Leader, worker and scheduler over real tiers, under an engine that looks at every byte."""

import pytest
import torch
from msgspec.structs import replace

from router.errors import InvalidFieldError
from router.protocol.values import Tier
from support.blocks.connectors import names_of
from support.engines.connector_engine import CONFIG, LAYERS, Engine
from worker_agent.connector.device_memory import DeviceMemory
from worker_agent.connector.slots.protocol import (
    CachedRequest,
    Completion,
    IterationComplete,
    NewRequest,
    NewSlot,
    Operation,
    RequestType,
    ScheduledStep,
    StepPlan,
    StepReport,
    TransferKind,
)
from worker_agent.connector.slots.slot_table import SlotState
from worker_agent.connector.worker import register_kv_caches
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.groups import LayoutGroup
from worker_agent.layout.strides import LayoutKind

PROMPT = list(range(100, 130))  # seven blocks, and two tokens


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.drain()
    engine.close()


def run(engine, key, tokens=PROMPT, steps=8):
    """Compute a request, and a token or two; how many tokens of it were loaded, and computed."""
    loaded, computed = engine.loaded_tokens, engine.computed_tokens
    engine.add(key, tokens)
    for _ in range(steps):
        engine.step()
        engine.quiesce()
    engine.finish(key)
    engine.step()
    engine.quiesce()
    return engine.loaded_tokens - loaded, engine.computed_tokens - computed


def test_a_prefix_comes_back_from_below(engine):
    assert run(engine, "a")[0] == 0
    loaded, computed = run(engine, "b")
    assert loaded == 28
    assert computed < 10
    assert engine.leader.counters.matched_tokens == 28
    assert engine.leader.counters.failed_blocks == 0


@pytest.mark.parametrize(("block", "credited"), [(0, 0), (3, 12), (6, 24)])
def test_a_block_that_fails_is_computed_again_and_so_is_what_follows(engine, block, credited):
    run(engine, "a")
    [slot] = engine.tiers[Tier.HOST].pool.scan([names_of(PROMPT)[block].identity])
    [below] = engine.tiers[Tier.DISK].pool.scan([names_of(PROMPT)[block].identity])
    engine.corrupt(Tier.HOST, slot)
    engine.corrupt(Tier.DISK, below)
    loaded, computed = run(engine, "b", steps=12)
    assert loaded == credited
    assert computed >= len(PROMPT) - credited
    assert engine.leader.counters.failed_blocks == 7 - block
    assert run(engine, "c")[0] == 28  # what is right was stored again


def test_late_load_has_failed():
    engine = Engine(load_timeout_s=0.0)
    run(engine, "a")
    engine.add("b", PROMPT)
    with engine.stalled():
        engine.step()
    assert engine.leader.counters.failed_blocks == 7
    assert engine.requests["b"].state == "waiting"
    engine.step()
    assert (engine.loaded_tokens, engine.requests["b"].computed) == (0, 8)
    engine.drain()
    engine.close()


def test_nothing_computed_in_a_step_with_a_load_error_is_stored():
    engine = Engine(load_timeout_s=0.0)
    run(engine, "a")
    engine.add("b", PROMPT)
    engine.add("poisoned", range(500, 509))
    with engine.stalled():
        engine.step()  # the one is not loaded, while the other is computed
    assert engine.worker.counters.failed_loads == 7
    assert engine.worker.counters.cancelled_stores == 1
    engine.quiesce()
    engine.step(chunk=1)
    engine.quiesce()
    [first, *_] = names_of(range(500, 509))
    assert engine.tiers[Tier.HOST].pool.scan([first.identity]) == [None]
    assert engine.leader.counters.unsaved_blocks == 2
    engine.drain()
    engine.close()


def test_preempted_request_continues_with_stored_blocks(engine):
    engine.add("a", PROMPT)
    for _ in range(5):
        engine.step()
        engine.quiesce()
    engine.preempt("a")
    for _ in range(3):
        engine.step()
        engine.quiesce()
    assert engine.loaded_tokens >= 28
    assert engine.leader.counters.refused == 0


def half_stored():
    """Four blocks of "a" are gathered, and the pace allows no more."""
    engine = Engine(batch_blocks=1, store_bytes_per_s=0.001)
    engine.add("a", PROMPT)
    engine.step(chunk=30)
    for _ in range(3):
        engine.quiesce()
        engine.step(skipped={"a"})
    engine.quiesce()
    assert engine.worker.under_way == 1
    return engine


def test_stores_of_preempted_requests_leave_nothing():
    engine = half_stored()
    engine.preempt("a")
    engine.step(skipped={"a"})
    assert (engine.worker.counters.voided, engine.worker.under_way) == (1, 0)
    engine.finish("a")
    assert run(engine, "b")[0] == 16
    engine.drain()
    engine.close()


def test_finished_requests_keep_their_blocks_until_they_are_stored_for_a_while():
    engine = half_stored()
    engine.finish("a")
    engine.step()
    assert len(engine.delayed["a"]) == 8
    engine.now_s += 1.0
    engine.step()
    assert engine.delayed == {}
    assert engine.leader.counters.unsaved_blocks == 3
    engine.drain()
    engine.close()


@pytest.mark.parametrize("steps", range(4))
def test_request_may_be_given_up_twice_at_any_time(engine, steps):
    run(engine, "a")
    engine.add("b", PROMPT)
    for _ in range(steps):
        engine.step()
    engine.finish("b")
    is_later = "b" in engine.delayed
    assert engine.leader.request_finished("b", engine.now_s) == is_later
    engine.step()


def test_unknown_requests_and_completions_are_counted(engine):
    leader, worker = engine.leader, engine.worker
    assert not leader.request_finished("nobody", 0.0)
    leader.update_state_after_alloc("nobody", [[1]], 4, 0.0)
    assert "nobody" in str(leader.refusal)
    engine.finished.append("nobody")
    engine.step()
    assert (leader.counters.refused, worker.counters.unknown_finished) == (1, 1)
    engine.leader.update(StepReport([Completion(77)], ["nobody"]))
    assert leader.counters.stray_completions == 1


@pytest.mark.parametrize(
    ("key", "blocks"), [("x", (1,)), ("r", ()), ("r", (24,)), ("r", (-1,)), ("r", (1, 1))]
)
def test_operations_that_make_no_sense_are_refused(engine, key, blocks):
    names = tuple(names_of(PROMPT)[: len(blocks)])
    load = Operation(5, key, TransferKind.LOAD, RequestType.IMMEDIATE, Tier.HOST, names, blocks)
    engine.worker.bind(StepPlan(1, [NewSlot("r", 1)], [load]))
    assert (engine.worker.counters.refused, engine.worker.under_way) == (1, 0)
    [completion] = engine.worker.take_report().completions
    assert len(completion.errors) == len(blocks)
    engine.leader.iteration = 1


def test_plans_follow_each_other(engine):
    engine.step()
    with pytest.raises(InvalidFieldError, match=r"iteration: 5 \(allowed: 2\)"):
        engine.worker.bind(StepPlan(5))
    with pytest.raises(InvalidFieldError, match=r"layer: x \(allowed: layer.0, layer.1\)"):
        engine.worker.wait_for_layer("x")


def test_blocks_of_an_unfinished_step_are_not_stored(engine):
    names = tuple(names_of(PROMPT)[:1])
    fields = "r", TransferKind.STORE, RequestType.SCHEDULED, Tier.HOST, names, (3,)
    store = Operation(5, *fields, IterationComplete(1))
    engine.worker.bind(StepPlan(1, [NewSlot("r", 0)], [store]))
    engine.worker.bind(StepPlan(2))
    engine.worker.end_step(0.0)
    [completion] = engine.worker.take_report().completions
    assert completion.errors == {0: "cancelled"}
    assert engine.worker.get_finished(["r"], 0.0).stored == {"r"}
    assert engine.worker.take_report().stored == ["r"]
    engine.leader.iteration = 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_blocks": 23}, r"layer.0: shape \[2, 24, 32\]"),
        ({"inner_dim": 4}, r"layer.0: shape"),
        ({"dtype_width_bytes": 2, "inner_dim": 8}, r"layer.0: dtype torch.uint8"),
        ({"num_layers": 1}, "layers: 2 of attention"),
    ],
)
def test_tensors_are_laid_out_as_configured(engine, change, said):
    def register():
        config = replace(CONFIG, **change)
        group = LayoutGroup("attention", LAYERS, config, LayoutKind.BLOCK_SECOND)
        register_kv_caches("1", engine.stack, engine.caches, [group], 1.0)

    with pytest.raises(LayoutError, match=said):
        register()


def test_blocks_are_as_large_as_the_tiers_have_them(engine):
    group = LayoutGroup("one", LAYERS[:1], replace(CONFIG, num_layers=1), LayoutKind.BLOCK_SECOND)
    caches = {LAYERS[0]: engine.caches[LAYERS[0]]}
    with pytest.raises(InvalidFieldError, match=r"groups: blocks of 64 bytes \(allowed: 128"):
        register_kv_caches("1", engine.stack, caches, [group], 1.0)


def test_groups_of_layers_make_one_block(engine):
    """Two groups, one laid out block by block: what is gathered is scattered."""
    first, second = (replace(CONFIG, num_layers=1, inner_dim=inner) for inner in (8, 4))
    groups = [
        LayoutGroup("a", ("x",), first, LayoutKind.BLOCK_FIRST),
        LayoutGroup("b", ("y",), second, LayoutKind.BLOCK_SECOND),
    ]
    caches = {
        "x": torch.arange(24 * 2 * 32).to(torch.uint8).view(24, 2, 32),
        "y": torch.arange(2 * 24 * 16).to(torch.uint8).view(2, 24, 16),
    }
    device = DeviceMemory("1", caches, groups)
    rows = device.gather([3, 5]).rows
    assert torch.equal(rows[1, :64], caches["x"][5].flatten())
    assert torch.equal(rows[1, 64:], caches["y"][:, 5].flatten())
    device.scatter([8], rows[1:])
    assert torch.equal(device.gather([8]).rows, rows[1:])


def test_lost_answers_are_waited_for_until_the_deadline(engine):
    run(engine, "a")
    engine.lost_reports = 100
    engine.add("b", PROMPT)
    for _ in range(4):
        engine.step()
        engine.quiesce()
    assert engine.requests["b"].computed > 0  # the engine goes by what the worker says
    [slot] = engine.slots.slots()
    assert slot.state is SlotState.ONBOARDING
    engine.now_s += 31.0
    [lost] = engine.leader.tick(engine.now_s)
    assert (lost.key, len(lost.blocks)) == ("b", 7)
    assert engine.leader.quarantined_blocks == 7
    engine.finish("b")
    engine.step()
    assert engine.leader.quarantined_blocks == 0  # the worker named the request
    engine.lost_reports = 0


def test_slow_worker_gives_up_cancelled_loads(engine):
    """Else what comes late would be written over what is computed instead."""
    run(engine, "a")
    engine.add("b", PROMPT)
    with engine.stalled():
        engine.step()
        engine.now_s += 31.0
        [lost] = engine.leader.tick(engine.now_s)
        assert len(lost.blocks) == 7
        assert (engine.worker.under_way, engine.leader.quarantined_blocks) == (1, 7)
        engine.step()
        assert (engine.worker.under_way, engine.leader.quarantined_blocks) == (0, 0)
    engine.quiesce()
    for _ in range(5):
        engine.step()
    assert (engine.loaded_tokens, engine.requests["b"].computed > 28) == (0, True)


def test_metadata_of_unknown_requests_is_refused_and_the_others_proceed(engine):
    engine.add("a", PROMPT)
    engine.step(chunk=8)
    step = ScheduledStep(
        {"a": 8, "x": 4, "y": 4},
        [NewRequest("x", [[20]], 0)],
        [CachedRequest("y", [1], [[21]], 4), CachedRequest("a", [], [[22, 23]], 8)],
        preempted=["z"],
    )
    leader = engine.leader
    plan = leader.build_connector_metadata(step)
    assert leader.counters.refused == 2
    assert [(each.key, len(each.blocks)) for each in plan.operations] == [("a", 2)]
    leader.iteration -= 1
    leader.update(StepReport([Completion(1), Completion(1)], ["x"]))


def test_lost_worker_is_not_awaited(engine):
    run(engine, "a")
    engine.add("b", PROMPT)
    engine.place(engine.requests["b"], 8)
    engine.leader.build_connector_metadata(ScheduledStep({}))
    engine.leader.worker_is_gone()
    assert engine.leader.quarantined_blocks == 0
    assert not engine.leader.request_finished("b", 0.0)
    assert len(engine.slots) == 0
    engine.leader.iteration -= 1
    engine.finish("b")
