"""What is deployed is what the processes accept."""

import re
from pathlib import Path

import pytest
import yaml

from router.config import load_router_config
from worker_agent.config import load_agent_config

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_routers_settings_are_known():
    environment = SERVICES["router"]["environment"]
    assert load_router_config([], environment).nats_url == environment["KV_ROUTER_NATS_URL"]


@pytest.mark.parametrize("name", ["worker-1", "worker-2"])
def test_the_workers_settings_are_known(name):
    config = load_agent_config([], SERVICES[name]["environment"])
    assert config.endpoint == f"http://{name}:8000"


def test_workers_have_ids_of_their_own():
    ids = [load_agent_config([], SERVICES[f"worker-{i}"]["environment"]).id for i in (1, 2)]
    assert len(set(ids)) == 2


def test_every_image_target_exists():
    targets = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert targets == {"router", "worker-agent"}
    assert targets <= set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))


def test_the_images_settings_are_known():
    settings = dict(re.findall(r"(KV_ROUTER_\w+)=(\S+)", DOCKERFILE))
    assert load_router_config([], settings)
    assert load_agent_config([], settings).http_port == 8000


def test_images_do_not_run_as_root():
    assert DOCKERFILE.count("USER 10001") == 2
