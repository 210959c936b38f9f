"""The chart renders, offline, to objects that Kubernetes takes and that the processes accept."""

import json
from itertools import chain, product
from pathlib import Path

import jsonschema_rs
import kubernetes_validate
import promql_parser
import pytest
import yaml

from router.config.indexer import load_indexer
from router.config.load import load_router_config
from router.core.registered_workers import missing
from router.discovery.kubernetes.found import Found, registration
from router.discovery.kubernetes.pool import EVENTS_PORT, REPLAY_PORT
from router.forward.config import load_forward
from router.publisher.batch_order.address import rank_endpoint
from router.runtime.process.settings import settings_of
from support.values import chart_schema
from support.values.charts import CHART, KEPT, MANIFESTS, manifest, objects
from support.values.operator_schemas import SCHEMAS
from tests.support.values.settings import flat
from worker_agent.config.reference import load_agent_config
from worker_agent.connector.vllm_parts.settings import connector_settings

EVERYTHING = {
    **KEPT["monitored.yaml"],
    "tokens": {"secret": "callers", "key": "tokens.toml"},
    "natsCredentials": {"secret": "bus", "key": "nats.creds"},
    "imagePullSecrets": [{"name": "registry"}],
    "forward": {"routerToken": {"secret": "forwarders", "key": "token"}},
    "engines": {
        "cacheClaim": "models",
        "connector": {"enabled": True, "diskCacheGb": 100, "diskStorageClass": "local"},
        "args": ["--tensor-parallel-size=2"],
        "config": {"routing_group": "gold", "taints": "gpu=h100"},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    },
}
WITHOUT_BUS = {
    "nats": {"enabled": False},
    "engines": {"enabled": False},
    "forward": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
ELSEWHERE = {"natsUrl": "tls://nats.example:4222", "nats": {"enabled": False}}
SLICES = {
    **KEPT["direct.yaml"],
    "discovery": {
        "enabled": True,
        "kind": "endpointslices",
        "worker": {"block_size": 32, "data_parallel_size": 4},
    },
    "tokens": {"secret": "callers", "key": "tokens.toml"},
    "router": {"peerToken": {"secret": "routers", "key": "token"}},
    "forward": {"enabled": False},
    "monitoring": {"enabled": True},
    "networkPolicy": {"egress": {"enabled": True, "also": [{"ports": [{"port": 4318}]}]}},
}
PICKERS = {
    "nats": {"enabled": False},
    "epp": {
        "enabled": True,
        "certificate": {"secret": "picker"},
        "pool": {"labels": {"app": "vllm"}, "ports": [8000, 8001], "failureMode": "FailClose"},
        "callers": [{"ipBlock": {"cidr": "10.129.0.0/23"}}],
    },
    "engines": {"enabled": False},
    "forward": {"enabled": False},
    "networkPolicy": {"egress": {"enabled": True}},
}
GATEWAY = {"podSelector": {"matchLabels": {"app": "gateway"}}}
ALL = {
    "default": {},
    **KEPT,
    "everything": EVERYTHING,
    "without": WITHOUT_BUS,
    "bus": ELSEWHERE,
    "slices": SLICES,
    "pickers": PICKERS,
}


@pytest.fixture
def helm():
    import helm_python  # starts the threads of Go, with which no test process could be forked

    return helm_python


@pytest.fixture(params=ALL, scope="module")
def release(request):
    return objects(ALL[request.param])


def of_kind(release, *kinds):
    return [each for each in release if each["kind"] in kinds]


def pods(release):
    for each in of_kind(release, "Deployment", "StatefulSet"):
        yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def containers(release):
    for _, pod in pods(release):
        yield from chain(pod.get("initContainers", ()), pod["containers"])


def container(release, name):
    return next(each for each in containers(release) if each["name"] == name)


def environment(container):
    """Its settings; what only a cluster knows is made up."""
    made_up = {"metadata.name": "kv-engine-0", "status.podIP": "10.0.0.7"}
    env = {}
    for each in container["env"]:
        source = each.get("valueFrom")
        env[each["name"]] = made_up[source["fieldRef"]["fieldPath"]] if source else each["value"]
    expanded = {name: value.replace("$(POD_IP)", "10.0.0.7") for name, value in env.items()}
    return {name: value for name, value in expanded.items() if name.startswith("KV_ROUTER_")}


@pytest.fixture
def settings(tmp_path):
    """A container's, with what its image sets, and the files that its secrets are."""

    def read(container):
        env = environment(container)
        if container["name"] == "router":
            env["KV_ROUTER_HOST"] = "0.0.0.0"
        for name, value in env.items():
            if value.startswith("/run/secrets/"):
                path = tmp_path / Path(value).name
                path.write_text('[[tokens]]\nname = "x"\ntoken = "0123456789abcdef"\n')
                env[name] = str(path)
        return env

    return read


def test_chart_passes_lint(helm):
    report = helm.lint(CHART, strict=True, with_subcharts=True)
    assert report["errors"] == []
    assert {each["error"] for each in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("name", KEPT)
def test_manifests_are_what_the_chart_renders(name):
    """`make manifests` writes them anew."""
    assert (MANIFESTS / name).read_text() == manifest(KEPT[name])


def test_no_other_manifest_is_kept():
    assert {each.name for each in MANIFESTS.iterdir()} == {*KEPT}


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *((name, "1.37.0") for name in ALL),
        ("everything", "1.29.0"),
        *(
            pytest.param(name, "1.29.0", marks=pytest.mark.long)
            for name in ALL
            if name != "everything"
        ),
    ],
)
def test_kubernetes_takes_every_object(name, version):
    for each in objects(ALL[name]):
        schema = SCHEMAS.get(each["kind"])
        if schema is None:
            kubernetes_validate.validate(each, version, strict=True)
        else:
            jsonschema_rs.validate(schema, each)


