"""What is pure of disaggregated serving: states of pools, conditions, bodies."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.errors import ConfigError
from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.config import load_forward
from router.forward.metrics import ForwardMetrics
from router.forward.prefill.conditions import DisaggregationRule, rule_of
from router.forward.prefill.handoff import (
    KvHandoff,
    decode_fields,
    is_handed_over,
    is_to_bypass,
    prefill_body,
    prefill_request,
    pushes,
    read_prefilled,
)
from router.forward.prefill.peer_events import MOST_WAITING, PrefillEvents
from router.forward.prefill.pools import LOOK_AGAIN_S, MAX_MODELS, PrefillPools
from router.forward.request_body import read_completion_request
from router.forward.resilience.circuit_breaker import BreakerLimits, CircuitBreaker
from router.protocol.prefills import PrefillEvent, encode_prefill_event
from router.protocol.replies import (
    BlockSource,
    Decision,
    OverlapTokens,
    RemoteKvSource,
    Trust,
    TrustState,
    WorkerLoad,
)
from router.protocol.requests import RankTarget, SelectRequest
from router.runtime.security.nats_access import OPEN_ACCESS

DECISION = Decision(
    model_name="m",
    routing_group="g",
    worker_id=7,
    dp_rank=0,
    endpoint="http://e",
    block_size=16,
    isl_tokens=4096,
    overlap=OverlapTokens(0, 0, 0, 0, 0, {}),
    overlap_blocks=0,
    predicted_cached_blocks=0,
    effective_prefill_tokens=4096,
    potential_decode_blocks=256,
    policy="predictive",
    trust=Trust(TrustState.EXACT, 1, 0.0),
)


def asked(path=COMPLETIONS, **fields):
    prompt = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    return read_completion_request(path, json.dumps({"model": "m", **prompt, **fields}).encode())


# ── States of a pool ─────────────────────────────────────────────────────────────────────────────


def test_pool_is_pending_before_and_unavailable_after_its_workers():
    pools = PrefillPools()
    assert pools.state("m") == "pending"
    assert pools.is_worth_trying("m", 0.0)
    pools.missed("m", 0.0)
    assert pools.state("m") == "pending"
    assert not pools.is_worth_trying("m", LOOK_AGAIN_S - 0.01)
    assert pools.is_worth_trying("m", LOOK_AGAIN_S)
    assert not pools.is_worth_trying("m", LOOK_AGAIN_S)  # another request looks already
    pools.found("m")
    assert pools.state("m") == "active"
    assert pools.is_worth_trying("m", LOOK_AGAIN_S)
    pools.missed("m", 5.0)
    assert pools.state("m") == "unavailable"
    assert not pools.is_worth_trying("m", 5.5)
    assert pools.is_worth_trying("m", 5.0 + LOOK_AGAIN_S)
    pools.found("m")
    assert pools.counts() == {"pending": 0, "active": 1, "unavailable": 0}


def test_models_that_clients_make_up_are_forgotten():
    pools = PrefillPools()
    for number in range(MAX_MODELS + 5):
        pools.missed(f"m{number}", 0.0)
    assert sum(pools.counts().values()) == MAX_MODELS


# ── Conditions ───────────────────────────────────────────────────────────────────────────────────


def decision(isl_tokens, overlap_blocks, active_blocks=0):
    load = WorkerLoad(0, 0, 100, active_blocks)
    return structs.replace(
        DECISION, isl_tokens=isl_tokens, overlap_blocks=overlap_blocks, worker_load=load
    )


@pytest.mark.parametrize(
    ("isl_tokens", "overlap_blocks", "is_bypassed"),
    [
        (2047, 38, False),  # 1439 left, 0.7029… of it
        (2047, 39, True),
        (2047, 0, False),  # few, and all of it
        (4096, 128, False),  # 2048 left
        (4096, 129, True),
        (10_000, 560, True),  # 1040 left
        (160, 3, False),  # 112 of 160: 0.7
        (160, 4, True),
        (0, 0, True),
    ],
)
def test_little_is_left_below_both_thresholds(isl_tokens, overlap_blocks, is_bypassed):
    bounded = DisaggregationRule("isl_bounding")
    assert bounded.bypasses(decision(isl_tokens, overlap_blocks), None) == is_bypassed


BUSY, FREE, UNKNOWN = WorkerLoad(4097, 2048, 0), WorkerLoad(4096, 2048, 0), WorkerLoad(9999, 0, 0)


@pytest.mark.parametrize(
    ("load", "is_busy"), [(BUSY, True), (FREE, False), (UNKNOWN, False), (None, False)]
)
def test_prefill_worker_is_busy_above_its_threshold(load, is_busy):
    far, near = decision(8192, 0), decision(8192, 500)
    by_load = DisaggregationRule("prefill_load", prefill_busy_threshold=2.0)
    assert (by_load.bypasses(far, load), by_load.bypasses(near, load)) == (is_busy, is_busy)
    either = DisaggregationRule("isl_or_load", prefill_busy_threshold=2.0)
    assert (either.bypasses(far, load), either.bypasses(near, load)) == (is_busy, True)
    assert not DisaggregationRule("prefill_load").bypasses(far, load)


@given(st.integers(0, 100), st.integers(0, 9999), st.integers(0, 600))
def test_decode_worker_load_does_not_count_as_prefill_load(active_blocks, tokens, overlap_blocks):
    here = decision(9600, overlap_blocks, active_blocks)
    load = WorkerLoad(tokens, 2048, 0)
    free = DisaggregationRule("isl_or_load", prefill_busy_threshold=2.0)
    veto = structs.replace(free, decode_busy_threshold=0.5)
    assert veto.bypasses(here, load) == (free.bypasses(here, load) and active_blocks <= 50)


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────


def test_prefill_request_asks_for_one_token():
    body = asked(
        max_tokens=900, min_tokens=5, stream=True, stream_options={"include_usage": True}, n=3,
        best_of=3, temperature=0.5, nvext={"annotations": ["a"]},
    )  # fmt: skip
    said = json.loads(prefill_body(body))
    params = said.pop("kv_transfer_params")
    assert said == {
        "model": "m", "prompt": "a", "max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1,
        "temperature": 0.5,
    }  # fmt: skip
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_block_ids"] is None
    chat = json.loads(prefill_body(asked(CHAT, max_completion_tokens=9)))
    assert (chat["max_tokens"], chat["max_completion_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in json.loads(prefill_body(asked(CHAT)))
    kept = json.loads(prefill_body(asked(kv_transfer_params={"priority": 9})))
    assert kept["kv_transfer_params"]["priority"] == 9


def test_target_of_a_push_replaces_one_of_the_client():
    body = asked(kv_transfer_params={"target": {"worker_id": 9}})
    said = json.loads(prefill_body(body, RankTarget(7, 1)))["kv_transfer_params"]
    assert said["target"] == {"worker_id": 7, "dp_rank": 1}


@pytest.mark.parametrize(
    ("params", "is_pushing"), [({"pushed": 0}, True), ({"pushed": "x"}, False), ({}, False)]
)
def test_pools_know_whether_their_engines_push(params, is_pushing):
    pools = PrefillPools()
    assert not pools.pushes("m")
    pools.note_pushes("m", pushes=pushes(params))
    assert pools.pushes("m") == is_pushing


def test_prefill_response_is_forwarded_unchanged():
    nixl = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5}
    said = read_prefilled(json.dumps({"kv_transfer_params": nixl, "choices": []}).encode())
    hand_over = KvHandoff(SelectRequest(), said.kv_transfer_params, DECISION)
    assert decode_fields(asked(), hand_over, DECISION) == {"kv_transfer_params": nixl}
    own = asked(kv_transfer_params={"priority": 9})
    sent = decode_fields(own, hand_over, DECISION)["kv_transfer_params"]
    assert sent == {"priority": 9, **nixl}
    for body in (b"", b"[]", b'{"kv_transfer_params": 3}', b'{"usage": null}'):
        assert read_prefilled(body).kv_transfer_params is None


def test_without_a_hand_over_the_router_names_a_source():
    source = BlockSource(4, 0, 7, "device")
    near = structs.replace(DECISION, source=source)
    assert decode_fields(asked(), None, DECISION) == {}
    assert decode_fields(asked(), None, near) == {"kv_transfer_params": {"source": source}}
    whole = KvHandoff(SelectRequest())
    assert decode_fields(asked(), whole, near) == {"kv_transfer_params": {"source": source}}
    exact = KvHandoff(SelectRequest(), {"source": {"blocks": 9}})
    sent = decode_fields(asked(), exact, near)
    assert sent == {"kv_transfer_params": {"source": {"blocks": 9}}}


def test_vllms_own_tier_is_told_its_source_in_its_words():
    source = BlockSource(4, 0, 7, "device", RemoteKvSource("10.0.0.4", 5711))
    near = structs.replace(DECISION, source=source)
    sent = [decode_fields(asked(kv_transfer_params={"x": 9}), None, near) for _ in range(2)]
    ids = [each["kv_transfer_params"]["remote_kv_source"].pop("kv_request_id") for each in sent]
    remote = {"remote_host": "10.0.0.4", "remote_port": 5711}
    assert sent == [{"kv_transfer_params": {"x": 9, "remote_kv_source": remote}}] * 2
    assert ids[0] != ids[1]


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_several_requests_of_vllm_are_told_no_source_for_one(fields):
    source = BlockSource(4, 0, 7, "device", RemoteKvSource("10.0.0.4", 5711))
    near = structs.replace(DECISION, source=source)
    assert decode_fields(asked(**fields), None, near) == {}


def test_prompt_computed_elsewhere_needs_no_source_of_vllms_own_tier():
    source = BlockSource(4, 0, 7, "device", RemoteKvSource("10.0.0.4", 5711))
    nixl = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
    hand_over = KvHandoff(SelectRequest(), nixl, DECISION)
    near = structs.replace(DECISION, source=source)
    assert decode_fields(asked(), hand_over, near) == {"kv_transfer_params": nixl}


@pytest.mark.parametrize(
    ("params", "is_theirs"),
    [
        ({"do_remote_prefill": True}, True),
        ({"do_remote_decode": True}, True),
        ({"source": {"worker_id": 1}}, True),
        ({"remote_kv_source": {"kv_request_id": "a"}}, True),
        ({"remote_prefiller": {"kv_request_id": "a"}}, True),
        ({"remote_decoder": {"kv_request_id": "a"}}, True),
        ({"do_remote_decode": False, "priority": 3}, False),
        (None, False),
        (["what"], False),
    ],
)
def test_clients_may_look_after_the_hand_over_themselves(params, is_theirs):
    body = asked(kv_transfer_params=params)
    assert is_handed_over(body) == is_theirs
    near = structs.replace(DECISION, source=BlockSource(4, 0, 7, "device"))
    assert (decode_fields(body, None, near) == {}) == is_theirs


def test_clients_may_want_no_other_worker_for_their_prompt():
    assert is_to_bypass(asked(nvext={"annotations": ["x-bypass-remote-prefill:"]}))
    assert not is_to_bypass(asked(nvext={"annotations": ["x-bypass"]}))


def test_prefill_request_carries_no_session_and_no_pin():
    request = SelectRequest(
        token_ids=[1], session_id="s", pinned_worker=RankTarget(1), expected_output_tokens=90,
        tenant="t", prefill_worker_id=4,
    )  # fmt: skip
    sent = prefill_request(request)
    assert sent == SelectRequest(
        token_ids=[1], tenant="t", phase="prefill", expected_output_tokens=1
    )


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--conditional-disagg", "isl_bounding", "--disaggregation", "off"], "conditional_disagg"),
        (["--conditional-disagg", "prefill_load"], "conditional_prefill_busy_threshold"),
        (["--conditional-disagg", "isl_or_load"], "conditional_prefill_busy_threshold"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments, key):
    with pytest.raises(ConfigError) as caught:
        load_forward(arguments, {})
    assert caught.value.key == key


def test_disaggregation_conditions_follow_settings():
    assert rule_of(load_forward([], {}).config.prefill) is None
    given = ["--conditional-disagg", "isl_or_load", "--conditional-prefill-busy-threshold", "2"]
    config = load_forward([*given, "--conditional-decode-busy-threshold", "0.5"], {}).config.prefill
    assert rule_of(config) == DisaggregationRule("isl_or_load", 2048, 0.7, 2.0, 0.5)


# ── News of others ───────────────────────────────────────────────────────────────────────────────


def event(news, **fields):
    said = {"forwarder_id": 1, "outcome": "computed", "model_name": "m", "worker_id": 7,
            "endpoint": "http://e", "isl_tokens": 9, "seconds": 0.1, **fields}  # fmt: skip
    news.take(encode_prefill_event(PrefillEvent(**said)))


async def test_only_readable_prefill_events_of_others_count():
    pools, breaker = PrefillPools(), CircuitBreaker(BreakerLimits(failures=1, most_ejected=1.0))
    metrics = ForwardMetrics()
    news = PrefillEvents("nats://nowhere", "test", OPEN_ACCESS, pools, breaker, metrics)
    event(news, forwarder_id=news.forwarder_id)
    news.take(b"what")
    event(news, seconds=-1.0)
    assert (pools.state("m"), breaker.ejected()) == ("pending", [])
    event(news)
    assert (pools.state("m"), breaker.ejected()) == ("active", [])
    event(news, outcome="failed")
    assert breaker.ejected() == [7]


async def test_prefill_events_beyond_the_queue_are_dropped_and_counted():
    metrics = ForwardMetrics()
    news = PrefillEvents(
        "nats://nowhere", "test", OPEN_ACCESS, PrefillPools(), CircuitBreaker(BreakerLimits()),
        metrics,
    )  # fmt: skip
    sample = PrefillEvent(
        forwarder_id=1, outcome="failed", model_name="m", worker_id=1, endpoint="http://e",
        isl_tokens=1, seconds=0.0,
    )  # fmt: skip
    for _ in range(MOST_WAITING + 3):
        news.publish(sample)
    name = "kv_router_forward_prefill_news_total"
    assert metrics.registry.get_sample_value(name, {"outcome": "dropped"}) == 3
