"""Copies in order with an engine's work: every rule is kept, and needed."""

import pytest
import torch

from router.protocol.values import Tier
from support.blocks.connectors import groups_of, one_group
from support.blocks.recording_device import RaceError, RecordingDevice
from support.engines.connector_engine import LAYERS, Engine
from support.engines.connector_load import random_load

PROMPT = list(range(100, 130))
OTHER = range(300, 390)


def steps(engine, count, **options):
    for _ in range(count):
        engine.step(**options)
        engine.quiesce()


def stored_and_loaded(engine):
    """A prompt is computed while it is stored, and loaded while another is stored."""
    engine.add("a", PROMPT)
    steps(engine, 12)
    engine.finish("a")
    steps(engine, 2)
    engine.add("b", PROMPT)
    engine.add("c", OTHER[:30])
    steps(engine, 10)
    assert engine.loaded_tokens == 28


def preempted_while_stored(engine):
    """Another prompt gets the blocks while a copy may still read them."""
    engine.add("a", PROMPT)
    steps(engine, 1, chunk=30)
    assert engine.worker.under_way == 1
    engine.preempt("a")
    engine.add("b", OTHER)
    steps(engine, 1, chunk=30, skipped={"a"})
    engine.finish("a")
    steps(engine, 5, chunk=30)
    engine.finish("b")
    steps(engine, 5)
    engine.add("c", PROMPT)
    steps(engine, 5)


def preempted_and_finished_while_stored(engine):
    """Before a step in which the worker would be told of the one."""
    engine.add("a", PROMPT)
    engine.step(chunk=30)
    engine.preempt("a")
    engine.finish("a")
    engine.add("b", OTHER)
    steps(engine, 5, chunk=30)


def given_up_while_loaded(engine):
    """Another prompt gets the blocks while a copy may still write into them."""
    engine.add("a", PROMPT)
    steps(engine, 14)
    engine.finish("a")
    steps(engine, 3)
    engine.add("b", PROMPT)
    steps(engine, 2)
    engine.finish("b")
    engine.add("c", OTHER)
    steps(engine, 5, chunk=30)


def passed_by_a_window(engine):
    """A window frees blocks while a copy may still read them."""
    engine.add("a", PROMPT)
    steps(engine, 12, chunk=30)
    engine.finish("a")
    steps(engine, 3)


SCENARIOS = [
    stored_and_loaded,
    preempted_while_stored,
    preempted_and_finished_while_stored,
    given_up_while_loaded,
    passed_by_a_window,
]


def run(scenario, left_out=None, engine_class=Engine, **options):
    """What the scenario stored in the first tier."""
    is_hybrid = scenario is passed_by_a_window
    device = RecordingDevice(late_queries=1000 if is_hybrid else 4, left_out=left_out)
    groups = groups_of([(4, None), (4, 9)]) if is_hybrid else one_group()
    options |= {"copy_device": device, "groups": groups, "batch_blocks": 2 + is_hybrid}
    engine = engine_class(**options)
    for cache in engine.caches.values():
        device.watch(cache)
    try:
        with device.recording():
            scenario(engine)
            engine.quiesce()
    finally:
        engine.close()
    return engine.tiers[Tier.HOST].counters.stored


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_copies_and_computation_race_for_no_byte(scenario):
    assert run(scenario) > 0


def preempted_once_loaded(engine):
    """Another prompt gets the blocks before the first step that awaits them."""
    engine.add("a", PROMPT)
    steps(engine, 12)
    engine.finish("a")
    steps(engine, 2)
    engine.add("b", PROMPT)
    while engine.requests["b"].state != "loaded":
        steps(engine, 1)
    engine.requests["b"].state = "running"
    engine.preempt("b")
    engine.add("c", OTHER)
    steps(engine, 5, chunk=30, skipped={"b"})


def finished_as_it_is_loaded(engine):
    """In the step that begins the copy, or before; of its blocks another prompt gets some."""
    engine.add("a", PROMPT)
    steps(engine, 12)
    engine.finish("a")
    steps(engine, 2)
    for count in range(1, 5):
        engine.add(f"b{count}", PROMPT)
        steps(engine, count)
        engine.finish(f"b{count}")
        steps(engine, 1)
        engine.add(f"c{count}", OTHER[count:])
        steps(engine, 3, chunk=30)
        engine.finish(f"c{count}")
        steps(engine, 3)


def dropped_with_a_failed_load(engine):
    """What the step stored is not; its blocks are another prompt's in the next step."""
    engine.add("a", PROMPT)
    steps(engine, 12)
    engine.finish("a")
    steps(engine, 2)
    for tier, blocks in engine.tiers.items():
        for block in range(blocks.num_blocks):
            engine.corrupt(tier, block)
    engine.add("b", PROMPT)
    for count in range(6):
        engine.add(f"c{count}", OTHER[count : count + 20])
        steps(engine, 1, chunk=30)
        engine.finish(f"c{count}")
    assert engine.leader.counters.unsaved_blocks > 0


