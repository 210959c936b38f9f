"""What is deployed is what the processes accept."""

import json
import re
from pathlib import Path

import pytest
import yaml

from router.config.load import load_router_config
from router.errors import ConfigError
from router.forward.config import load_forward
from tests.support.values.settings import flat
from worker_agent.config.reference import load_agent_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
VLLM_SERVICES = yaml.safe_load((DEPLOY / "compose.vllm.yaml").read_text())["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S))


def test_the_routers_settings_are_known():
    environment = SERVICES["router"]["environment"]
    assert load_router_config([], environment).bus.nats_url == environment["KV_ROUTER_NATS_URL"]


@pytest.mark.parametrize("name", ["worker-1", "worker-2"])
def test_the_workers_settings_are_known(name):
    config = flat(load_agent_config([], SERVICES[name]["environment"]))
    assert config.endpoint == f"http://{name}:8000"


def test_workers_have_ids_of_their_own():
    ids = [load_agent_config([], SERVICES[f"worker-{i}"]["environment"]).worker.id for i in (1, 2)]
    assert len(set(ids)) == 2


def test_vllms_of_compose_are_attached_by_their_names_with_their_events():
    router = VLLM_SERVICES["router"]
    config = load_router_config([], settings_of("router") | router["environment"])
    engines = [name for name in VLLM_SERVICES if name.startswith("vllm")]
    assert config.attach.workers.split(",") == [f"http://{name}:8000" for name in engines]
    assert len(engines) == 2
    ports = (flat(config).openai_port, flat(config).http_port)
    assert router["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]
    for name in engines:
        command = VLLM_SERVICES[name]["command"]
        events = json.loads(command[command.index("--kv-events-config") + 1])
        assert events["enable_kv_cache_events"]
        # `*` is the engine's own name to the router; another host would not be followed.
        assert {events[end].rpartition(":")[0] for end in ("endpoint", "replay_endpoint")} == {
            "tcp://*"
        }


def test_every_image_target_exists():
    services = [*SERVICES.values(), *VLLM_SERVICES.values()]
    targets = {s["build"]["target"] for s in services if "build" in s}
    assert targets == {"router", "worker-agent"}
    assert targets <= STAGES.keys()


@pytest.mark.parametrize(("stage", "port"), [("worker-agent", 8000), ("bridge", 8001)])
def test_the_images_settings_are_known(stage, port):
    settings = settings_of(stage) | {"KV_ROUTER_AGENT_INSECURE_PUBLIC_BIND": "true"}
    assert load_agent_config([], settings).http.http_port == port
    assert f"EXPOSE {port}\n" in STAGES[stage]


def test_the_routers_image_is_known():
    settings = settings_of("router") | {"KV_ROUTER_INSECURE_PUBLIC_BIND": "true"}
    assert load_router_config([], settings)


@pytest.mark.parametrize("stage", ["router", "worker-agent", "bridge"])
def test_image_without_settings_refuses_a_public_address(stage):
    load = load_router_config if stage == "router" else load_agent_config
    with pytest.raises(ConfigError, match="insecure_public_bind"):
        load([], settings_of(stage))


def test_every_service_configures_its_access():
    for services in (SERVICES, VLLM_SERVICES):
        for service in services.values():
            stage = service.get("build", {}).get("target")
            load = load_router_config if stage == "router" else load_agent_config
            if service.get("command") == ["forward"]:
                load = load_forward
            if stage is not None:
                assert load([], settings_of(stage) | service["environment"])


def test_the_forwarder_asks_the_router():
    forward = SERVICES["forward"]
    config = flat(load_forward([], settings_of("router") | forward["environment"]).config)
    assert config.router_url == "http://router:8092"
    assert forward["ports"] == [f"127.0.0.1:{config.http_port}:{config.http_port}"]
    assert config.host == "0.0.0.0"
    assert forward["command"] == ["forward"]


def settings_of(stage):
    return dict(re.findall(r"(KV_ROUTER_\w+)=(\S+)", STAGES[stage]))
