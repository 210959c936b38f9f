"""A real Envoy before an endpoint picker, and what a gateway says to one, said by a test."""

import asyncio
import json
import os
import signal
import subprocess
from contextlib import asynccontextmanager

import httpx
from grpc import aio

from router.forward.picker.wire.kv_router_picker_pb2 import (
    HeaderMap,
    HeaderValue,
    Health,
    HealthCheck,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from support.engines.upstreams import Upstream
from support.processes.servers import eventually, free_port

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
SUBSET = f"{DESTINATION}-subset"
_TYPES = "type.googleapis.com/envoy.extensions"

# ── What a gateway says ──────────────────────────────────────────────────────────────────────────


def head(
    path="/v1/completions", method="POST", *, eos=False, mode=4, answers=0, subset=..., **more
):
    """The first message. `subset`: the value of the hint; `more`: headers, with _ for -."""
    pairs = {":method": method, ":path": path, ":authority": "pool", ":scheme": "http"}
    pairs |= {} if method == "GET" else {"content-type": "application/json"}
    pairs |= {name.replace("_", "-"): value for name, value in more.items()}
    message = ProcessingRequest(
        request_headers=headers(pairs, eos=eos),
        protocol_config=ProtocolConfiguration(request_body_mode=mode, response_body_mode=answers),
    )
    if subset is not ...:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        fields.update({SUBSET: subset})
    return message


def headers(pairs, *, eos=False):
    pairs = pairs.items() if isinstance(pairs, dict) else pairs
    found = [HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs]
    return HttpHeaders(headers=HeaderMap(headers=found), end_of_stream=eos)


def body(data=b"", *, eos=True):
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=eos))


def trailers():
    return ProcessingRequest(request_trailers=HttpTrailers())


def answer_head(status=200, served=None, *, eos=False):
    message = ProcessingRequest(response_headers=headers({":status": str(status)}, eos=eos))
    if served is not None:
        message.metadata_context.filter_metadata["envoy.lb"].update({SERVED: served})
    return message


def answer_body(data=b"", *, eos=False):
    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=eos))


def completion(**fields):
    return json.dumps({"model": "default", "prompt": [1, 2, 3, 4], **fields}).encode()


# ── What a picker answers ────────────────────────────────────────────────────────────────────────


def kinds(answers):
    return [each.WhichOneof("response") for each in answers]


def set_headers(answer):
    kind = answer.WhichOneof("response")
    mutation = getattr(answer, kind).response.header_mutation
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def removed_headers(answer):
    mutation = getattr(answer, answer.WhichOneof("response")).response.header_mutation
    return set(mutation.remove_headers)


def metadata(answer):
    return dict(answer.dynamic_metadata["envoy.lb"])


def chunks(answers, field="request_body"):
    """The streamed bodies among answers, as (bytes, end of stream)."""
    found = [getattr(each, field) for each in answers if each.WhichOneof("response") == field]
    streamed = [each.response.body_mutation.streamed_response for each in found]
    return [(each.body, each.end_of_stream) for each in streamed]


def refusal(answers):
    """Status and error of an immediate response."""
    (answer,) = [each.immediate_response for each in answers if each.HasField("immediate_response")]
    return answer.status.code, json.loads(answer.body)["error"]


class Gateway:
    """A gateway without Envoy: streams to a picker at a port, without TLS."""

    def __init__(self, port, credentials=None):
        self.target = f"127.0.0.1:{port}"
        self._credentials = credentials
        self._channel = None

    @asynccontextmanager
    async def connected(self):
        options = [("grpc.ssl_target_name_override", "kv-router")]
        if self._credentials is None:
            self._channel = aio.insecure_channel(self.target)
        else:
            self._channel = aio.secure_channel(self.target, self._credentials, options)
        async with self._channel:
            yield self

    @asynccontextmanager
    async def stream(self):
        call = self._channel.stream_stream(PROCESS)()
        try:
            yield GatewayStream(call)
        finally:
            call.cancel()
            await asyncio.wait_for(_ended(call), 60)

    async def status(self, service=""):
        check = self._channel.unary_unary(CHECK)
        data = await check(HealthCheck(service=service).SerializeToString(), timeout=10)
        return Health.FromString(data).status

    async def log(self, *messages):
        """Send messages of access logs."""
        call = self._channel.stream_unary(LOGS)()
        for each in messages:
            await call.write(each.SerializeToString())
        await call.done_writing()
        return await call


