"""Beside an engine: where its sockets are, and what cannot be meant."""

import msgspec
import pytest

from router.errors import ConfigError
from router.protocol.hybrid import HybridSettings
from router.publisher.batch_order.address import EngineAddress
from router.runtime.process.settings import describe, settings_of
from worker_agent.config.bridge import BridgeConfig, rank_addresses
from worker_agent.config.reference import ReferenceConfig, load_agent_config

FLAGS = (
    "--engine",
    "vllm",
    "--endpoint",
    "http://e:8000",
    "--metrics-url",
    "http://e:8000/metrics",
)


def loaded(*flags, environment=None):
    return load_agent_config([*FLAGS, *flags], environment or {})


def addresses(*flags):
    return [(each.engine, each.load) for each in rank_addresses(loaded(*flags))]


def test_the_engine_decides_what_is_configured(tmp_path):
    assert isinstance(load_agent_config([], {}), ReferenceConfig)
    assert isinstance(loaded(), BridgeConfig)
    said = {"KV_ROUTER_AGENT_ENGINE": "sglang", "KV_ROUTER_AGENT_ENDPOINT": "http://e:1"}
    sizes = ["--block-size", "64", "--total-kv-blocks", "5"]
    assert load_agent_config(sizes, said).agent.engine == "sglang"
    assert load_agent_config(["--engine", "reference"], said).agent.engine == "reference"
    file = tmp_path / "agent.toml"
    file.write_text(
        'engine = "trtllm"\nendpoint = "http://e:1"\nblock_size = 32\ntotal_kv_blocks = 9'
    )
    assert load_agent_config(["--config", str(file)], {}).agent.engine == "trtllm"


@pytest.mark.parametrize(
    ("arguments", "environment", "key", "where"),
    [
        (["--num-layers", "2"], {}, "num_layers", "only with --engine reference"),
        ([], {"KV_ROUTER_AGENT_NUM_BLOCKS": "5"}, "num_blocks", "only with --engine reference"),
    ],
)
def test_the_reference_engines_settings_are_refused(arguments, environment, key, where):
    with pytest.raises(ConfigError, match=where) as caught:
        loaded(*arguments, environment=environment)
    assert caught.value.key == key


@pytest.mark.parametrize("flag", ["--zmq", "--replay", "--load", "--metrics-url", "--state-dir"])
def test_a_bridges_settings_are_refused_with_the_reference_engine(flag):
    with pytest.raises(ConfigError, match="only next to an engine") as caught:
        load_agent_config([flag, "tcp://e:1"], {})
    assert caught.value.key == flag[2:].replace("-", "_")


def test_ranks_are_added_to_the_ports():
    ranks = ("--data-parallel-size", "2", "--data-parallel-start-rank", "2")
    found = addresses("--zmq", "tcp://e:5557", "--replay", "tcp://e:5657", "--topic", "kv@", *ranks)
    assert found == [
        (EngineAddress(f"tcp://e:{5559 + i}", f"tcp://e:{5659 + i}", "kv@"), None) for i in (0, 1)
    ]


def test_ranks_may_have_endpoints_of_their_own():
    found = addresses("--zmq", "tcp://a:1, ipc:///b", "--data-parallel-size", "2")
    assert [address.events for address, _ in found] == ["tcp://a:1", "ipc:///b"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), [None, None]),
        (("--share-listen", "tcp://e:7700"), ["tcp://e:7700", "tcp://e:7701"]),
        (("--share-listen", "tcp://a:1,tcp://b:1"), ["tcp://a:1", "tcp://b:1"]),
        (("--share-listen", "unix:///run/kv/a"), ["unix:///run/kv/a", "unix:///run/kv/a-1"]),
        (
            ("--share-listen", "tcp://e:7700", "--rank-workers", "4"),
            ["tcp://e:7700", "tcp://e:7704"],
        ),
        (
            ("--share-listen", "unix:///run/a", "--rank-workers", "2"),
            ["unix:///run/a", "unix:///run/a-2"],
        ),
    ],
)
def test_places_announced_are_those_at_which_the_connector_listens(flags, found):
    config = loaded("--zmq", "tcp://e:5557", "--data-parallel-size", "2", *flags)
    assert [each.blocks for each in rank_addresses(config)] == found


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), [[], []]),
        (("--p2p-listen", "e:5710"), [["vllm-p2p://e:5712"], ["vllm-p2p://e:5713"]]),
        (("--p2p-listen", "a:1,10.0.0.7:1"), [["vllm-p2p://a:1"], ["vllm-p2p://10.0.0.7:1"]]),
        (
            ("--p2p-listen", "e:5710", "--share-listen", "tcp://e:7700", "--rank-workers", "2"),
            [["tcp://e:7704", "vllm-p2p://e:5712"], ["tcp://e:7706", "vllm-p2p://e:5713"]],
        ),
    ],
)
def test_side_channels_of_vllms_own_tier_are_one_for_each_rank(flags, found):
    ranks = ("--data-parallel-size", "2", "--data-parallel-start-rank", "2")
    config = loaded("--zmq", "tcp://e:5557", *ranks, *flags)
    assert [each.shared for each in rank_addresses(config)] == found


