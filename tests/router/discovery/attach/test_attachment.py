"""What is made of an engine's own words: sockets, registration, sentence."""

import pytest

from router.discovery.attach.attachment import attachment
from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.engine_url import parsed_url
from router.discovery.attach.event_sockets import RankSockets, sglang_sockets, vllm_sockets
from router.discovery.attach.socket_choice import socket_choices
from router.errors import InvalidFieldError
from router.publisher.engine_metrics.dialects import EngineLimits

URL = "http://a:8000"
TWO_RANKS = {
    "1": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:21111",
        "replay_endpoint": "tcp://*:21211",
        "buffer_steps": 10000,
        "topic": "",
    },
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:21110",
        "replay_endpoint": "tcp://*:21210",
        "buffer_steps": 10000,
        "topic": "",
    },
}


def seen(**fields):
    known = {
        "models": {"tiny": None},
        "owner": "vllm",
        "version": "0.32.0",
        "engine": "vllm",
        "facts": EngineLimits("tiny", 32, 200),
        "rank_count": 2,
        "has_prefix_caching": True,
        "sockets": vllm_sockets(TWO_RANKS),
    }
    return ObservedServer(URL, **{**known, **fields})


def made(url=URL, *, follows_others=False, **fields):
    engine, found = parsed_url(url, "workers"), seen(**fields)
    choice = socket_choices(engine, found, follows_others=follows_others, may_guess=False)[0]
    return attachment(engine, found, choice, was_up=False)


def test_wildcard_sockets_are_reached_at_the_url_host():
    found = made()
    assert found.is_up
    registration = found.registration
    assert registration.kv_events_endpoints == {0: "tcp://a:21110", 1: "tcp://a:21111"}
    assert registration.replay_endpoints == {0: "tcp://a:21210", 1: "tcp://a:21211"}
    assert (registration.block_size, registration.total_kv_blocks) == (32, 200)
    assert (registration.model_name, registration.data_parallel_size) == ("tiny", 2)
    assert found.sentence == (
        "http://a:8000  vLLM 0.32.0, tiny, 2 ranks of 200 blocks of 32 tokens; events with replay"
    )


def sockets_at(address):
    return {0: RankSockets(address, address.replace("1", "2"))}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://10.0.0.5:41000", "not at a"),
        ("ipc:///run/kv", "on its own machine"),
        ("tcp://*", "not at a"),
        ("tcp://*:99999999", "not at a"),
    ],
)
def test_socket_elsewhere_is_not_followed(address, reason):
    found = made(sockets=sockets_at(address))
    assert found.registration.kv_events_endpoints is None
    assert reason in found.sentence
    assert "estimated from bookings" in found.sentence


def test_socket_on_another_host_is_followed_if_allowed():
    found = made(sockets=sockets_at("tcp://10.0.0.5:41000"), follows_others=True)
    assert found.registration.kv_events_endpoints == {0: "tcp://10.0.0.5:41000"}


def test_loopback_sockets_of_a_loopback_url_are_followed():
    found = made("http://localhost:8000", sockets=sockets_at("tcp://127.0.0.1:41000"))
    assert found.registration.kv_events_endpoints == {0: "tcp://127.0.0.1:41000"}


@pytest.mark.parametrize(
    ("fields", "clause"),
    [
        ({"sockets": {}}, "no KV events: restart it with --kv-events-config"),
        ({"sockets": None, "version": "0.24.0"}, "vLLM does from 0.31"),
        ({"sockets": None, "engine": "trtllm"}, ";events=tcp://a:5557"),
        ({"has_prefix_caching": False}, "prefix caching is off"),
        ({"sockets": {0: RankSockets("tcp://*:5557")}}, "no replay"),
        ({"facts": EngineLimits("tiny")}, "do not name its block size"),
        ({"problem": "refused"}, "does not answer: refused; retrying each second"),
        ({"problem": "nothing listens there"}, "not up yet: nothing listens there"),
        (
            {"problem": "status 401", "status": 401},
            "401: needs a key for /v1 (worker_token_file, for engines",
        ),
        (
            {"problem": "status 401", "status": 401, "engine": "sglang"},
            "needs a key for everything but /health and /metrics",
        ),
        ({"needs_key": True}, "events and metrics are open and followed"),
        ({"version": "0.40.1"}, "degraded: vLLM 0.40 has not been tested (0.9 to 0.33 have)"),
        ({"version": "0.8.5"}, "vLLM 0.8 has not been tested"),
        ({"generates": False, "sockets": {}}, "embeddings and scores of 'tiny': passed on by load"),
        ({"problem": "status 404", "status": 404}, "is no engine"),
        ({"problem": "status 307", "status": 307}, "not followed (307)"),
    ],
)
def test_sentence_names_the_problem(fields, clause):
    assert clause in made(**fields).sentence