async def _ended(call):
    try:
        await call.code()
    except asyncio.CancelledError:
        if not call.done():
            raise


class GatewayStream:
    """One request."""

    def __init__(self, call):
        self._call = call

    async def send(self, *messages):
        for each in messages:
            await self._call.write(each if isinstance(each, bytes) else each.SerializeToString())

    async def received(self, count=1):
        """The next answers."""
        found = []
        for _ in range(count):
            data = await asyncio.wait_for(self._call.read(), 60)
            assert isinstance(data, bytes), await self._call.code()
            found.append(ProcessingResponse.FromString(data))
        return found

    async def end(self):
        """Half-close, and wait until the picker has ended the stream; return its status."""
        await self._call.done_writing()
        return await asyncio.wait_for(self._call.code(), 60)


# ── Engines ──────────────────────────────────────────────────────────────────────────────────────


class ChunkedEngine(Upstream):
    """An engine that also reads chunked bodies, as gateways send them; `bodies`: what it read."""

    def __init__(self, script):
        super().__init__(script)
        self.bodies = []

    async def read_request(self, reader):
        if not await super().read_request(reader):
            return False
        text, data = self.requests[-1]
        if "transfer-encoding: chunked" in text.lower():
            data = b""
            while size := int(await reader.readline(), 16):
                data += await reader.readexactly(size)
                await reader.readline()
            while (await reader.readline()).strip():
                pass
        if data:
            self.bodies.append(data)
        return True


# ── Envoy ────────────────────────────────────────────────────────────────────────────────────────


def _address(at):
    host, _, port = at.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _hosts(name, addresses):
    endpoints = [{"endpoint": {"address": _address(each)}} for each in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


_MANY = {"max_connections": 100000, "max_pending_requests": 100000, "max_requests": 100000}
_BREAKERS = {"thresholds": [_MANY]}
_POLICIES = f"{_TYPES}.load_balancing_policies"


def _pool(engines):
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{_POLICIES}.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{_POLICIES}.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
            {"header": DESTINATION},
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": SERVED}]},
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": _BREAKERS,
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": _hosts("pool", engines),
    }


def _original_destination():
    return {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "circuit_breakers": _BREAKERS,
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _picker(ports, *, has_tls, is_checked):
    http = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    cluster = {
        "name": "epp",
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": _BREAKERS,
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http
        },
        "load_assignment": _hosts("epp", [f"127.0.0.1:{port}" for port in ports]),
    }
    if is_checked:
        check = {
            "timeout": "1s",
            "interval": "0.2s",
            "no_traffic_interval": "0.2s",
            "unhealthy_threshold": 2,
            "healthy_threshold": 1,
            "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
        }
        check |= {"tls_options": {"alpn_protocols": ["h2"]}} if has_tls else {}
        cluster["health_checks"] = [check]
    if has_tls:
        tls = f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext"
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": tls, "common_tls_context": {"validation_context": {}}},
        }
    return cluster


def _ext_proc(response_body, request_body, *, fails_open):
    namespaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    mode = {
        "request_header_mode": "SEND",
        "request_body_mode": request_body,
        "request_trailer_mode": "SEND" if request_body != "BUFFERED" else "SKIP",
        "response_header_mode": "SEND",
        "response_body_mode": response_body,
        "response_trailer_mode": "SEND",
    }
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "epp", "authority": "epp"}},
            "message_timeout": "60s",
            "failure_mode_allow": fails_open,
            "processing_mode": mode,
            "metadata_options": {
                "forwarding_namespaces": namespaces,
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _subset(addresses):
    value = {SUBSET: addresses}
    return {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
        },
    }


