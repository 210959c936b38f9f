"""The schema of the chart's values; run as a program, this writes `values.schema.json`.

Settings of a process are those of its configuration, with their types and limits; what other values
of the chart say is none of them, and secrets are files.
"""

import inspect
import json
import sys
from pathlib import Path

import msgspec

from router.config.indexer import IndexerConfig
from router.config.router import RouterConfig
from router.forward.config import ForwardConfig
from router.protocol.workers import WorkerRegistration
from router.runtime.process.redaction import SECRET as MASKED
from router.runtime.process.settings import settings_of as all_settings
from worker_agent.config.reference import BridgeConfig

FILE = Path(__file__).parents[3] / "deploy/chart/values.schema.json"
SHARED = {"host", "http_port", "insecure_public_bind", "namespace", "nats_url"}
ELSEWHERE = {
    RouterConfig: SHARED
    | {"name", "discovery", "discovery_selector", "discovery_worker"}
    | {"epp_pool", "epp_port", "epp_health_port", "epp_cert_file", "epp_key_file"}
    | {"router_service", "router_peers_token_file"},
    ForwardConfig: SHARED | {"router_url"},
    IndexerConfig: SHARED | {"name"},
    BridgeConfig: SHARED | {"name", "worker_id"},
}
"""Settings that other values of the chart make."""


def _object(required=(), /, **properties):
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def _fields(kind, without):
    """The fields of a type, with their limits."""
    whole = msgspec.json.schema(kind)
    ((_, own),) = [(k, v) for k, v in whole["$defs"].items() if k == kind.__name__]
    fields = {k: v for k, v in own["properties"].items() if k not in without}
    return {name: _inlined(field, whole["$defs"]) for name, field in fields.items()}


def _inlined(schema, known):
    if isinstance(schema, list):
        return [_inlined(each, known) for each in schema]
    if isinstance(schema, str):
        return inspect.cleandoc(schema)  # of docstrings, from which Python 3.13 takes the indent
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(known[schema["$ref"].rpartition("/")[2]], known)
    return {key: _inlined(each, known) for key, each in schema.items() if key != "default"}


def settings_of(config):
    """What `config` may say for a process."""
    settings = [each for each in all_settings(config()) if each.name not in ELSEWHERE[config]]
    return [each for each in settings if not each.has_mark(MASKED)]


def _settings(config):
    settings = settings_of(config)
    schemas, known = msgspec.json.schema_components([each.type for each in settings])
    pairs = zip(settings, schemas, strict=True)
    return _object(**{each.name: _inlined(schema, known) for each, schema in pairs})


def _whole(least, most):
    return {"type": "integer", "minimum": least, "maximum": most}


def _texts(**limits):
    return {"type": "array", "items": {"type": "string"}, **limits}


SWITCH = {"type": "boolean"}
TEXT = {"type": "string", "minLength": 1}
ANY_TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
ANYTHING = {"type": "object"}
OBJECTS = {"type": "array", "items": ANYTHING}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$|^$"}
SIZE = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|[kMGTP]|[KMGTP]i)?$"}
SECRET = _object(("secret", "key"), secret=NAME, key=TEXT)
PORT, REPLICAS, HOOK = _whole(1, 65535), _whole(1, 64), _whole(0, 600)
PULLING = {"type": "string", "enum": ["Always", "IfNotPresent", "Never"]}
IMAGE = _object(
    ("repository", "tag", "pullPolicy"), repository=TEXT, tag=ANY_TEXT, pullPolicy=PULLING
)
RESOURCES = _object(requests=ANYTHING, limits=ANYTHING)
PEER = _object(podSelector=ANYTHING, namespaceSelector=ANYTHING, ipBlock=ANYTHING)
PEERS = {"type": "array", "minItems": 1, "items": PEER}
PLACED = {
    "podAnnotations": LABELS, "nodeSelector": LABELS, "tolerations": OBJECTS, "affinity": ANYTHING,
    "extraEnv": OBJECTS, "extraVolumes": OBJECTS, "extraVolumeMounts": OBJECTS,
}  # fmt: skip
SERVER = {"enabled": SWITCH, "image": IMAGE, "resources": RESOURCES, "global": ANYTHING}


def _process(config, **more):
    return _object(
        ("replicas", "config", "port", "preStopSeconds"),
        **more, replicas=REPLICAS, config=_settings(config), port=PORT, preStopSeconds=HOOK,
        resources=RESOURCES, **PLACED,
    )  # fmt: skip


