"""Settings of an agent, and contradictions among them."""

import msgspec
import pytest

from router.config.router import RouterConfig
from router.errors import ConfigError
from router.protocol.catalogue import WorkerLabels
from router.runtime.process.settings import configured, describe, id_of_name, settings_of
from router.tools.up.config import UpConfig
from worker_agent.config.reference import ReferenceConfig, load_agent_config


def test_the_id_is_configured_or_made_from_the_name():
    assert configured(ReferenceConfig, name="pod-0").worker.id == id_of_name("pod-0")
    assert configured(ReferenceConfig, name="pod-0", worker_id=7).worker.id == 7


def test_flags_precede_the_environment():
    config = load_agent_config(
        ["--num-blocks", "512"], {"KV_ROUTER_AGENT_BLOCK_SIZE": "32", "KV_ROUTER_HTTP_PORT": "1"}
    )
    assert (config.engine.num_blocks, config.identity.block_size) == (512, 32)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--num-heads", "3"], "num_heads"),
        (["--num-kv-heads", "3"], "num_kv_heads"),
        (["--hidden-size", "24", "--num-heads", "8"], "hidden_size"),
        (["--num-blocks", "8"], "max_model_len"),
        (["--worker-id", "-1"], "worker_id"),
        (["--worker-id", str(2**64)], "worker_id"),
        (["--namespace", "a.b"], "namespace"),
    ],
)
def test_contradictions_name_their_key(flags, key):
    with pytest.raises(ConfigError) as caught:
        load_agent_config(flags, {})
    assert caught.value.key == key


@pytest.mark.parametrize("config_type", [ReferenceConfig, RouterConfig, UpConfig])
def test_every_field_is_described_and_takes_its_default(config_type):
    assert all(text for _, _, text in describe(config_type))
    for each in settings_of(config_type()):
        assert msgspec.convert(each.value, each.type, strict=False) == each.value


def test_endpoint_can_be_set():
    assert load_agent_config(["--endpoint", "http://w:1"], {}).agent.endpoint == "http://w:1"


def test_labels_are_lists_and_tables_or_their_short_forms(tmp_path):
    flags = (
        "--taints", "gpu=h100, spot", "--topology-domains", "zone=a,rack=7", "--lora-names", "sql",
        "--kv-transfer-domain", "zone", "--kv-transfer-enforcement", "preferred",
    )  # fmt: skip
    expected = WorkerLabels(
        taints=["gpu=h100", "spot"],
        topology_domains={"zone": "a", "rack": "7"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement="preferred",
        lora_names=["sql"],
    )
    assert load_agent_config(flags, {}).agent.labels() == expected
    file = tmp_path / "agent.toml"
    file.write_text(
        'taints = ["gpu=h100", "spot"]\nlora_names = ["sql"]\nkv_transfer_domain = "zone"\n'
        'kv_transfer_enforcement = "preferred"\ntopology_domains = {zone = "a", rack = "7"}\n'
    )
    assert load_agent_config(("--config", str(file)), {}).agent.labels() == expected
    assert load_agent_config((), {}).agent.labels() == WorkerLabels()


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--topology-domains", "zone"), "topology_domains"),
        (("--topology-domains", "zone=a,zone=b"), "topology_domains"),
        (("--topology-domains", "zone=a", "--kv-transfer-domain", "rack"), "kv_transfer_domain"),
    ],
)
def test_labels_that_are_none_are_refused_at_start(flags, key):
    with pytest.raises(ConfigError) as caught:
        load_agent_config(flags, {})
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--share"], "share"),
        (["--share-port", "9"], "share_port"),
        (["--share-dir", "/tmp"], "share_dir"),
        (["--share", "--block-key", "ab" * 32, "--share-ca-file", "x"], "share_ca_file"),
        (["--share-nixl"], "share_nixl"),
        (["--share", "--block-key", "ab" * 32, "--share-nixl", "--tls-cert-file", __file__,
          "--tls-key-file", __file__], "share_nixl"),
        (["--share", "--block-key", "ab" * 32, "--share-port", "65535",
          "--data-parallel-size", "2"], "share_port"),
    ],
)  # fmt: skip
def test_contradictions_of_sharing_name_their_key(flags, key):
    with pytest.raises(ConfigError) as refused:
        load_agent_config(flags, {})
    assert refused.value.key == key