@pytest.mark.parametrize("version", [None, "0.32.0", "0.33.1.dev3+gabc", "0.9.2", "dev", "v0.31.0"])
def test_tested_or_unknown_version_is_no_caution(version):
    assert made(version=version).caution is None


def test_drafts_are_a_reason_to_trust_less_until_their_groups_are_named():
    assert "drop a block of each hit" in made(drafts_tokens=True).sentence
    named = made(f"{URL};eagle_groups=1+3", drafts_tokens=True)
    assert (named.caution, named.registration.hybrid.eagle_groups) == (None, (1, 3))
    of_words = made(f"{URL};eagle_groups=none", drafts_tokens=True)
    assert (of_words.caution, of_words.registration.hybrid.eagle_groups) == (None, ())


def test_drafts_are_no_caution_without_events():
    assert made(drafts_tokens=True, sockets={}).caution is None


@pytest.mark.parametrize("groups", ["some", "-1", "70000", "1,2", "1+"])
def test_groups_that_are_no_numbers_are_refused(groups):
    with pytest.raises(InvalidFieldError, match="eagle_groups"):
        parsed_url(f"{URL};eagle_groups={groups}", "workers")


def test_side_channel_of_vllms_own_tier_is_registered_for_each_rank():
    assert made().registration.block_addresses is None
    found = made(f"{URL};p2p=10.0.0.5:5710")
    assert found.registration.block_addresses == {
        0: ["vllm-p2p://10.0.0.5:5710"],
        1: ["vllm-p2p://10.0.0.5:5711"],
    }
    last = made(f"{URL};p2p=10.0.0.5:65535")
    assert last.registration.block_addresses == {0: ["vllm-p2p://10.0.0.5:65535"]}


@pytest.mark.parametrize("place", ["10.0.0.5", ":5710", "a:x", "a:0", "tcp://a:5710"])
def test_place_that_is_no_side_channel_is_refused(place):
    with pytest.raises(InvalidFieldError, match="P2P"):
        parsed_url(f"{URL};p2p={place}", "workers")


def test_untested_version_is_no_caution_without_events():
    assert made(version="0.40.0", sockets={}).caution is None


def test_given_socket_is_offset_by_the_rank():
    found = made("http://a:8000;events=tcp://b:5557;replay=tcp://b:5657", sockets=None)
    assert found.registration.kv_events_endpoints == {0: "tcp://b:5557", 1: "tcp://b:5558"}
    assert found.registration.replay_endpoints == {0: "tcp://b:5657", 1: "tcp://b:5658"}


def test_adapters_and_aliases_are_not_models_of_their_own():
    models = {"tiny": None, "small": None, "sql": "tiny"}
    found = made(models=models, aliases=("small",))
    assert found.registration.model_name == "tiny"
    assert found.registration.lora_names == ["sql"]
    assert found.registration.model_aliases == ["small"]
    assert found.registration.labels.model_aliases == ["small"]
    assert "also named small, adapters sql" in found.sentence


def test_sglang_ports_are_offset_by_the_rank():
    said = {"publisher": "zmq", "endpoint_port_base": 5557, "dp_size": 2, "topic": "t"}
    said |= {"replay_endpoint_port_base": 6557, "load_endpoint_port_base": 7557}
    assert sglang_sockets(said) == {
        0: RankSockets("tcp://*:5557", "tcp://*:6557", "t", "tcp://*:7557"),
        1: RankSockets("tcp://*:5558", "tcp://*:6558", "t", "tcp://*:7558"),
    }
    assert sglang_sockets(None) == {}


@pytest.mark.parametrize("answer", [{"x": {}}, {"0": {"endpoint": 3}}, {"0": None}])
def test_malformed_sources_are_unknown(answer):
    assert vllm_sockets(answer) is None


def test_url_is_normalised_and_its_id_follows():
    one, other = parsed_url(" http://a:8000/v1/ ", "workers"), parsed_url(URL, "workers")
    assert one == other
    assert one.worker_id == other.worker_id
    assert parsed_url(f"{URL};events=tcp://b:1", "workers").text == f"{URL};events=tcp://b:1"


@pytest.mark.parametrize(
    "text",
    [
        "a:8000",
        "ftp://a",
        "http://",
        "http://a/path",
        "http://a?x=1",
        "http://a:99999",
        "http://a;event=tcp://b:1",
        "http://a;events=",
        "http://a;events=*",
        "http://" + "a" * 1000,
    ],
)
def test_invalid_url_is_refused(text):
    with pytest.raises(InvalidFieldError) as caught:
        parsed_url(text, "workers")
    assert caught.value.field == "workers"


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(InvalidFieldError) as caught:
        parsed_url("http://user:secret@a:8000", "workers")
    assert "secret" not in str(caught.value)
    assert "worker_token_file" in str(caught.value)


def test_engine_without_prefix_caching_is_not_estimated():
    found = made(has_prefix_caching=False)
    assert found.registration.caches_prefixes is False
    assert "estimated" not in found.sentence
    assert made().registration.caches_prefixes is None
