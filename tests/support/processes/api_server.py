"""A Kubernetes API server reduced to what discovery asks of one: lists in pages, watches with
versions, 410 for those it has forgotten, tokens, rights, kinds that are not installed. Over real
HTTP, and strict: it takes no object that a cluster would refuse.
"""

import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import jsonschema_rs
import kubernetes_validate

from support.processes.http_server import LocalHttpServer
from support.values.operator_schemas import SCHEMAS

VERSION = "1.37.0"
LABELS = "app=vllm"
POOLS = "inferencepools.inference.networking.k8s.io"
ALPHA = "llm-d.ai/v1alpha2"
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/\w+/namespaces/(?P<namespace>[^/]+)/(?P<plural>\w+)"
)
_CREATED = "2026-01-01T00:00:00Z"


def pod(
    name,
    ip="127.0.0.1",
    *,
    is_ready=True,
    is_ending=False,
    said=None,
    labels=LABELS,
    annotations=None,
):
    named = dict(each.split("=") for each in labels.split(","))
    metadata = {"name": name, "namespace": "llm", "labels": named}
    if said is not None:
        metadata["annotations"] = {"kv-router/worker": json.dumps(said)}
    if annotations is not None:
        metadata["annotations"] = annotations
    if is_ending:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    status = {"phase": "Running", "podIP": ip, "conditions": [ready]}
    spec = {"containers": []}
    return _object("v1", "Pod", metadata, spec=spec, status=status)


def endpoint_slice(name, *endpoints, labels=LABELS):
    """Endpoints are (pod, address, ready)."""
    metadata = {"name": name, "namespace": "llm", "labels": dict([labels.split("=")])}
    listed = [
        {
            "addresses": [ip],
            "conditions": {"ready": ready, "serving": True, "terminating": not ready},
            "targetRef": {"kind": "Pod", "name": pod_name},
        }
        for pod_name, ip, ready in endpoints
    ]
    version = "discovery.k8s.io/v1"
    return _object(version, "EndpointSlice", metadata, addressType="IPv4", endpoints=listed or None)


def pool(*ports, labels=LABELS, name="qwen"):
    spec = {
        "selector": {"matchLabels": dict([labels.split("=")])},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "kv-router", "port": {"number": 9002}},
    }
    return _object("inference.networking.k8s.io/v1", "InferencePool", _named(name), spec=spec)


def objective(name, priority=None, *, pool="qwen", version=ALPHA):
    spec = {"poolRef": {"name": pool}} | ({} if priority is None else {"priority": priority})
    return _object(version, "InferenceObjective", _named(name), spec=spec)


def rewrite(name, *rules, pool="qwen", created=_CREATED):
    """Rules are (names, targets); targets are names, or names with weights."""
    listed = [
        {
            "matches": [{"model": {"type": "Exact", "value": each}} for each in names],
            "targets": [_target(each) for each in targets],
        }
        for names, targets in rules
    ]
    spec = {"poolRef": {"name": pool}, "rules": listed}
    metadata = {**_named(name), "creationTimestamp": created}
    return _object(ALPHA, "InferenceModelRewrite", metadata, spec=spec)


def _target(each):
    if isinstance(each, str):
        return {"modelRewrite": each}
    return {"modelRewrite": each[0], "weight": each[1]}


def _named(name):
    return {"name": name, "namespace": "llm"}


def _object(version, kind, metadata, **rest):
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def check_object(each):
    """Raise an error for an object that a cluster would refuse."""
    schema = SCHEMAS.get(each["kind"])
    if schema is None:
        kubernetes_validate.validate(each, VERSION, strict=True)
    else:
        jsonschema_rs.validate(schema, each)


def _resource(each):
    """The full name of an object's kind, such as pods or inferencepools.GROUP."""
    group, _, _ = each["apiVersion"].rpartition("/")
    return f"{each['kind'].lower()}s" + (f".{group}" if group else "")