def bootstrap(
    port,
    admin_port,
    picker_port,
    engines,
    *,
    has_picker=True,
    has_tls=True,
    is_checked=True,
    fails_open=False,
    request_body="FULL_DUPLEX_STREAMED",
    response_body="NONE",
    subset=None,
    is_original_destination=False,
    has_log=True,
):
    """The configuration of an Envoy that asks a picker, in each variant of the gateways.

    `picker_port`: one, or a tuple of those of several pickers, which are asked in turn.
    """
    retries = "connect-failure,refused-stream,reset-before-request"
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "pool",
            "timeout": "0s",
            "retry_policy": {"retry_on": retries, "num_retries": 2},
        },
    }
    log = {
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": {
            "@type": f"{_TYPES}.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "kv-router",
                "transport_api_version": "V3",
                "buffer_size_bytes": 0,
                "grpc_service": {"envoy_grpc": {"cluster_name": "epp"}},
            },
        },
    }
    filters = [] if subset is None else [_subset(subset)]
    filters += [_ext_proc(response_body, request_body, fails_open=fails_open)] * has_picker
    router = {"@type": f"{_TYPES}.filters.http.router.v3.Router"}
    filters.append({"name": "envoy.filters.http.router", "typed_config": router})
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "stream_idle_timeout": "0s",
        "http_protocol_options": {"enable_trailers": True},
        "access_log": [log] * (has_log and has_picker),
        "route_config": {"virtual_hosts": [{"name": "pool", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    name = "envoy.filters.network.http_connection_manager"
    listener = {
        "name": "gateway",
        "address": _address(f"127.0.0.1:{port}"),
        "filter_chains": [{"filters": [{"name": name, "typed_config": manager}]}],
    }
    pool = _original_destination() if is_original_destination else _pool(engines)
    ports = picker_port if isinstance(picker_port, tuple) else (picker_port,)
    picker = _picker(ports, has_tls=has_tls, is_checked=is_checked)
    return {
        "admin": {"address": _address(f"127.0.0.1:{admin_port}")},
        "node": {"id": "test", "cluster": "test"},
        "static_resources": {"listeners": [listener], "clusters": [pool, picker]},
    }


class Envoy:
    """An Envoy process, of the binary that $ENVOY names."""

    def __init__(self, directory, picker_port, engines, **variant):
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = bootstrap(self.port, self.admin_port, picker_port, engines, **variant)
        self._path = directory / f"envoy-{self.port}.json"
        self._path.write_text(json.dumps(config))
        self._log = self._path.with_suffix(".log")
        self.popen = None

    @asynccontextmanager
    async def running(self):
        self._start()
        try:
            async with httpx.AsyncClient() as client:
                await eventually(lambda: self._is_ready(client))
            yield self
        finally:
            self.kill()

    def _start(self):
        command = [os.environ["ENVOY"], "-c", str(self._path), "--concurrency", "1"]
        command += ["--use-dynamic-base-id", "--log-level", "warning"]
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(command, stdout=log, stderr=log)

    def restart(self):
        """Kill it, and start it at the same ports."""
        self.kill()
        self._start()

    def kill(self):
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    async def stats(self):
        """Its counters of the picker's filter."""
        async with httpx.AsyncClient() as client:
            at = f"http://127.0.0.1:{self.admin_port}/stats"
            found = await client.get(at, params={"filter": "ext_proc", "format": "json"})
        return {
            each["name"].rpartition(".")[2]: each["value"]
            for each in found.json()["stats"]
            if "value" in each
        }

    async def _is_ready(self, client):
        assert self.popen.poll() is None, self._log.read_text()[-2000:]
        try:
            ready = await client.get(f"http://127.0.0.1:{self.admin_port}/ready")
            health = await client.get(f"http://127.0.0.1:{self.admin_port}/clusters?format=json")
        except httpx.HTTPError:
            return False
        return ready.status_code == 200 and not _is_failing(health.json())


def _is_failing(clusters):
    """Whether the picker has failed its health check, or was not checked yet."""
    for cluster in clusters["cluster_statuses"]:
        for host in cluster.get("host_statuses", ()):
            if cluster["name"] == "epp" and host["health_status"].get("failed_active_health_check"):
                return True
    return False