def test_names_are_unique(release):
    keys = [(each["kind"], each["metadata"]["name"]) for each in release]
    assert len(keys) == len(set(keys))
    assert all(each["metadata"]["namespace"] == "kv-router" for each in release)


def test_selectors_match_existing_workloads(release):
    """By services, budgets, policies, monitors and autoscalers; ports by name, too."""
    labels = [
        (each["spec"]["template"]["metadata"]["labels"], pod)
        for each, (_, pod) in zip(
            of_kind(release, "Deployment", "StatefulSet"), pods(release), strict=True
        )
    ]
    for each in of_kind(release, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = each["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        selector = selector.get("matchLabels", selector)
        chosen = [pod for known, pod in labels if selector.items() <= known.items()]
        assert len(chosen) == 1, each["metadata"]["name"]
        own = chain(chosen[0].get("initContainers", ()), chosen[0]["containers"])
        ports = {port["name"]: port["containerPort"] for c in own for port in c.get("ports", ())}
        assert set(named_ports(spec)) <= {*ports, *ports.values()}
    services = [(s["metadata"]["labels"], s["spec"]["ports"]) for s in of_kind(release, "Service")]
    for monitor in of_kind(release, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        chosen = [ports for known, ports in services if wanted.items() <= known.items()]
        assert len(chosen) == 1
        names = {port["name"] for port in chosen[0]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names
    workloads = {(each["kind"], each["metadata"]["name"]) for each in release}
    for scaler in of_kind(release, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in workloads


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ({}, ("Qwen/Qwen3-0.6B", "default", "aggregated")),
        (
            {"engines": {"config": {"model_name": "m", "routing_group": "gold", "role": "decode"}}},
            ("m", "gold", "decode"),
        ),
        (KEPT["direct.yaml"], ("default", "default", "aggregated")),
        (KEPT["gateway.yaml"], ("Qwen/Qwen3-0.6B", "default", "aggregated")),
    ],
)
def test_engines_are_scaled_by_the_need_of_their_own_pool(values, labels):
    scaling = {"enabled": True, "minReplicas": 0, "maxReplicas": 30, "scaleDownSeconds": 60}
    engines = {**values.get("engines", {}), "autoscaling": scaling}
    release = objects({**values, "engines": engines})
    (scaler,) = of_kind(release, "ScaledObject")
    (engine,) = [each for each in of_kind(release, "StatefulSet") if "engine" in name_of(each)]
    assert "replicas" not in engine["spec"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == name_of(engine)
    counts = scaler["spec"]["minReplicaCount"], scaler["spec"]["maxReplicaCount"]
    assert counts == (0, 30)
    query = promql_parser.parse(scaler["spec"]["triggers"][0]["metadata"]["query"]).expr
    assert query.name == "kv_router_pool_workers_needed"
    chosen = {each.name: each.value for each in query.matchers.matchers}
    names = ("namespace", "model_name", "routing_group", "role")
    assert chosen == dict(zip(names, ("kv-router", *labels), strict=True))


def name_of(each):
    return each["metadata"]["name"]


def named_ports(spec):
    for port in spec.get("ports", ()):
        yield port["targetPort"]
    for rule in spec.get("ingress", ()):
        yield from (port["port"] for port in rule["ports"])
    for endpoint in spec.get("podMetricsEndpoints", ()):
        yield endpoint["port"]


def test_containers_have_no_rights_that_they_do_not_need(release):
    bound = [b["subjects"][0]["name"] for b in of_kind(release, "RoleBinding")]
    for _, pod in pods(release):
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        has_role = any(pod["serviceAccountName"] == name for name in bound)
        assert pod["automountServiceAccountToken"] == has_role
        for each in chain(pod.get("initContainers", ()), pod["containers"]):
            security = each["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["limits"]


def test_every_account_is_used_and_every_mount_is_a_volume(release):
    accounts = {each["metadata"]["name"] for each in of_kind(release, "ServiceAccount")}
    assert {pod["serviceAccountName"] for _, pod in pods(release)} == accounts
    for workload, (_, pod) in zip(
        of_kind(release, "Deployment", "StatefulSet"), pods(release), strict=True
    ):
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes = {each["name"] for each in pod["volumes"]}
        volumes |= {each["metadata"]["name"] for each in claims}
        for each in chain(pod.get("initContainers", ()), pod["containers"]):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes


def test_every_container_is_probed(release):
    for each in containers(release):
        if each["name"] == "connector":  # it copies, and ends
            continue
        ports = {port["name"] for port in each["ports"]}
        for probe in ("livenessProbe", "readinessProbe"):
            check = each[probe].get("httpGet") or each[probe].get("tcpSocket")
            assert check is None or check["port"] in ports
    for each in containers(release):
        if each["name"] in ("router", "forward", "indexer", "agent"):
            assert each["livenessProbe"]["httpGet"]["path"] == "/health"
            assert each["readinessProbe"]["httpGet"]["path"] == "/ready"
            assert ("startupProbe" in each) == (each["name"] != "agent")


def test_termination_grace_period_exceeds_pre_stop_sleep(release):
    for name, pod in pods(release):
        for each in pod["containers"]:
            hook = each.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            if hook is not None:
                assert hook[0] == "sleep"
                assert int(hook[1]) < pod["terminationGracePeriodSeconds"], name


@pytest.mark.parametrize("name", ALL)
def test_routers_accept_their_settings(name, settings):
    values = ALL[name]
    config = flat(load_router_config([], settings(container(objects(values), "router"))))
    assert config.http_port == 8092
    is_direct = name in ("without", "direct.yaml", "slices", "pickers")
    bus = "" if is_direct else values.get("natsUrl", "nats://kv-nats:4222")
    assert config.discovery == {"direct.yaml": "pods", "slices": "endpointslices"}.get(name, "none")
    assert config.nats_url == bus
    assert config.redis_url == ("redis://kv-redis:6379" if "redis" in values else "")
    assert config.insecure_public_bind == ("tokens" not in values)
    assert config.epp_pool == ("kv-router/kv" if "epp" in values else "")
    assert (config.epp_port, config.epp_health_port) == (
        (9002, 9003) if "epp" in values else (0, 0)
    )


def test_indexers_accept_their_settings(settings):
    indexer = container(objects(EVERYTHING), "indexer")
    config = flat(load_indexer([], settings(indexer)).config)
    assert (config.http_port, config.nats_url) == (8090, "nats://kv-nats:4222")
    assert config.token_file.endswith("/tokens.toml")


@pytest.mark.parametrize("name", ["default", "everything"])
def test_agents_accept_their_settings_and_meet_their_engines(name, settings):
    release = objects(ALL[name])
    agent, engine = container(release, "agent"), container(release, "engine")
    config = flat(load_agent_config([], settings(agent)))
    args = engine["args"]
    events = json.loads(args[args.index("--kv-events-config") + 1])
    assert config.zmq == events["endpoint"].replace("*", "127.0.0.1")
    assert config.replay == events["replay_endpoint"].replace("*", "127.0.0.1")
    assert events["topic"].startswith(config.topic)
    assert f"--max-num-batched-tokens={config.max_num_batched_tokens}" in args
    port = next(port["containerPort"] for port in engine["ports"])
    assert config.endpoint == f"http://10.0.0.7:{port}"
    assert config.metrics_url == f"http://127.0.0.1:{port}/metrics"
    assert f"--port={port}" in args
    assert agent["ports"] == [{"name": "probes", "containerPort": config.http_port}]
    assert config.state_dir in {mount["mountPath"] for mount in agent["volumeMounts"]}


@pytest.mark.parametrize("name", ["default", "everything"])
def test_forwarders_accept_their_settings_and_meet_their_routers(name, settings):
    release = objects(ALL[name])
    forward = container(release, "forward")
    config = flat(load_forward([], settings(forward)).config)
    service = next(s for s in of_kind(release, "Service") if s["metadata"]["name"] == "kv-router")
    (port,) = service["spec"]["ports"]
    assert config.router_url == f"http://kv-router:{port['port']}"
    assert config.router_token_file.endswith("/token" if name == "everything" else "")
    assert config.insecure_public_bind == (name == "default")


def test_endpoint_of_routers_is_reached_and_reaches_engines():
    values = {"router": {"config": {"openai_port": 8000}}, "forward": {"enabled": False}}
    release = objects(values)
    service = next(s for s in of_kind(release, "Service") if s["metadata"]["name"] == "kv-router")
    assert [port["port"] for port in service["spec"]["ports"]] == [8092, 8000]
    assert [port["containerPort"] for port in container(release, "router")["ports"]] == [8092, 8000]
    policies = policies_of(release)
    assert {"port": 8000, "protocol": "TCP"} in policies["kv-router"]["ingress"][0]["ports"]
    peers = policies["kv-engine"]["ingress"][0]["from"]
    routers = {"app.kubernetes.io/component": "router"}
    labels = [peer["podSelector"].get("matchLabels", {}) for peer in peers]
    assert any(routers.items() <= each.items() for each in labels)


def test_forwarders_without_a_token_for_their_routers_are_refused(helm):
    with pytest.raises(helm.HelmRenderError, match=r"forward\.routerToken\.secret"):
        objects({"tokens": {"secret": "callers", "key": "tokens.toml"}})


def test_restricted_access_still_admits_forwarders():
    gateway = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    release = objects({"networkPolicy": {"callers": [gateway]}})
    for name, policy in policies_of(release).items():
        if name in ("kv-router", "kv-engine"):
            peers = policy["ingress"][0]["from"]
            chosen = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
            forwarders = {"app.kubernetes.io/component": "forward"}
            assert any(forwarders.items() <= labels.items() for labels in chosen)


@pytest.mark.parametrize("has_forwarders", [True, False])
def test_with_tokens_no_caller_reaches_engines_past_them(has_forwarders):
    token = {"routerToken": {"secret": "callers"}}
    tokens = {"tokens": {"secret": "callers"}, "forward": {"enabled": has_forwarders, **token}}
    gateway = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    for given, chosen in (
        (tokens, []),
        ({**tokens, "networkPolicy": {"engineCallers": [gateway]}}, [gateway]),
        ({"networkPolicy": {"callers": [gateway]}}, [gateway]),
        ({"networkPolicy": {"engineCallers": []}}, []),
    ):
        rules = policies_of(objects(given))["kv-engine"]["ingress"]
        assert all(rule["from"] for rule in rules)
        peers = [peer for rule in rules for peer in rule["from"] if "podSelector" in peer]
        callers = [peer for peer in peers if "namespaceSelector" not in peer]
        others = [each for each in callers if not _is_of_release(each)]
        assert others == chosen


def _is_of_release(peer):
    labels = peer["podSelector"].get("matchLabels", {})
    return labels.get("app.kubernetes.io/component") in ("forward", "router")


def policies_of(release):
    return {each["metadata"]["name"]: each["spec"] for each in of_kind(release, "NetworkPolicy")}


def test_egress_is_closed_where_it_is_not_needed_and_where_configured():
    open_policies = policies_of(objects(KEPT["fleet.yaml"]))
    closed = policies_of(objects(KEPT["monitored.yaml"]))
    assert open_policies["kv-nats"]["egress"] == closed["kv-redis"]["egress"] == []
    assert all("egress" not in open_policies[name] for name in ("kv-router", "kv-forward"))
    for name in ("kv-router", "kv-forward", "kv-indexer"):
        names, release = closed[name]["egress"]
        assert {port["port"] for port in names["ports"]} == {53}
        chosen = release["to"][0]["podSelector"]["matchLabels"]
        assert chosen == {"app.kubernetes.io/instance": "kv"}
    *_, cluster, also = policies_of(objects(SLICES))["kv-router"]["egress"]
    assert {port["port"] for port in cluster["ports"]} == {443, 6443}
    assert also == {"ports": [{"port": 4318}]}


def test_event_ports_of_every_rank_are_open_to_routers_in_direct_mode():
    *_, events = policies_of(objects(SLICES))["kv-engine"]["ingress"]
    ranges = {(port["port"], port["endPort"]) for port in events["ports"]}
    assert ranges == {(5557, 5560), (5657, 5660)}


def test_large_numbers_and_what_config_says_itself_arrive_as_they_are(settings):
    wanted = {"index_max_blocks": 67108864, "trace_ratio": 0.00001, "use_kv_events": False}
    values = {"router": {"config": wanted | {"session_affinity_ttl_s": 60, "drain_s": 0.5}}}
    router = container(objects(KEPT["monitored.yaml"] | values), "router")
    names = [each["name"] for each in router["env"]]
    assert len(names) == len(set(names))
    config = flat(load_router_config([], settings(router)))
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert config.session_affinity_ttl_s == 60


def test_an_image_by_digest_is_that_image():
    digest = f"sha256:{'0' * 64}"
    image = {"repository": "here/router", "tag": digest}
    release = objects({"router": {"image": image}})
    assert container(release, "router")["image"] == f"here/router@{digest}"


SWITCHES = ("nats", "redis", "discovery", "monitoring", "networkPolicy")


@pytest.mark.parametrize("parts", list(product((False, True), repeat=len(SWITCHES))))
def test_every_combination_of_parts_is_a_release(parts):
    """Every reference within it is met; without engines where no process reads them."""
    values = {name: {"enabled": part} for name, part in zip(SWITCHES, parts, strict=True)}
    values["indexer"] = {"enabled": parts[0] == parts[1]}
    values["forward"] = {"enabled": parts[1] == parts[2]}
    has_engines = values["nats"]["enabled"] or values["discovery"]["enabled"]
    scaling = {"enabled": values["monitoring"]["enabled"]}
    engines = {"enabled": has_engines, "autoscaling": scaling}
    release = objects(values | {"engines": engines, "router": {"autoscaling": scaling}})
    servers = {name for name in ("nats", "redis") if values[name]["enabled"]}
    assert {name for name, _ in pods(release)} & {"kv-nats", "kv-redis"} == {
        f"kv-{name}" for name in servers
    }
    test_names_are_unique(release)
    test_selectors_match_existing_workloads(release)
    test_containers_have_no_rights_that_they_do_not_need(release)
    test_every_account_is_used_and_every_mount_is_a_volume(release)
    test_every_container_is_probed(release)


def test_the_agent_is_a_native_sidecar_that_is_ready_without_its_engine_having_started():
    (agent,) = next(pod for name, pod in pods(objects({})) if name == "kv-engine")["initContainers"]
    assert agent["restartPolicy"] == "Always"
    assert "startupProbe" not in agent


def test_an_engine_has_the_connector_and_its_agent_reaches_the_tiers(settings):
    release = objects(EVERYTHING)
    pod = next(pod for name, pod in pods(release) if name == "kv-engine")
    copying, agent = pod["initContainers"]
    (target,), engine = copying["volumeMounts"], container(release, "engine")
    assert {**target, "readOnly": True} in engine["volumeMounts"]
    assert {"name": "PYTHONPATH", "value": target["mountPath"]} in engine["env"]
    args = engine["args"]
    asked = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert asked["kv_load_failure_policy"] == "recompute"
    tiers = connector_settings(asked["kv_connector_extra_config"])
    config = flat(load_agent_config([], settings(agent)))
    assert (config.control_listen, config.tiers) == (tiers.control_listen, tiers.tier_events)
    assert tiers.worker.name == "$(POD_NAME)"
    assert tiers.tiers.disk_cache_dir in {each["mountPath"] for each in engine["volumeMounts"]}


def test_engine_event_ports_are_closed_by_default():
    release = objects({})
    ports = {5557, 5657}
    for policy in of_kind(release, "NetworkPolicy"):
        assert not ports & set(named_ports(policy["spec"]))
    closed = {each["metadata"]["name"] for each in of_kind(release, "NetworkPolicy")}
    assert closed == {name for name, _ in pods(release)}


def test_secrets_are_files():
    release = objects(EVERYTHING)
    for name in ("router", "indexer", "agent"):
        env, mounts = (
            environment(container(release, name)),
            container(release, name)["volumeMounts"],
        )
        files = [value for key, value in env.items() if key.endswith(("CREDS_FILE", "TOKEN_FILE"))]
        assert len(files) == 2
        paths = [mount["mountPath"] for mount in mounts]
        assert all(any(file.startswith(f"{path}/") for path in paths) for file in files)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router": {"replicas": 0}}, "minimum"),
        ({"engines": {"autoscaling": {"prometheusUrl": "prometheus:9090"}}}, "pattern"),
        ({"router": {"replica": 2}}, "replica"),
        ({"router": {"config": {"Policy": "x"}}}, "Policy"),
        ({"router": {"config": {"drian_s": 5}}}, "drian_s"),
        ({"router": {"config": {"drain_s": "long"}}}, "drain_s"),
        ({"router": {"config": {"http_port": 80}}}, "http_port"),
        ({"forward": {"config": {"max_attempts": 0}}}, "max_attempts"),
        ({"engines": {"config": {"block_key": "secret"}}}, "block_key"),
        ({"discovery": {"worker": {"blocksize": 16}}}, "blocksize"),
        ({"natsUrl": "http://nats:4222"}, "natsUrl"),
        ({"engines": {"port": 0}}, "port"),
        ({"nats": {"storage": "much"}}, "storage"),
        ({"networkPolicy": {"callers": []}}, "callers"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, said, helm):
    with pytest.raises(helm.HelmValuesError, match=said):
        objects(values)


@pytest.mark.parametrize(("name", "block_size"), [("direct.yaml", 16), ("slices", 32)])
def test_routers_without_a_bus_find_their_engines(name, block_size, settings):
    release = objects(ALL[name])
    config = flat(load_router_config([], settings(container(release, "router"))))
    engine = next(each for each in pods(release) if each[0] == "kv-engine")[1]
    assert "initContainers" not in engine
    found = Found("kv-engine-0", "10.0.0.7", is_ready=True, is_ending=False)
    worker = registration(config.discovery_worker, "kv-router", found, 7)
    assert worker.block_size == block_size
    assert missing(worker) == []
    events = json.loads(engine["containers"][0]["args"][4])
    events, replay = (events[k].replace("*", "10.0.0.7") for k in ("endpoint", "replay_endpoint"))
    if name == "slices":
        events, replay = (
            {r: rank_endpoint(each, r) for r in range(4)} for each in (events, replay)
        )
        assert (worker.kv_events_endpoints, worker.replay_endpoints) == (events, replay)
    else:
        assert (worker.kv_events_endpoint, worker.replay_endpoint) == (events, replay)
    wanted = dict(each.split("=") for each in config.discovery_selector.split(","))
    labels = of_kind(release, "StatefulSet")[0]["spec"]["template"]["metadata"]["labels"]
    assert wanted.items() <= labels.items()
    policies = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(release, "NetworkPolicy")
    }
    assert {5557, 5657} <= set(named_ports(policies["kv-engine"]))
    rules = of_kind(release, "Role")[0]["rules"]
    assert all(rule["verbs"] == ["list", "watch"] for rule in rules)
    assert {each for rule in rules for each in rule["resources"]} == {
        config.discovery,
        "endpointslices",  # of the routers' own Service
    }


def test_pool_has_its_engines_and_its_picker():
    release = objects(KEPT["gateway.yaml"])
    (pool,), (route,) = of_kind(release, "InferencePool"), of_kind(release, "HTTPRoute")
    sets = of_kind(release, "StatefulSet")
    engine = next(s for s in sets if s["metadata"]["name"] == "kv-engine")["spec"]["template"]
    labels, annotations = engine["metadata"]["labels"], engine["metadata"]["annotations"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert annotations == {EVENTS_PORT: "5557", REPLAY_PORT: "5657"}
    assert "initContainers" not in engine["spec"]
    picker = pool["spec"]["endpointPickerRef"]
    service = next(
        s for s in of_kind(release, "Service") if s["metadata"]["name"] == picker["name"]
    )
    (port,) = service["spec"]["ports"]
    assert port["port"] == picker["port"]["number"]
    assert port["targetPort"] in [each["name"] for each in container(release, "router")["ports"]]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])


def test_gateway_alone_reaches_the_picker_and_goes_on_to_engines():
    policies = policies_of(objects(KEPT["gateway.yaml"]))
    gateway = {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "inference"}}
    admitted = {}
    for rule in policies["kv-router"]["ingress"]:
        for port in rule["ports"]:
            admitted[port["port"]] = rule["from"]
    assert admitted[9002] == admitted[9003] == [{"podSelector": gateway}]
    assert {"podSelector": gateway} not in admitted[8092]
    engine = policies["kv-engine"]["ingress"]
    assert {"podSelector": gateway} in engine[0]["from"]
    routers = {5557, 5657} & {port["port"] for rule in engine for port in rule["ports"]}
    assert routers == {5557, 5657}


def test_rights_of_routers_with_a_picker_are_to_list_and_watch_one_pool():
    (role,) = of_kind(objects(ALL["pickers"]), "Role")
    assert all(rule["verbs"] == ["list", "watch"] for rule in role["rules"])
    found = {
        each: rule.get("resourceNames") for rule in role["rules"] for each in rule["resources"]
    }
    assert found == {
        "pods": None,
        "inferencepools": ["kv"],
        "inferenceobjectives": None,
        "inferencemodelrewrites": None,
        "endpointslices": None,  # of the routers' own Service
    }


@pytest.mark.parametrize("name", ["direct.yaml", "slices", "pickers"])
def test_routers_without_a_bus_find_and_reach_each_other(name, settings):
    release = objects({**ALL[name], "networkPolicy": {"callers": [GATEWAY]}})
    config = load_router_config([], settings(container(release, "router")))
    namespace, service = config.peers.router_service.split("/")
    (found,) = (s for s in of_kind(release, "Service") if s["metadata"]["name"] == service)
    assert found["metadata"]["namespace"] == namespace
    workloads = of_kind(release, "Deployment")
    (routers,) = (each for each in workloads if each["metadata"]["name"] == "kv-router")
    labels = routers["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"].items() <= labels.items()
    assert config.shares_reservations
    assert bool(config.peers.router_peers_token_file) == bool(config.security.token_file)
    rule = policies_of(release)["kv-router"]["ingress"][0]
    assert {"port": config.http.http_port, "protocol": "TCP"} in rule["ports"]
    peers = [each["podSelector"]["matchLabels"] for each in rule["from"] if "podSelector" in each]
    assert any(each.items() <= labels.items() for each in peers)


def test_routers_with_tokens_and_without_a_bus_need_one_for_each_other(helm):
    without = {**SLICES, "router": {}}
    with pytest.raises(helm.HelmRenderError, match=r"router\.peerToken\.secret"):
        objects(without)
    apart = objects({**without, "router": {"config": {"router_replica_sync": False}}})
    assert "KV_ROUTER_ROUTER_SERVICE" not in environment(container(apart, "router"))
    assert "KV_ROUTER_ROUTER_SERVICE" not in environment(container(objects({}), "router"))


def test_picker_of_others_pods_reaches_its_certificate():
    release = objects(ALL["pickers"])
    (pool,) = of_kind(release, "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"] == {"app": "vllm"}
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [8000, 8001]
    router = container(release, "router")
    assert environment(router)["KV_ROUTER_EPP_CERT_FILE"] == "/run/secrets/epp/tls.crt"
    assert "/run/secrets/epp" in [each["mountPath"] for each in router["volumeMounts"]]
    other = {"create": False, "name": "qwen"}
    named = objects({**PICKERS, "epp": {**PICKERS["epp"], "pool": other}})
    assert of_kind(named, "InferencePool") == []
    assert environment(container(named, "router"))["KV_ROUTER_EPP_POOL"] == "kv-router/qwen"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epp": {"enabled": True}}, "epp.callers"),
        ({**PICKERS, "discovery": {"enabled": True}}, "discovery.enabled"),
    ],
)
def test_picker_with_contradictions_is_refused(values, said, helm):
    with pytest.raises(helm.HelmRenderError, match=said):
        objects(values)


def test_agents_without_a_bus_are_refused(helm):
    with pytest.raises(helm.HelmRenderError, match="natsUrl: agents beside engines need a bus"):
        objects({"nats": {"enabled": False}})


def test_the_schema_is_made_from_the_processes_settings():
    """`make manifests` writes it anew."""
    assert (CHART / "values.schema.json").read_text() == chart_schema.text()


@pytest.mark.parametrize("config", chart_schema.ELSEWHERE)
def test_whatever_other_values_say_is_a_setting(config):
    assert {each.name for each in settings_of(config())} >= chart_schema.ELSEWHERE[config]


def test_every_value_is_in_the_schema():
    check(yaml.safe_load((CHART / "values.yaml").read_text()), chart_schema.schema())


def check(values, schema):
    """Whatever may be set has a default that says so, except where anything goes."""
    if isinstance(values, dict) and "properties" in schema:
        assert not schema["additionalProperties"]
        assert {*values} <= {*schema["properties"]}
        for name, value in values.items():
            check(value, schema["properties"][name])
