"""From settings, also under Dynamo's names, to the tiers of a rank."""

import stat

import pytest

from router.errors import ConfigError
from router.runtime.security.redis_access import RedisAccess
from tests.support.values.settings import flat
from worker_agent.blocks.names import CacheLevel
from worker_agent.config.kvbm_aliases import ALIASES, REFUSED
from worker_agent.config.reference import load_agent_config
from worker_agent.manager.config import InFile, OnHost, Shared
from worker_agent.manager.manager import KvBlockManager
from worker_agent.manager.settings import cache_secret, manager_config

G1, G2, G3, _ = CacheLevel
BLOCK_BYTES = 4 * 2 * 16 * 64 * 4
"""Of the default model: layers, keys and values, tokens, numbers of a token, float32."""

REMOTE = {
    "KV_ROUTER_AGENT_REMOTE_CACHE_URL": "redis://h",
    "KV_ROUTER_AGENT_BLOCK_KEY": "ab" * 32,
}


def secret_of(config):
    return cache_secret(config.tiers, config.worker.id, config.block_keys.read())


def tiers(environment, flags=()):
    return manager_config(load_agent_config(flags, environment), 0, "cpu").tiers


def test_without_tiers_there_is_the_device():
    assert [*tiers({})] == [G1]


def test_sizes_are_blocks_or_what_fits():
    found = tiers(
        {"DYN_KVBM_CPU_CACHE_GB": "0.001", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "7"}
    )
    assert found[G2].num_blocks == 10**6 // BLOCK_BYTES
    assert found[G3].num_blocks == 7
    both = {
        "DYN_KVBM_CPU_CACHE_GB": "1",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "3",
        "DYN_KVBM_METRICS": "true",
    }
    assert tiers(both)[G2].num_blocks == 3
    assert G2 not in tiers({"DYN_KVBM_CPU_CACHE_GB": "0.0000001"})


def test_a_flag_counts_more_than_dynamo_s_name():
    said = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "3"}
    assert tiers(said, ["--host-cache-blocks", "5"])[G2].num_blocks == 5


def test_blocks_outlive_the_agent_where_a_directory_is_named(tmp_path):
    flags = ("--worker-id", "7", "--host-cache-blocks", "1", "--disk-cache-blocks", "1")
    found = tiers({}, flags)
    assert found[G2].place == OnHost()
    assert not found[G3].place.is_kept
    found = tiers(
        {
            "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path),
            "DYN_KVBM_DISK_DISABLE_O_DIRECT": "1",
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "true",
        },
        (*flags, "--host-cache-dir", str(tmp_path)),
    )
    assert found[G2].place == Shared(tmp_path / "kv-7-0.host")
    assert found[G3].place == InFile(tmp_path / "kv-7-0.blocks", zero_fill=True, is_direct=False)


def test_offloading_is_set_by_dynamo_s_names():
    said = {
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": "4",
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "9",
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "false",
        "DYN_KVBM_DISK_CACHE_GB": "1",
    }
    offload = manager_config(load_agent_config([], said), 0, "cpu").offload
    assert (offload.batch_blocks, offload.min_priority) == (4, 9)
    assert (offload.host_rule, offload.disk_rule) == ("all", "frequency")
    load_agent_config([], {"DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true"})


@pytest.mark.parametrize("name", [*REFUSED, "DYN_KVBM_TYPO"])
def test_unsupported_dynamo_setting_is_refused_with_a_reason(name):
    with pytest.raises(ConfigError, match=f"{name}: not supported here: ") as caught:
        load_agent_config([], {name: "1"})
    assert "DYN_KVBM_CPU_CACHE_GB" in caught.value.allowed


def test_beside_an_engine_they_are_dynamo_s():
    flags = (
        "--engine",
        "vllm",
        "--zmq",
        "tcp://h:1",
        "--endpoint",
        "http://h:2",
        "--metrics-url",
        "http://h:2/metrics",
    )
    load_agent_config(flags, {"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_TYPO": "1"})


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"DYN_KVBM_DISK_CACHE_DIR": "/tmp"}, "disk_cache_dir"),
        ({"DYN_KVBM_METRICS": "maybe"}, "DYN_KVBM_METRICS"),
        ({"DYN_KVBM_CPU_CACHE_GB": "-1"}, "host_cache_gb"),
        ({"KV_ROUTER_AGENT_HOST_CACHE_DIR": "/dev/shm"}, "host_cache_dir"),
        ({"KV_ROUTER_AGENT_BLOCK_SIZE": "24"}, "block_size"),
        ({"KV_ROUTER_AGENT_REMOTE_CACHE_TTL_S": "9"}, "remote_cache_ttl_s"),
        ({"KV_ROUTER_AGENT_REMOTE_CACHE_PASSWORD_FILE": "/p"}, "remote_cache_password_file"),
        ({**REMOTE, "KV_ROUTER_AGENT_REMOTE_CACHE_USERNAME": "u"}, "remote_cache_username"),
        (
            {
                **REMOTE,
                "KV_ROUTER_AGENT_REMOTE_CACHE_URL": "redis://u:p@h",
                "KV_ROUTER_AGENT_REMOTE_CACHE_PASSWORD_FILE": "/p",
            },
            "remote_cache_password_file",
        ),
        ({"KV_ROUTER_AGENT_REMOTE_CACHE_URL": "redis://h"}, "remote_cache_url"),
    ],
)
def test_contradictions_name_their_key(said, key):
    with pytest.raises(ConfigError) as caught:
        load_agent_config([], said)
    assert caught.value.key == key


