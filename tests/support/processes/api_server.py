"""A Kubernetes API server reduced to what discovery asks of one: lists in pages, watches with
versions, 410 for those it has forgotten, tokens. Over real HTTP.
"""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from support.processes.http_server import LocalHttpServer

PODS = "/api/v1/namespaces/llm/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
LABELS = "app=vllm"


def pod(name, ip="127.0.0.1", *, is_ready=True, is_ending=False, said=None, labels=LABELS):
    metadata = {"name": name, "namespace": "llm", "labels": dict([labels.split("=")])}
    if said is not None:
        metadata["annotations"] = {"kv-router/worker": json.dumps(said)}
    if is_ending:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    status = {"phase": "Running", "podIP": ip, "conditions": [ready]}
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}


def endpoint_slice(name, *endpoints):
    """Endpoints are (pod, address, ready)."""
    metadata = {"name": name, "namespace": "llm", "labels": dict([LABELS.split("=")])}
    listed = [
        {
            "addresses": [ip],
            "conditions": {"ready": ready, "serving": True, "terminating": not ready},
            "targetRef": {"kind": "Pod", "name": pod_name},
        }
        for pod_name, ip, ready in endpoints
    ]
    return {"kind": "EndpointSlice", "metadata": metadata, "endpoints": listed or None}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Be silent."""

    def do_GET(self):
        split = urlsplit(self.path)
        parameters = {key: values[0] for key, values in parse_qs(split.query).items()}
        self.api.asked.append(parameters)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if split.path != self.api.path:
            self._tell(404)
        elif self.api.token not in (None, token):
            self.api.refused += 1
            self._tell(401)
        elif "watch" in parameters:
            self._watch(parameters)
        else:
            self._tell(200, self.api.listed(parameters))

    def _tell(self, code, body=None):
        content = json.dumps(body or {"kind": "Status", "code": code}).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _watch(self, parameters):
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for line in self.api.changes(int(parameters["resourceVersion"])):
                self.wfile.write(json.dumps(line).encode() + b"\n")
                self.wfile.flush()


class FakeApiServer(LocalHttpServer):
    """`token`: the one that it takes. `forget` makes every version before this moment unknown;
    `asked` are the parameters of each request.
    """

    def __init__(self, path=PODS, token=None, page=500):
        super().__init__()
        self.path, self.token, self.page = path, token, page
        self.asked, self.refused = [], 0
        self._objects, self._log, self._forgotten = {}, [], 0
        self._version = 100
        self._is_broken = False
        self._changed = threading.Condition()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def put(self, each):
        name = each["metadata"]["name"]
        with self._changed:
            kind = "MODIFIED" if name in self._objects else "ADDED"
            self._note(kind, each)
            self._objects[name] = each

    def delete(self, name):
        with self._changed:
            self._note("DELETED", self._objects.pop(name))

    def bookmark(self):
        with self._changed:
            self._note("BOOKMARK", {"kind": "Pod", "metadata": {}})

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

    def _note(self, kind, each):
        self._version += 1
        metadata = {**each["metadata"], "resourceVersion": str(self._version)}
        self._log.append((self._version, kind, {**each, "metadata": metadata}))
        each["metadata"] = metadata
        self._changed.notify_all()

    def _handler(self):
        return type("Handler", (_Handler,), {"api": self})

    def listed(self, parameters):
        key, _, value = parameters["labelSelector"].partition("=")
        with self._changed:
            chosen = [
                o for o in self._objects.values() if o["metadata"]["labels"].get(key) == value
            ]
            first = int(parameters.get("continue", "0"))
            page = chosen[first : first + min(self.page, int(parameters["limit"]))]
            last = first + len(page)
            metadata = {"resourceVersion": str(self._version)}
            if last < len(chosen):
                metadata["continue"] = str(last)
            return {"kind": "List", "metadata": metadata, "items": page}

    def changes(self, version):
        """Lines of a watch from there on, as they come."""
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
            for _, kind, each in news:
                yield {"type": kind, "object": each}