LAYERED = [
    stored_and_loaded,
    preempted_while_stored,
    preempted_and_finished_while_stored,
    given_up_while_loaded,
    preempted_once_loaded,
    finished_as_it_is_loaded,
    dropped_with_a_failed_load,
]


@pytest.mark.parametrize("scenario", LAYERED)
def test_copies_by_layer_and_computation_race_for_no_byte(scenario):
    assert run(scenario, is_layered=True) > 0


@pytest.mark.parametrize(
    ("layout", "is_layered"),
    [([(4, None)], False), ([(4, None), (4, 9)], False), ([(4, None)], True)],
)
@pytest.mark.parametrize(
    ("seed", "prompts"), [(0, 16), *(pytest.param(i, 50, marks=pytest.mark.long) for i in range(8))]
)
def test_random_prompts_race_for_no_byte(layout, is_layered, seed, prompts):
    device = RecordingDevice(late_queries=seed + 1)
    groups = groups_of(layout)
    engine = Engine(20, 30, groups=groups, copy_device=device, is_layered=is_layered)
    for cache in engine.caches.values():
        device.watch(cache)
    with device.recording():
        random_load(engine, seed, prompts)
    engine.close()


@pytest.mark.parametrize(
    ("left_out", "scenario", "noticed"),
    [
        ("stores begin after the engine's work", stored_and_loaded, "stores reads .* engine"),
        ("loads begin after the engine's work", preempted_while_stored, "loads writes .* engine"),
        ("held back", preempted_while_stored, "engine writes .* stores"),
        ("held back", given_up_while_loaded, "engine writes .* loads"),
        ("held back", passed_by_a_window, "engine writes .* stores"),
        ("the host waits", stored_and_loaded, "engine .* loads|engine writes .* stores|wrong KV"),
        ("own staging", stored_and_loaded, "stores writes .* loads"),
    ],
)
def test_rule_left_out_is_noticed(left_out, scenario, noticed):
    with pytest.raises(AssertionError, match=noticed):
        run(scenario, left_out)


@pytest.mark.parametrize(
    ("left_out", "scenario", "noticed"),
    [
        ("stores begin after the engine's work", stored_and_loaded, "stores reads .* engine"),
        ("loads begin after the engine's work", preempted_while_stored, "loads writes .* engine"),
        ("held back", stored_and_loaded, "engine reads .* loads"),
        ("held back", preempted_once_loaded, "engine writes .* loads"),
        ("held back", finished_as_it_is_loaded, "engine .* loads"),
        ("own staging", stored_and_loaded, "loads writes .* stores"),
    ],
)
def test_rule_left_out_is_noticed_by_layer(left_out, scenario, noticed):
    with pytest.raises(AssertionError, match=noticed):
        run(scenario, left_out, is_layered=True)


class SavesEarly(Engine):
    def run_layer(self, number, scheduled):
        self.worker.wait_for_layer(LAYERS[number])
        self.worker.save_layer(LAYERS[number])
        self.compute(number, scheduled)


class SavesTheNext(Engine):
    def run_layer(self, number, scheduled):
        self.worker.wait_for_layer(LAYERS[number])
        self.compute(number, scheduled)
        self.worker.save_layer(LAYERS[(number + 1) % len(LAYERS)])


class AwaitsNoLayer(Engine):
    def run_layer(self, number, scheduled):
        self.compute(number, scheduled)
        self.worker.save_layer(LAYERS[number])


class AwaitsTheFirst(Engine):
    def run_layer(self, number, scheduled):
        self.worker.wait_for_layer(LAYERS[0])
        self.compute(number, scheduled)
        self.worker.save_layer(LAYERS[number])


@pytest.mark.parametrize(
    ("engine_class", "noticed"),
    [
        (SavesEarly, "engine writes .* stores"),
        (SavesTheNext, "engine writes .* stores"),
        (AwaitsNoLayer, "engine reads .* loads"),
        (AwaitsTheFirst, "engine reads .* loads"),
    ],
)
def test_each_layer_is_copied_after_it_is_computed_and_computed_after_it_is_loaded(
    engine_class, noticed
):
    with pytest.raises(AssertionError, match=noticed):
        run(stored_and_loaded, engine_class=engine_class, is_layered=True)


def test_accesses_without_order_are_found():
    device = RecordingDevice()
    blocks = device.host_rows(4, 64)
    stream = device.create_stream()
    with device.recording():
        blocks[1].fill_(7)
        with device.using(stream), pytest.raises(RaceError, match="loads reads what engine uses"):
            blocks[1].clone()
        stream.wait_event(device.current_stream().record_event())
        with device.using(stream):
            assert torch.equal(blocks[1], torch.full((64,), 7, dtype=torch.uint8))
