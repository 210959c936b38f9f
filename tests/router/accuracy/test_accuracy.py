"""Things wired wrongly, one at a time, behind a real core; and none, under all kinds of loads."""

import pytest

from router.accuracy.accuracy import MAX_LATER, AccuracyMonitor, Group
from router.accuracy.observation import Observation, Shown
from router.accuracy.sequential_test import Symptom
from router.core.commands import Free
from router.protocol.values import Scope
from support.fleets.closed_loops import Conversations, Fleet, Wiring

ALL = Group("default", "default")


def other_tokenizer(tokens):
    return [part for token in tokens for part in ([token + 1, 7] if token % 7 == 0 else [token])]


def other_template(tokens):
    """A few more tokens for each turn."""
    return [5, 6, 7, *tokens[:160], 8, *([9, 10, 11, 12] * (len(tokens) // 150)), *tokens[160:]]


def of_one(tenant):
    return tenant if tenant == "a" else None


MISWIRED = {
    "engine's blocks are larger": ("block_size", Wiring(engine_block_size=64)),
    "engine's blocks are smaller": ("block_size", Wiring(block_size=64, engine_block_size=16)),
    "the router is not told a salt": ("salt", Wiring(engine_salt=lambda tenant: tenant)),
    "the engine is not told a salt": ("salt", Wiring(router_salt=lambda tenant: tenant)),
    "callers hash by another seed": ("hash_seed", Wiring(caller_seed=0)),
    "a token at the beginning": ("chat_template", Wiring(engine_tokens=lambda each: [1, *each])),
    "tokens at the end": ("chat_template", Wiring(engine_tokens=lambda each: [*each, 7, 8])),
    "tokens at each turn": ("chat_template", Wiring(engine_tokens=other_template)),
    "another tokenizer": ("tokenizer", Wiring(engine_tokens=other_tokenizer)),
    "a tier that nobody tells of": (
        "offload",
        Wiring(device_blocks=30, host_blocks=3_000, publishes_host=False),
    ),
    "no events": ("events", Wiring(publishes_events=False)),
}


@pytest.mark.parametrize("name", MISWIRED)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_miswired_engine_is_named_within_50_requests(name, seed):
    cause, wiring = MISWIRED[name]
    fleet = Fleet(wiring, seed=seed)
    Conversations(fleet)
    fleet.run_until(50)
    requests, found = fleet.detected[ALL]
    assert requests <= 50
    assert found.causes[0].name == cause
    assert fleet.core.closed_loop.findings()[0].causes[0].name == cause
    assert found.causes[0].because


@pytest.mark.parametrize("wiring", [Wiring(router_salt=of_one), Wiring(engine_salt=of_one)])
def test_a_salt_of_one_tenant_is_found_with_the_tenant(wiring):
    fleet = Fleet(wiring)
    Conversations(fleet)
    fleet.run_until(100)
    theirs = Group("default", "default", tenant="a")
    _, found = fleet.detected[theirs]
    assert (found.causes[0].name, found.symptoms) == ("salt", [Symptom.UNSHOWN])
    assert Group("default", "default", tenant="b") not in fleet.detected


def test_one_worker_of_another_block_size_is_found_alone():
    fleet = Fleet(Wiring(), workers=4)
    fleet.engines[2].wiring = Wiring(engine_block_size=64)
    fleet.engines[2].start()
    Conversations(fleet, at_once=24)
    fleet.run_until(400)
    wrong = Group("default", "default", worker_id=2)
    counts = dict(fleet.core.closed_loop.counts())
    assert fleet.detected[wrong][1].causes[0].name == "block_size"
    assert counts[wrong].requests > 0
    assert all(group.worker_id in (2, None) for group in fleet.detected)


def test_finding_is_withdrawn_after_the_fix():
    fleet = Fleet(Wiring(router_salt=lambda tenant: tenant))
    Conversations(fleet)
    fleet.run_until(100)
    assert fleet.core.closed_loop.findings()
    fleet.wiring.router_salt = lambda _: None
    fleet.run_until(300)
    assert fleet.core.closed_loop.findings() == []


def restarts(fleet, again=0):
    fleet.agenda.after(5, restarts, fleet, again + 1)
    fleet.engines[again % len(fleet.engines)].start()


def cancels(fleet):
    """Every fifth request is given up as it begins to be answered, and asked again."""
    first_token = fleet.first_token

    def first(work):
        if fleet.rng.random() < 0.2:
            fleet.tell(Free, work, False)
            fleet.agenda.after(0.05, fleet.ask, work.tokens, "a", 4)
        first_token(work)

    fleet.first_token = first


ONE_TOKEN = {"osl": (1, 1), "at_once": 32, "pause_s": 0.05}

CLEAN = {
    "plain": ({}, {}, {}, None),
    "usage with the first token": ({}, {"publishes_early": True}, {}, None),
    "salted": ({"router_salt": lambda t: t, "engine_salt": lambda t: t}, {}, {}, None),
    "slow events": ({}, {"event_lag_s": 0.2}, {}, None),
    "events slower than requests": ({}, {"event_lag_s": 0.3}, ONE_TOKEN, None),
    "very slow events": ({}, {"event_lag_s": 0.7, "publishes_early": True}, ONE_TOKEN, None),
    "many of one tenant": ({}, {"workers": 6}, {"tenants": ("a",), "at_once": 64}, None),
    "evictions": ({"device_blocks": 40}, {}, {"at_once": 24, "pause_s": 0.1}, None),
    "evictions while waiting": ({"device_blocks": 150}, {}, {"at_once": 48}, None),
    "offload": ({"device_blocks": 40, "host_blocks": 400}, {}, {"at_once": 24}, None),
    "little offload": ({"device_blocks": 40, "host_blocks": 60}, {}, {"at_once": 48}, None),
    "restarts": ({}, {}, {}, restarts),
    "cancelled": ({}, {"event_lag_s": 0.1}, {}, cancels),
    "engines do not say": ({"says_cached": False}, {}, {}, None),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_traffic_has_no_findings(name):
    """400 requests of each kind; the one below is of 5,000."""
    wiring, fleet_fields, talk, befalls = CLEAN[name]
    fleet = Fleet(Wiring(**wiring), **fleet_fields)
    Conversations(fleet, **talk)
    if befalls is not None:
        befalls(fleet)
    fleet.run_until(400)
    assert fleet.detected == {}


@pytest.mark.parametrize("requests", [700, pytest.param(2_000, marks=pytest.mark.long)])
def test_clean_requests_have_no_cause(requests):
    fleet = Fleet(Wiring(device_blocks=400, host_blocks=800), workers=3, event_lag_s=0.05)
    Conversations(fleet, at_once=40, pause_s=0.1)
    restarts(fleet)
    cancels(fleet)
    fleet.run_until(requests)
    assert fleet.detected == {}
    counts = dict(fleet.core.closed_loop.counts())[ALL]
    assert counts.requests == requests
    assert counts.cached_tokens > 0.3 * counts.prompt_tokens


def observation(**fields):
    values = {
        "worker_id": 1,
        "scope": Scope(),
        "tenant": None,
        "block_size": 16,
        "isl_tokens": 100,
        "device_tokens": 0,
        "predicted_tokens": 0,
        "in_flight_tokens": 0,
        "prompt_tokens": 100,
        "cached_tokens": 0,
    }
    return Observation(**values | fields)


def never():
    raise AssertionError


def noted(times, look=never, **fields):
    loop = AccuracyMonitor()
    for now_s in range(times):
        loop.note(observation(**fields), look, float(now_s))
        loop.settle(now_s + 0.9)
    return loop


def causes(loop):
    return [cause.name for found in loop.findings() for cause in found.causes][:2]


def test_met_prediction_is_no_finding():
    assert noted(100, device_tokens=64, predicted_tokens=64, cached_tokens=64).findings() == []


def test_nothing_reused_of_what_was_predicted():
    loop = noted(12, device_tokens=64, predicted_tokens=64)
    assert loop.findings()[0].symptoms == [Symptom.UNUSED]
    assert causes(loop) == ["caching", "salt"]


def test_salted_prompts_of_which_nothing_is_reused():
    assert causes(noted(12, predicted_tokens=64, is_salted=True))[0] == "salt"


def test_blocks_still_computed_for_others_are_not_expected():
    fields = {"predicted_tokens": 64, "device_tokens": 64, "in_flight_tokens": 64}
    assert noted(100, **fields).findings() == []


def test_lower_tiers_that_are_not_loaded():
    loop = noted(20, device_tokens=32, predicted_tokens=96, cached_tokens=32)
    assert causes(loop)[0] == "offload"
    loop = noted(100, device_tokens=32, predicted_tokens=96, cached_tokens=64)
    assert loop.findings() == []


HYBRID = {"is_hybrid": True, "device_tokens": 64, "predicted_tokens": 64}


def test_a_hybrid_model_that_resumes_earlier_than_predicted_has_another_layout():
    loop = noted(16, **HYBRID, cached_tokens=48)
    assert loop.findings()[0].symptoms == [Symptom.EARLIER]
    [cause] = loop.findings()[0].causes
    assert (cause.name, cause.because) == (
        "layout",
        "16 of 16 requests were resumed 16 tokens earlier than predicted",
    )
    plain = HYBRID | {"is_hybrid": False}
    assert noted(100, **plain, cached_tokens=32).findings() == []
    assert causes(noted(16, **plain, cached_tokens=48)) == ["layout", "layout"]


def test_evictions_on_a_hybrid_model_are_no_finding():
    loop = AccuracyMonitor()
    for request in range(300):
        cached_tokens = 64 if request % 2 else 32
        loop.note(observation(**HYBRID, cached_tokens=cached_tokens), never, request / 10)
    assert loop.findings() == []


def test_a_hybrid_model_that_reuses_what_only_full_attention_holds_has_another_layout():
    loop = noted(20, lambda: Shown(0, 9, 1e9, full_tokens=64), is_hybrid=True, cached_tokens=64)
    assert loop.findings()[0].symptoms == [Symptom.UNSHOWN]
    assert causes(loop) == ["layout", "layout"]


def test_a_hybrid_model_that_reuses_at_times_does_not_lack_caching():
    loop = noted(10, **HYBRID)
    for request in range(10):
        agreed = observation(**HYBRID, cached_tokens=64)
        loop.note(agreed if request == 5 else observation(**HYBRID), never, 20.0 + request)
    assert causes(loop)[0] == "layout"
    assert causes(noted(12, **HYBRID))[0] == "caching"


def test_images_count_for_more_tokens_than_they_are():
    assert noted(50, prompt_tokens=900, has_objects=True).findings() == []


def test_unknown_overlap_is_no_evidence():
    assert noted(100, lambda: None, cached_tokens=64).findings() == []


def test_an_index_that_is_behind_is_given_time():
    loop = AccuracyMonitor()
    for request in range(20):
        loop.note(
            observation(cached_tokens=64), lambda: Shown(0, 9, fresh_at_s=-0.5), request / 100
        )
    for quarter in range(1, 20):
        loop.settle(quarter / 4)
        assert loop.findings() == []
    loop.settle(5.5)
    assert loop.findings()[0].symptoms == [Symptom.UNSHOWN]


def test_pending_predictions_are_bounded():
    loop = AccuracyMonitor()
    for _ in range(MAX_LATER + 5):
        loop.note(observation(cached_tokens=64), lambda: Shown(0, 9, fresh_at_s=0.0), 0.0)
    assert loop.unjudged == 5


def test_groups_are_bounded_and_the_oldest_leave():
    loop = AccuracyMonitor()
    for tenant in range(3_000):
        loop.note(observation(tenant=f"t{tenant}"), never, 0.0)
    kept = [group for group, _ in loop.counts()]
    assert len(kept) == 4_096
    assert loop.forgotten == 2 + 2 * 3_000 - 4_096
    assert {ALL, Group("default", "default", 1, "t2999")} <= set(kept)
