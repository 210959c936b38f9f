"""A recording, applied to another core, leads to the same decisions and the same state."""

import math
from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.core.commands import (
    AnyCommand,
    Apply,
    ApplyLoad,
    Decision,
    Search,
    Select,
    Submit,
    UpsertWorker,
)
from router.errors import KvRouterError
from router.protocol.events import EventBatch, Stored, pack_batch
from router.protocol.loads import LoadCounters
from router.protocol.requests import SelectRequest
from router.protocol.values import HeldState, Rank, Scope, Tier, pack_hashes
from router.publisher.journal.journal import EventJournal
from router.recording.entries import Entry, RecordedResult
from router.recording.format import Hole, RecordingError
from router.sequence.active.prompt import prepare
from router.sequence.hashing._digest import digest
from router.tools.recordings.cores import replayed_core
from support.chaos.fuzzing import examples
from support.fleets.recordings import PROMPTS, RandomLife, Recorded, replayed, state
from support.values.builders import announcement, report

POLICY_FILE = """
default_policy_family = "all"
uncached_isl_buckets = [{min_tokens = 0, bucket = "short"}, {min_tokens = 40, bucket = "long"}]
policy_classes = [
  {name = "short", policy_family = "all", cache_bucket = "short", prefill_busy_threshold = 50},
  {name = "long", policy_family = "all", cache_bucket = "long", prefill_busy_threshold = 0},
  {name = "fast", quantum = 100, prefill_busy_threshold = 90, queue_policy = "wspt"},
]
"""

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "policy": st.sampled_from(["dynamo-1.6", "round-robin", "power-of-two", "cache-aware"]),
        "group_policies": st.sampled_from(["", "default=random", "other=lmetric"]),
        "router_temperature": st.sampled_from([0.0, 0.4]),
        "overlap_score_weight": st.sampled_from([0.0, 1.0, 2.5]),
        "use_kv_events": st.booleans(),
        "predicted_ttl_s": st.sampled_from([0.0, 5.0]),
        "approximate_max_blocks": st.just(1024),
        "reservation_ttl_s": st.sampled_from([0.5, 300.0]),
        "max_reservations": st.sampled_from([3, 1000]),
        "index_max_blocks": st.sampled_from([1024, 2048]),
        "router_track_active_blocks": st.booleans(),
        "router_track_prefill_tokens": st.booleans(),
        "router_assume_kv_reuse": st.booleans(),
        "router_track_output_blocks": st.booleans(),
        "active_prefill_tokens_threshold": st.sampled_from([None, 40]),
        "session_affinity_mode": st.sampled_from(["hard", "soft"]),
        "lora_affinity_weight": st.sampled_from([0.0, 1.0]),
        "router_queue_threshold": st.sampled_from([None, 0.0, 0.01]),
        "router_queue_policy": st.sampled_from(["fcfs", "wspt"]),
        "router_policy_config": st.sampled_from(["", POLICY_FILE]),
        "max_waiting_requests": st.sampled_from([2, 100]),
    },
)


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32), SETTINGS)
def test_every_decision_is_the_same_and_so_is_the_state_in_the_end(seed, configured):
    life = RandomLife(seed, **configured).live(120)
    replay, compared = replayed(life.recording)
    assert [each for each in compared if not each.is_equal] == []
    assert state(replay.core) == state(life.core)


@pytest.fixture(scope="module")
def lives():
    drawn = (
        {"router_temperature": 0.4, "router_queue_threshold": 0.0},
        {"index_max_blocks": 1024},
        {"predicted_ttl_s": 5.0},
    )
    return [RandomLife(seed, **drawn[seed % 3]).live(150) for seed in range(24)]


@pytest.mark.parametrize(
    "kind", sorted(set(get_args(AnyCommand)) - {Search} - set(get_args(Decision)), key=str)
)
def test_every_recorded_command_is_needed_for_an_equal_replay(lives, kind):
    """A core without the entry decides otherwise, or differs in the end."""
    for life in lives:
        part = Recorded()
        part.header = life.header
        part.entries = [each for each in life.entries if type(each.command) is not kind]
        replay, _ = replayed(part.recording)
        if state(replay.core) != state(life.core):
            return
    pytest.fail(f"{kind} makes no difference")