@pytest.mark.parametrize(
    ("replay", "base"), [((), 5559), (("--replay", "tcp://e:5558"), 5560),
                         (("--replay", "tcp://e:6000"), 5559)],
)  # fmt: skip
def test_sglangs_load_socket_is_found(replay, base):
    flags = ("--engine", "sglang", "--zmq", "tcp://e:5557", "--load", "auto", *replay)
    found = addresses(*flags, "--data-parallel-size", "2")
    assert [load for _, load in found] == [f"tcp://e:{base + i}" for i in (0, 1)]


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--engine", "tgi"], "engine"),
        (["--zmq", "tcp://*:5557"], "zmq"),
        (["--zmq", "e:5557"], "zmq"),
        (["--zmq", "tcp://e:65535", "--data-parallel-size", "2"], "zmq"),
        (["--zmq", "tcp://a:1,tcp://b:1"], "zmq"),
        (["--zmq", "tcp://a:1,tcp://a:1", "--data-parallel-size", "2"], "zmq"),
        (["--zmq", "ipc:///x", "--data-parallel-size", "2"], "zmq"),
        (["--replay", "http://e:1"], "replay"),
        (["--tiers", "http://e:1"], "tiers"),
        (["--share-listen", "http://e:1"], "share_listen"),
        (["--p2p-listen", "e"], "p2p_listen"),
        (["--p2p-listen", "tcp://e:5710"], "p2p_listen"),
        (["--p2p-listen", "*:5710"], "p2p_listen"),
        (["--p2p-listen", "[::1]:5710"], "p2p_listen"),
        (["--p2p-listen", "e:65535", "--data-parallel-size", "2"], "p2p_listen"),
        (["--p2p-listen", "a:1,b:1"], "p2p_listen"),
        (["--engine", "sglang", "--p2p-listen", "e:5710"], "p2p_listen"),
        (["--tiers", "tcp://a:1,tcp://b:1"], "tiers"),
        (["--load", "tcp://e:1"], "load"),
        (["--engine", "sglang", "--load", "auto", "--zmq", "ipc:///x"], "load"),
        (["--engine", "sglang", "--load", "auto", "--data-parallel-start-rank", "1"], "load"),
        (["--events-url", "http://e:1/kv_cache_events"], "events_url"),
        (["--engine", "trtllm", "--events-url", "http://e:1", "--replay", "tcp://e:1"], "replay"),
        (["--engine", "trtllm", "--events-url", "http://e:1", "--zmq", "tcp://e:1"], "zmq"),
        (["--engine", "trtllm", "--events-url", "tcp://e:1"], "events_url"),
        (["--metrics-url", "e:8000"], "metrics_url"),
        (["--metrics-interval-s", "3"], "metrics_interval_s"),
        (["--block-size", "0"], "block_size"),
        (["--worker-id", "-1"], "worker_id"),
    ],
)
def test_contradictions_name_their_key(flags, key):
    with pytest.raises(ConfigError) as caught:
        loaded(*flags)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--metrics-url", "http://e/metrics"], "endpoint"),
        (["--endpoint", "http://e"], "block_size"),
        (["--endpoint", "http://e", "--block-size", "16"], "total_kv_blocks"),
    ],
)
def test_missing_settings_are_named(flags, key):
    with pytest.raises(ConfigError, match="missing") as caught:
        load_agent_config(["--engine", "vllm", *flags], {})
    assert caught.value.key == key


def test_what_no_event_of_a_hybrid_model_contains_is_set():
    config = loaded("--chunk-tokens", "128", "--eagle-groups", "0, 2", "--silent-block-sizes", "64")
    assert config.engine.hybrid == HybridSettings(128, (0, 2), (64,))
    assert loaded().engine.hybrid == HybridSettings()


def test_a_draft_is_described_in_one_way_only():
    with pytest.raises(ConfigError, match="given beside eagle"):
        assert loaded("--eagle", "--eagle-groups", "0").engine.hybrid


@pytest.mark.parametrize("sizes", ["0", "64,x", "-1"])
def test_block_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ConfigError, match="silent_block_sizes"):
        assert loaded(f"--silent-block-sizes={sizes}").engine.hybrid


def test_every_field_is_described_and_takes_its_default():
    assert all(text for _, _, text in describe(BridgeConfig))
    for each in settings_of(BridgeConfig()):
        assert msgspec.convert(each.value, each.type, strict=False) == each.value
