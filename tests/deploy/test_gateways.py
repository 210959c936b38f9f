"""A release behind each gateway, and its router before an API server that has its objects."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from router.config.load import load_router_config
from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.fleets.gateways import (
    DESTINATION,
    Gateway,
    body,
    completion,
    head,
    kinds,
    set_headers,
)
from support.processes.api_server import FakeApiServer, check_object
from support.processes.servers import eventually, free_port
from support.values.charts import DEPLOY, RELEASE, objects
from tests.support.values.settings import flat

ROOT = DEPLOY.parent
FOLDER = DEPLOY / "gateways"
GATEWAYS = sorted(path.name.removesuffix(".values.yaml") for path in FOLDER.glob("*.values.yaml"))
pytestmark = pytest.mark.integration


def values_of(name):
    return yaml.safe_load((FOLDER / f"{name}.values.yaml").read_text())


def of_kind(release, kind):
    return {each["metadata"]["name"]: each for each in release if each["kind"] == kind}


def test_each_gateway_has_objects_and_values():
    assert {Path(path.name).stem for path in FOLDER.glob("*.yaml")} == {
        *GATEWAYS,
        *(f"{name}.values" for name in GATEWAYS),
    }
    assert len(GATEWAYS) == 3


@pytest.mark.parametrize("name", GATEWAYS)
def test_objects_of_a_gateway_meet_those_of_its_release(name):
    release = objects(values_of(name))
    own = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    for each in own:
        check_object(each)
    namespaces = {each["metadata"].get("namespace") for each in (*own, *release)}
    assert namespaces <= {None, "kv-router"}
    (route,) = of_kind(release, "HTTPRoute").values()
    assert [each["name"] for each in route["spec"]["parentRefs"]] == [*of_kind(own, "Gateway")]
    pool, services = of_kind(release, "InferencePool"), of_kind(release, "Service")
    for each in own:
        spec = each["spec"]
        if "host" in spec:
            service, namespace, *_ = spec["host"].split(".")
            assert (service in services, namespace) == (True, "kv-router")
        if "targetRef" in spec:
            assert spec["targetRef"]["name"] in pool


def test_lines_of_the_guide_name_what_the_release_has():
    lines = (ROOT / "docs/kubernetes.md").read_text().split("```")[3].splitlines()
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
    assert len(commands) == 10
    helm, applied, waits, forwards, listed, _, asks = commands[3:]
    assert [helm[2], helm[helm.index("--namespace") + 1]] == [RELEASE["name"], RELEASE["namespace"]]
    path, model = helm[helm.index("-f") + 1], helm[-1].removeprefix("engines.model=")
    values = yaml.safe_load((ROOT / path).read_text())
    release = objects({**values, "engines": {"model": model}})
    own = list(yaml.safe_load_all((ROOT / applied[-1]).read_text()))
    assert waits[-1].removeprefix("deployment/") in of_kind(release, "Deployment")
    service = of_kind(release, "Service")[forwards[4].removeprefix("service/")]
    assert int(forwards[5]) in [each["port"] for each in service["spec"]["ports"]]
    assert f"localhost:{forwards[5]}/workers" in listed
    assert "inference" in of_kind(own, "Gateway")
    assert any("get gateway inference " in line for line in lines)
    (route,) = of_kind(release, "HTTPRoute").values()
    prefixes = [m["path"]["value"] for rule in route["spec"]["rules"] for m in rule["matches"]]
    assert asks[2].removeprefix("$GATEWAY").startswith(tuple(prefixes))
    assert json.loads(asks[-1])["model"] == model
    engine = str(of_kind(release, "StatefulSet")["kv-engine"]["spec"]["template"])
    assert model in engine


def pods_of(release, engine):
    """The pods that a stateful set of engines makes, at the address of one."""
    template = of_kind(release, "StatefulSet")["kv-engine"]["spec"]["template"]["metadata"]
    named = {"name": "kv-engine-0", "namespace": "kv-router", **template}
    ready = {"type": "Ready", "status": "True"}
    status = {"phase": "Running", "podIP": engine.host, "conditions": [ready]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": named,
        "spec": {"containers": []},
        "status": status,
    }


async def test_router_of_a_release_takes_the_pods_of_its_pool():
    engine, port = OpenAiEngine(host="127.0.0.6", sources=None, version="0.24.0"), free_port()
    sockets = {"eventsPort": engine.engine.port, "replayPort": engine.engine.replay_port}
    release = objects({**values_of("istio"), "engines": {"port": engine.port, **sockets}})
    router_pod = of_kind(release, "Deployment")["kv-router"]["spec"]["template"]["spec"]
    env = {e["name"]: e.get("value", "kv-0") for e in router_pod["containers"][0]["env"]}
    config = flat(load_router_config([], {k: v for k, v in env.items() if k.startswith("KV_")}))
    settings = {
        "epp_pool": config.epp_pool,
        "epp_port": port,
        "epp_tls": False,
        "discovery_token_file": "",
    }
    with FakeApiServer(namespace="kv-router") as server:
        server.put(*of_kind(release, "InferencePool").values(), pods_of(release, engine))
        router = DirectRouter(discovery_api_url=server.url, **settings)
        async with engine.running(), router.running(), Gateway(port).connected() as gateway:
            await eventually(lambda: _is_exact(router))
            await eventually(lambda: _lists(gateway))
            async with gateway.stream() as stream:
                await stream.send(head(), body(completion(model="m")))
                (first, _) = await stream.received(2)
                assert set_headers(first)[DESTINATION] == f"127.0.0.6:{engine.port}"
                await stream.end()
        rules = of_kind(release, "Role")["kv-router"]["rules"]
        check_rights(rules, server.asked)


async def _is_exact(router):
    workers = (await router.client.get("/workers")).json()
    return [rank["trust"]["state"] for each in workers for rank in each["ranks"]] == ["exact"]


async def _lists(gateway):
    async with gateway.stream() as stream:
        await stream.send(head("/v1/models", "GET", eos=True))
        found = kinds(await stream.received())
        await stream.end()
        return found == ["request_headers"]


def check_rights(rules, asked):
    """Nothing was asked that the rules do not allow, and they allow nothing else."""
    allowed = {
        f"{resource}.{group}".rstrip("."): rule.get("resourceNames")
        for rule in rules
        for resource in rule["resources"]
        for group in rule["apiGroups"]
    }
    assert {each["resource"] for each in asked} == {*allowed}
    for each in asked:
        if names := allowed[each["resource"]]:
            assert each["fieldSelector"] == f"metadata.name={names[0]}"