def _picker():
    pool = _object(
        ("create", "failureMode"),
        create=SWITCH, name=NAME, labels=LABELS,
        ports={"type": "array", "maxItems": 8, "uniqueItems": True, "items": PORT},
        failureMode={"type": "string", "enum": ["FailOpen", "FailClose"]},
    )  # fmt: skip
    return _object(
        ("enabled", "port", "healthPort"),
        enabled=SWITCH, port=PORT, healthPort=PORT, certificate=_object(("secret",), secret=NAME),
        pool=pool, gateway=_object((), name=NAME, namespace=NAME), hostnames=_texts(),
        callers={"type": "array", "items": PEER},
    )  # fmt: skip


def _engines():
    gigabytes = {"type": "number", "minimum": 0}
    connector = _object(
        ("enabled", "hostCacheGb", "controlPort", "tiersPort"),
        enabled=SWITCH, hostCacheGb=gigabytes, diskCacheGb=_whole(0, 1_000_000),
        diskStorageClass=NAME, controlPort=PORT, tiersPort=PORT, config=ANYTHING,
    )  # fmt: skip
    scaling = _object(
        ("enabled", "minReplicas", "maxReplicas", "prometheusUrl", "scaleDownSeconds"),
        enabled=SWITCH, minReplicas=_whole(0, 4096), maxReplicas=_whole(1, 4096),
        prometheusUrl={"type": "string", "pattern": "^https?://[^/ ]+"},
        scaleDownSeconds=_whole(1, 1800),
    )  # fmt: skip
    return _object(
        ("enabled", "replicas", "model", "port", "config"),
        enabled=SWITCH, replicas=_whole(0, 4096), image=IMAGE, agentImage=IMAGE, model=TEXT,
        maxNumBatchedTokens={"type": "integer", "minimum": 1}, args=_texts(), port=PORT,
        eventsPort=PORT, replayPort=PORT, agentPort=PORT, config=_settings(BridgeConfig),
        drainSeconds=_whole(0, 3600), startSeconds=_whole(5, 86400), resources=RESOURCES,
        agentResources=RESOURCES, securityContext=ANYTHING, sharedMemory=SIZE, cacheClaim=NAME,
        connector=connector, autoscaling=scaling, **PLACED,
    )  # fmt: skip


def schema():
    """The whole of it."""
    scaling = _object(
        ("enabled",), enabled=SWITCH, minReplicas=REPLICAS, maxReplicas=REPLICAS, metric=TEXT,
        target={"type": ["integer", "string"]},
    )  # fmt: skip
    properties = {
        "natsUrl": {"type": "string", "pattern": "^$|^(nats|tls)://[^/ ]+$"},
        "natsCredentials": SECRET,
        "namespace": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "tokens": SECRET,
        "imagePullSecrets": {"type": "array", "items": _object(("name",), name=TEXT)},
        "router": _process(RouterConfig, image=IMAGE, autoscaling=scaling, peerToken=SECRET),
        "discovery": _object(
            ("enabled", "kind"),
            enabled=SWITCH,
            kind={"type": "string", "enum": ["pods", "endpointslices"]},
            selector={"type": "string", "maxLength": 1024},
            worker=_object(**_fields(WorkerRegistration, {"worker_id"})),
        ),
        "epp": _picker(),
        "forward": _process(ForwardConfig, enabled=SWITCH, routerToken=SECRET),
        "indexer": _process(IndexerConfig, enabled=SWITCH),
        "engines": _engines(),
        "networkPolicy": _object(
            ("enabled", "callers", "monitoring"),
            enabled=SWITCH,
            callers=PEERS,
            engineCallers={"type": ["array", "null"], "items": PEER},
            monitoring=PEERS,
            egress=_object(("enabled",), enabled=SWITCH, also=OBJECTS),
        ),
        "monitoring": _object(
            ("enabled",),
            enabled=SWITCH,
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
            labels=LABELS,
            token=SECRET,
            dashboardLabels=LABELS,
        ),
        "nats": _object(("enabled",), **SERVER, storage=SIZE, storageClassName=ANY_TEXT),
        "redis": _object(
            ("enabled",), **SERVER, maxMemory={"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"}
        ),
        "global": ANYTHING,
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kv-router"}
    return head | _object([name for name in properties if name != "global"], **properties)


def text():
    """As it is kept."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    sys.stdout.write(f"{FILE}\n")
