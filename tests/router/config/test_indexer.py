"""Settings of an indexer, which no other process trips over."""

import msgspec
import pytest

from router import cli
from router.config.indexer import IndexerConfig, load_indexer_config
from router.config.load import load_router_config
from router.errors import ConfigError
from router.runtime.process.settings import describe, settings_of
from router.tools.up.config import load_up_config
from tests.support.values.settings import flat
from worker_agent.config.reference import load_agent_config


def test_listens_where_its_peer_does():
    config = flat(load_indexer_config([], {}))
    assert (config.http_port, config.body_limit_bytes) == (8090, 8 * 1024 * 1024)
    assert config.peers == ""


def test_every_field_is_described_and_takes_its_default():
    assert all(text for _, _, text in describe(IndexerConfig))
    for each in settings_of(IndexerConfig()):
        assert msgspec.convert(each.value, each.type, strict=False) == each.value


def test_its_variables_are_its_own():
    environment = {"KV_ROUTER_INDEXER_HTTP_PORT": "1", "KV_ROUTER_HTTP_PORT": "2"}
    assert load_indexer_config([], environment).http.http_port == 1
    assert load_router_config([], environment).http.http_port == 2
    for load in (load_up_config, load_agent_config):
        assert load([], {"KV_ROUTER_INDEXER_HTTP_PORT": "1"})
    with pytest.raises(ConfigError, match="NONSENSE"):
        load_indexer_config([], {"KV_ROUTER_INDEXER_NONSENSE": "1"})


@pytest.mark.parametrize("key", ["PORT", "SERVICE_HOST", "PORT_8090_TCP_ADDR"])
def test_kubernetes_service_links_are_not_settings(key):
    environment = {f"KV_ROUTER_INDEXER_{key}": "tcp://10.0.0.1:8090"}
    assert load_indexer_config([], environment) == IndexerConfig()
    assert load_router_config([], environment)


def test_peers_are_a_line_or_a_list(tmp_path):
    expected = ("http://a:1", "https://b/indexer")
    line = "http://a:1, https://b/indexer,,http://a:1"
    assert load_indexer_config(["--peers", line], {}).peers.peer_urls == expected
    assert load_indexer_config([], {"KV_ROUTER_INDEXER_PEERS": line}).peers.peer_urls == expected
    file = tmp_path / "indexer.toml"
    file.write_text('peers = ["http://a:1", "https://b/indexer"]\n')
    assert load_indexer_config(["--config", str(file)], {}).peers.peer_urls == expected


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--peers", "a:1"], "peers"),
        (["--peers", "http://a:1,ftp://b"], "peers"),
        (["--peers", "http://a,http://b", "--max-peers", "1"], "peers"),
        (["--frequency-window-s", "-1"], "frequency_window_s"),
        (["--max-registered-ranks", "0"], "max_registered_ranks"),
        (["--http-port", "65536"], "http_port"),
        (["--namespace", "a.b"], "namespace"),
        (["--peer-token-file", "/nowhere"], "peer_token_file"),
        (["--peer-tls-cert-file", "/nowhere"], "peer_tls_cert_file"),
        (["--peer-tls-key-file", "/nowhere"], "peer_tls_key_file"),
    ],
)
def test_invalid_setting_names_its_key(flags, key):
    with pytest.raises(ConfigError) as caught:
        load_indexer_config(flags, {})
    assert caught.value.key == key
    assert caught.value.allowed


def test_the_command_line_knows_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["indexer", "--help-all"])
    assert ended.value.code == 0
    assert "--peer-dump-limit-bytes" in capsys.readouterr().out
    assert cli.main(["indexer", "--peers", "x"]) == 2
    assert "kv-router indexer: --peers" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert "indexer" in capsys.readouterr().out
