import pytest

from router.config import RouterConfig
from router.dynamo.attach import dynamo_settings
from router.errors import ConfigError
from router.loading import load_router_config

FLEET = {"dynamo_namespace": "My_ns", "dynamo_component": "backend", "dynamo_block_size": 16}


def test_without_a_namespace_and_a_component_nobody_is_followed():
    assert dynamo_settings(RouterConfig()) is None


def test_names_are_those_that_dynamo_uses():
    settings = dynamo_settings(RouterConfig(**FLEET, nats_url="nats://here:1"))
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
    config = RouterConfig(**FLEET, nats_url="nats://a:1", dynamo_nats_url="nats://b:2")
    assert dynamo_settings(config).nats_url == "nats://b:2"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"dynamo_component": ""}, "dynamo_component"),
        ({"dynamo_namespace": ""}, "dynamo_namespace"),
        ({"dynamo_block_size": 0}, "dynamo_block_size"),
        ({"nats_url": ""}, "dynamo_nats_url"),
    ],
)
def test_what_is_missing_is_said(fields, key):
    config = RouterConfig(**{"nats_url": "nats://a:1", **FLEET, **fields})
    with pytest.raises(ConfigError) as caught:
        dynamo_settings(config)
    assert caught.value.key == key


def test_names_that_would_be_wildcards_are_refused():
    with pytest.raises(ConfigError, match="dynamo_namespace"):
        load_router_config(["--dynamo-namespace", "a.*"], {})