def _matches(each, parameters):
    """Whether an object has the labels and the name that a request asks for."""
    metadata = each["metadata"]
    labels = metadata.get("labels", {})
    wanted = [p.split("=") for p in parameters.get("labelSelector", "").split(",") if p]
    named = parameters.get("fieldSelector")
    has_labels = all(labels.get(key) == value for key, value in wanted)
    return has_labels and named in (None, f"metadata.name={metadata['name']}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Be silent."""

    def do_GET(self):
        split = urlsplit(self.path)
        parameters = {key: values[0] for key, values in parse_qs(split.query).items()}
        api, path = self.api, _PATH.fullmatch(split.path)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        plural, group = (path["plural"], path["group"]) if path else ("", None)
        resource = plural + (f".{group}" if group else "")
        api.asked.append({**parameters, "resource": resource})
        if api.token not in (None, token):
            api.refused += 1
            self._refuse(401, "Unauthorized")
        elif path is None or path["namespace"] != api.namespace or resource in api.unknown:
            self._refuse(404, "the server could not find the requested resource")
        elif resource in api.denied:
            verb = "watch" if "watch" in parameters else "list"
            self._refuse(
                403,
                f'{resource} is forbidden: User "system:serviceaccount:llm:kv-router" cannot '
                f'{verb} resource "{plural}" in API group "{group or ""}" in the namespace "llm"',
            )
        elif "watch" in parameters:
            self._watch(resource, parameters)
        else:
            self._tell(200, api.listed(resource, parameters))

    def _refuse(self, code, message):
        self._tell(code, {"kind": "Status", "code": code, "message": message})

    def _tell(self, code, body):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _watch(self, resource, parameters):
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for line in self.api.changes(resource, parameters):
                self.wfile.write(json.dumps(line).encode() + b"\n")
                self.wfile.flush()


class FakeApiServer(LocalHttpServer):
    """`token`: the one that it takes. `denied`: resources that may not be read, `unknown`: those
    that are not installed. `forget` makes every version before this moment unknown; `asked` are the
    parameters of each request, with its resource.
    """

    def __init__(self, token=None, page=500, namespace="llm"):
        super().__init__()
        self.token, self.page, self.namespace = token, page, namespace
        self.denied, self.unknown = set(), set()
        self.asked, self.refused = [], 0
        self._objects, self._log, self._forgotten = {}, [], 0
        self._version = 100
        self._is_broken = False
        self._changed = threading.Condition()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def put(self, *objects):
        for each in objects:
            check_object(each)
            self._put(_resource(each), each)

    def _put(self, resource, each):
        key = (resource, each["metadata"]["name"])
        with self._changed:
            before = self._objects.get(key)
            self._objects[key] = self._note(resource, before, each)

    def delete(self, name, resource="pods"):
        with self._changed:
            self._note(resource, self._objects.pop((resource, name)), None)

    def bookmark(self):
        with self._changed:
            self._note("", None, None)

    def break_watches(self):
        """End those that are, as a server does that goes away."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def forget(self):
        with self._changed:
            self._version += 1
            self._forgotten = self._version
            self._log.clear()
            self._changed.notify_all()

    def watches(self, resource):
        """The number of watches that were ever begun."""
        asked = [each for each in self.asked if each["resource"] == resource]
        return sum("watch" in each for each in asked)

    def _note(self, resource, before, after):
        self._version += 1
        after = after and _versioned(after, self._version)
        self._log.append((self._version, resource, before, after))
        self._changed.notify_all()
        return after

    def _handler(self):
        return type("Handler", (_Handler,), {"api": self})

    def listed(self, resource, parameters):
        with self._changed:
            own = [each for (kind, _), each in self._objects.items() if kind == resource]
            chosen = [each for each in own if _matches(each, parameters)]
            first = int(parameters.get("continue", "0"))
            page = chosen[first : first + min(self.page, int(parameters["limit"]))]
            last = first + len(page)
            metadata = {"resourceVersion": str(self._version)}
            if last < len(chosen):
                metadata["continue"] = str(last)
            return {"kind": "List", "metadata": metadata, "items": page}

    def changes(self, resource, parameters):
        """Lines of a watch from its version on, as they come."""
        version = int(parameters["resourceVersion"])
        with self._changed:
            self._is_broken = False
        while True:
            with self._changed:
                if version < self._forgotten:
                    status = {"kind": "Status", "code": 410, "message": "too old"}
                    yield {"type": "ERROR", "object": status}
                    return
                news = [each for each in self._log if each[0] > version]
                if not news:
                    if self._is_broken or self._server is None:
                        return
                    self._changed.wait(0.1)
                    continue
            version = news[-1][0]
            for number, kind, before, after in news:
                if kind == "":
                    yield _line("BOOKMARK", {"kind": "Pod", "metadata": {}}, number)
                elif kind == resource:
                    yield from _change(before, after, number, parameters)


def _change(before, after, number, parameters):
    """The line of a change as a watch with a selector sees it, if at all."""
    was, is_now = (each is not None and _matches(each, parameters) for each in (before, after))
    if is_now:
        yield _line("MODIFIED" if was else "ADDED", after, number)
    elif was:
        yield _line("DELETED", before, number)


def _line(kind, each, number):
    return {"type": kind, "object": _versioned(each, number)}


def _versioned(each, number):
    return {**each, "metadata": {**each["metadata"], "resourceVersion": str(number)}}
