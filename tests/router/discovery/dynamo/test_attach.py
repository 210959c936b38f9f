import pytest

from router.config.load import load_router_config
from router.config.router import RouterConfig
from router.discovery.dynamo.attach import dynamo_settings
from router.errors import ConfigError
from router.runtime.process.settings import configured

FLEET = {"dynamo_namespace": "My_ns", "dynamo_component": "backend", "dynamo_block_size": 16}


def settings_in(**settings):
    """The Dynamo fleet of a router with these settings."""
    config = configured(RouterConfig, **settings)
    return dynamo_settings(config.dynamo, config.bus.nats_url, config.naming)


def test_without_namespace_and_component_no_fleet_is_followed():
    assert settings_in() is None


def test_names_are_those_that_dynamo_uses():
    settings = settings_in(**FLEET, nats_url="nats://here:1")
    assert settings.nats_url == "nats://here:1"
    assert settings.stream == "namespace-my-ns-component-backend-kv-events"
    assert settings.snapshot_bucket == "namespace-my-ns-component-backend-radix-bucket"
    assert settings.worker(7, (0, 2), 1).endpoint == "dynamo://My_ns/backend/7"
    component = "namespace.My_ns.component.backend"
    assert settings.subjects("kv-events") == (
        f"{component}.kv-events",
        f"{component}.endpoint.*.kv-events",
    )
    assert settings.subjects("kv_metrics") == (
        "namespace.My_ns.kv_metrics",
        f"{component}.endpoint.*.kv_metrics",
    )


def test_a_fleet_may_have_a_server_of_its_own():
    found = settings_in(**FLEET, nats_url="nats://a:1", dynamo_nats_url="nats://b:2")
    assert found.nats_url == "nats://b:2"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"dynamo_component": ""}, "dynamo_component"),
        ({"dynamo_namespace": ""}, "dynamo_namespace"),
        ({"dynamo_block_size": 0}, "dynamo_block_size"),
        ({"nats_url": ""}, "dynamo_nats_url"),
    ],
)
def test_missing_settings_are_named(fields, key):
    with pytest.raises(ConfigError) as caught:
        settings_in(**{"nats_url": "nats://a:1", **FLEET, **fields})
    assert caught.value.key == key


def test_names_that_would_be_wildcards_are_refused():
    with pytest.raises(ConfigError, match="--dynamo-namespace"):
        load_router_config(["--dynamo-namespace", "a.*"], {})