def test_another_way_of_spreading_keys_decides_otherwise_once_the_index_is_full():
    for seed in range(20):
        life = RandomLife(seed, index_max_blocks=1024).live(200)
        life.header = structs.replace(life.header, multiplier=0x9E3779B97F4A7C15)
        if not all(each.is_equal for each in replayed(life.recording)[1]):
            return
    pytest.fail("the multiplier makes no difference")


def test_searches_without_a_decision_are_recorded():
    """A rank says it has no holes. Galloping believes it; a thousand searches later one walks."""
    recorded, prompt = Recorded(), prepare(SelectRequest(token_ids=PROMPTS[3]), ())
    liar = announcement(1, agent_is_engine=False)
    hashes = prompt.hashed(liar.identity).sequence_hashes
    recorded.core.handle(UpsertWorker(liar), 0.0)
    for message in EventJournal(Rank(1, 0), 1, liar.identity).take():
        recorded.core.handle(Apply(message), 0.0)
    held = hashes[[0, 1, -1]]
    said = HeldState(counts=(3, 0, 0, 0), digests=(digest(held), 0, 0, 0))
    packed = pack_batch(said, [Stored(Tier.DEVICE, pack_hashes(held))])
    recorded.core.handle(Apply(EventBatch(1, 0, 1, liar.identity, 1, 1, packed)), 0.0)
    request = SelectRequest(token_ids=PROMPTS[3])
    before = recorded.core.handle(Select(request, prompt), 0.0)[0].choice.chosen.overlap_blocks
    for _ in range(1000):
        recorded.core.match(Scope(), prompt.hashed(liar.identity))
    after = recorded.core.handle(Select(request, prompt), 0.0)[0].choice.chosen.overlap_blocks
    assert before > after == 2
    assert all(each.is_equal for each in replayed(recorded.recording)[1])
    recorded.entries = [each for each in recorded.entries if type(each.command) is not Search]
    assert [each.is_equal for each in replayed(recorded.recording)[1]] == [True, False]


def test_a_step_of_a_decision_is_not_recorded_beside_it():
    life = RandomLife(3).live(60)
    life.entries.clear()
    for _ in range(20):
        with suppress(KvRouterError):
            life.place()
    assert [type(each) for each in life.entries if isinstance(each.command, Submit)]
    assert len(life.entries) == 20


def test_a_hole_is_found():
    life = RandomLife(2).live(40)
    life.entries.insert(10, Hole(missing=7))
    replay, _ = replayed(life.recording)
    assert (replay.hole_line, replay.missing) == (12, 7)


def test_impossible_command_is_damage():
    recorded = Recorded()
    asked = Select(SelectRequest(token_ids=None))
    recorded.entries.append(Entry(asked, 0.0, RecordedResult(refused="x")))
    with pytest.raises(RecordingError, match=r"line 2") as caught:
        replayed(recorded.recording)
    assert caught.value.problem == "damaged"


@pytest.mark.parametrize("number", [math.inf, math.nan, 1e308])
def test_non_finite_numbers_are_approximated(number):
    recorded = Recorded()
    counters = LoadCounters(busy_s=number, prefill_tokens=2**63 - 1, prefill_token_contexts=number)
    recorded.core.handle(UpsertWorker(announcement(1)), 0.0)
    recorded.core.handle(ApplyLoad(report(1, waiting_s=number, counters=counters)), 0.0)
    replay, _ = replayed(recorded.recording)
    assert replay.core.fleet.get(1).was_seen


def test_settings_out_of_range_are_damage():
    header = structs.replace(Recorded().header, settings={"router_temperature": -1})
    with pytest.raises(RecordingError, match=r"line 1: settings.*router_temperature"):
        replayed_core(header, {})