def test_login_to_the_store_is_read_from_its_file():
    login = {
        "KV_ROUTER_AGENT_REMOTE_CACHE_USERNAME": "agent",
        "KV_ROUTER_AGENT_REMOTE_CACHE_PASSWORD_FILE": "/run/secrets/redis",
    }
    remote = manager_config(load_agent_config([], REMOTE | login), 0, "cpu").remote
    assert remote.access == RedisAccess("agent", "/run/secrets/redis")


def test_a_store_is_shared_under_the_fleet_s_secret():
    url = {"KV_ROUTER_AGENT_REMOTE_CACHE_URL": "redis://h"}
    config = load_agent_config([], url | {"KV_ROUTER_AGENT_BLOCK_KEY": "ab" * 32})
    remote = manager_config(config, 0, "cpu").remote
    assert (remote.url, remote.namespace, remote.max_blocks) == ("redis://h", "default", 1_000_000)


def test_every_alias_is_a_setting():
    loaded = flat(load_agent_config([], {}))
    assert all(hasattr(loaded, alias.setting) for alias in ALIASES if alias.setting)


def test_the_secret_lives_as_long_as_the_blocks(tmp_path):
    flags = ("--worker-id", "7", "--disk-cache-blocks", "1", "--disk-cache-dir", str(tmp_path))
    kept = [secret_of(load_agent_config(flags, {})) for _ in range(2)]
    assert kept[0] == kept[1]
    assert stat.S_IMODE((tmp_path / "kv-7.secret").stat().st_mode) == 0o600
    (tmp_path / "kv-7.secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes"):
        secret_of(load_agent_config(flags, {}))
    mine = [secret_of(load_agent_config([], {})) for _ in range(2)]
    assert mine[0] != mine[1]
    key = {"KV_ROUTER_AGENT_BLOCK_KEY": "ab" * 32}
    fleet = {secret_of(load_agent_config(["--worker-id", str(i)], key)) for i in range(2)}
    assert len(fleet) == 1
    assert fleet != {bytes.fromhex("ab" * 32)}


def test_a_rank_s_tiers_open(tmp_path):
    flags = ("--host-cache-blocks", "2", "--disk-cache-blocks", "4", "--num-blocks", "256")
    config = load_agent_config((*flags, "--disk-cache-dir", str(tmp_path)), {})
    with KvBlockManager(manager_config(config, 0, "cpu")) as manager:
        assert [status.empty_blocks for status in manager.status().values()] == [256, 2, 4]
        assert manager.block_sets()[G1].memory.layout.config.block_bytes == BLOCK_BYTES


def test_secret_that_is_a_link_is_refused(tmp_path):
    flags = ("--worker-id", "7", "--disk-cache-blocks", "2", "--disk-cache-dir", str(tmp_path))
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (tmp_path / "kv-7.secret").symlink_to("elsewhere")
    with pytest.raises(ConfigError) as refusal:
        secret_of(load_agent_config(flags, {}))
    assert refusal.value.key == "disk_cache_dir"


def test_name_of_a_temporary_disk_tier_cannot_be_guessed():
    flags = ("--worker-id", "7", "--disk-cache-blocks", "2")
    paths = {manager_config(load_agent_config(flags, {}), 0, "cpu").disk.place.path for _ in "12"}
    assert len(paths) == 2


def test_blocks_of_another_page_order_are_of_another_model():
    pages = [["--kv-page", page] for page in ("nhd", "hnd")]
    models = [manager_config(load_agent_config(flags, {}), 0, "cpu").model for flags in pages]
    assert models[0] == manager_config(load_agent_config([], {}), 0, "cpu").model
    assert models[0].fingerprint != models[1].fingerprint
