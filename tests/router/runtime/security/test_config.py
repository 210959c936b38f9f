"""Settings of security: contradictions, secrets, and addresses that others reach."""

import json

import pytest

from router.config.indexer import load_indexer_config
from router.config.load import load_router, load_router_config
from router.config.router import RouterConfig
from router.errors import ConfigError
from router.forward.config import load_forward
from router.runtime.process.settings import as_toml, effective
from router.runtime.security.config import SecurityConfig, is_for_itself, is_loopback
from tests.support.values.settings import flat
from worker_agent.config.reference import load_agent_config

LOADERS = {
    "KV_ROUTER_": load_router_config,
    "KV_ROUTER_INDEXER_": load_indexer_config,
    "KV_ROUTER_AGENT_": load_agent_config,
    "KV_ROUTER_FORWARD_": lambda *given: load_forward(*given).shown(),
}
ANY_HOST = "0.0.0.0"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("0123456789abcdef" * 4)
    return str(path)


@pytest.mark.parametrize("prefix", LOADERS)
def test_public_address_requires_authentication(prefix, file):
    load, public = LOADERS[prefix], {f"{prefix}HOST": ANY_HOST}
    with pytest.raises(ConfigError, match="reached from other machines") as refusal:
        load([], public)
    assert refusal.value.key == "host"
    for word in ("token_file", "tls_client_ca_file", "insecure_public_bind"):
        assert word in refusal.value.allowed
    assert load([], public | {f"{prefix}TOKEN_FILE": file}).security.host == ANY_HOST
    assert load([], public | {f"{prefix}INSECURE_PUBLIC_BIND": "true"}).security.host == ANY_HOST
    certified = {f"{prefix}TLS_{name}_FILE": file for name in ("CERT", "KEY", "CLIENT_CA")}
    assert load([], public | certified).security.tls_client_ca_file == file


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("router.local", False),
        ("localhost.example.com", False),
    ],
)
def test_loopback_address_needs_no_authentication(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["tls_cert_file"], "tls_key_file"),
        (["tls_key_file"], "tls_cert_file"),
        (["tls_client_ca_file"], "tls_cert_file"),
        (["nats_user"], "nats_password_file"),
        (["nats_password_file"], "nats_user"),
        (["nats_tls_cert_file", "nats_tls_ca_file"], "nats_tls_key_file"),
        (["nats_tls_ca_file"], "nats_url"),
        (["nats_creds_file", "nats_nkey_file"], "nats_nkey_file"),
        (["nats_nkey_file", "nats_token_file"], "nats_token_file"),
        (["nats_user", "nats_password_file", "nats_token_file"], "nats_token_file"),
        (["block_key_file", "block_key"], "block_key"),
    ],
)
@pytest.mark.parametrize("prefix", LOADERS)
def test_contradictions_name_both(settings, named, prefix, file):
    environment = {f"{prefix}{name.upper()}": file for name in settings}
    environment[f"{prefix}NATS_URL"] = "nats://127.0.0.1:4222"
    with pytest.raises(ConfigError) as refusal:
        LOADERS[prefix]([], environment)
    assert refusal.value.key in settings
    assert named in str(refusal.value)


def test_a_login_needs_a_bus_and_one_login_is_enough(file):
    with pytest.raises(ConfigError, match="nats_url is ''"):
        load_router_config(["--nats-token-file", file], {})
    url = "nats://somebody:s3cret@127.0.0.1:4222"
    with pytest.raises(ConfigError, match="only one login") as refusal:
        load_router_config(["--nats-token-file", file, "--nats-url", url], {})
    assert "s3cret" not in str(refusal.value.body())


def test_unreadable_file_is_named_in_the_error():
    with pytest.raises(ConfigError, match="token_file: /nowhere: No such file"):
        load_router_config(["--token-file", "/nowhere"], {})


@pytest.mark.parametrize("prefix", LOADERS)
def test_a_url_that_is_no_nats_server_s_is_refused_at_start(prefix):
    for url in ("http://bus:4222", "nats://", "nats://bus:http", "nats://a:4222,nats://b:4222"):
        with pytest.raises(ConfigError, match="of one server") as refusal:
            LOADERS[prefix]([], {f"{prefix}NATS_URL": url})
        assert (refusal.value.key, url in str(refusal.value)) == ("nats_url", True)
    for url in ("bus", "bus:4222", "nats://bus", "tls://bus:4222", "nats://[::1]:4222"):
        assert flat(LOADERS[prefix]([], {f"{prefix}NATS_URL": url})).nats_url == url


def test_dynamo_nats_login_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="dynamo_nats_url") as refusal:
        load_router_config(["--dynamo-nats-url", "http://somebody:s3cret@bus:4222"], {})
    assert "s3cret" not in str(refusal.value.body())


SECRET = "00112233445566778899aabbccddeeff"


def test_a_secret_setting_is_never_shown():
    loaded = load_router([], {"KV_ROUTER_BLOCK_KEY": SECRET})
    shown = effective(loaded.config, loaded.sources)
    assert shown["block_key"].value == "***"
    assert SECRET not in as_toml(shown) + json.dumps({k: v.value for k, v in shown.items()})
    assert effective(RouterConfig(), {})["block_key"].value == ""
    with pytest.raises(ConfigError) as refusal:
        load_router([], {"KV_ROUTER_BLOCK_KEY": "short-secret"})
    assert "short-secret" not in str(refusal.value.body())


def test_contradicting_secret_settings_do_not_show_the_secret(file):
    environment = {"KV_ROUTER_BLOCK_KEY": SECRET, "KV_ROUTER_BLOCK_KEY_FILE": file}
    with pytest.raises(ConfigError) as refusal:
        load_router([], environment)
    assert SECRET not in str(refusal.value.body())


def test_only_an_open_loopback_server_checks_host_names():
    assert is_for_itself(SecurityConfig())
    for fields in ({"host": "0.0.0.0"}, {"token_file": "x"}, {"insecure_public_bind": True}):
        assert not is_for_itself(SecurityConfig(**fields))
