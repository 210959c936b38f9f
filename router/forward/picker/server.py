"""The ports of a picker: streams and access logs of gateways, with TLS, and health."""

import asyncio
import datetime
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError
from msgspec import Struct

from router.config.picker import PickerConfig
from router.forward.picker.grpc_connection import (
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    GrpcConnection,
    GrpcStream,
    Services,
)
from router.forward.picker.picker import AccessLogCall, Picker, PickerCall
from router.forward.picker.pool import PoolView
from router.forward.picker.wire.kv_router_picker_pb2 import Health, HealthCheck
from router.runtime.http_server.server import listening
from router.runtime.security.edge import WatchedFiles, watch_forever
from router.runtime.security.tls import ServerTls

log = logging.getLogger(__name__)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
HEALTH = "grpc.health.v1.Health"

LIVENESS = "liveness"
READINESS = ("", "readiness", EXT_PROC, "inference-extension")
"""The names under which probes and gateways ask whether the picker is ready."""

KEEP_ALIVE_S = 20.0
"""Time without a word from a gateway after which it is pinged; and after which, in vain, it is
gone: it must not hold its streams."""

QUIET_S = 5.0
"""Time without new requests after which a draining picker ends: gateways have noticed."""

_HTTP2 = ("h2",)
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
_CERTIFICATE_YEARS = 10


class PickerPorts(Struct, frozen=True, eq=False):
    """The bound ports. `probes`: of the health service without TLS, or None."""

    gateways: socket.socket
    probes: socket.socket | None
    tls: ServerTls | None


@contextmanager
def picker_ports(config: PickerConfig, host: str) -> Iterator[PickerPorts]:
    """Bind the ports, and read the certificates, before anything is served. Raises ConfigError."""
    with ExitStack() as stack:
        gateways = stack.enter_context(listening(host, config.epp_port, "epp_port"))
        port, probes = config.epp_health_port, None
        if port:
            probes = stack.enter_context(listening(host, port, "epp_health_port"))
        tls = stack.enter_context(_tls(config)) if config.epp_tls else None
        yield PickerPorts(gateways, probes, tls)


@contextmanager
def _tls(config: PickerConfig) -> Iterator[ServerTls]:
    """Yield the TLS of gateways. Raises ConfigError."""
    certificate, key, clients = config.epp_cert_file, config.epp_key_file, config.epp_client_ca_file
    if certificate:
        yield ServerTls(certificate, key, clients, "epp", _HTTP2)
        return
    with TemporaryDirectory() as folder:  # of this user alone; OpenSSL reads files only
        at = Path(folder)
        for name, pem in zip(("key.pem", "certificate.pem"), self_signed(), strict=True):
            (at / name).write_bytes(pem)
        yield ServerTls(str(at / "certificate.pem"), str(at / "key.pem"), clients, "epp", _HTTP2)


class PickerServer:
    """The server. `max_connections`: of gateways; beyond it, connections are closed at once."""

    def __init__(
        self, ports: PickerPorts, picker: Picker, pool: PoolView, max_connections: int
    ) -> None:
        self._ports = ports
        self._picker = picker
        self._pool = pool
        self._max_connections = max_connections
        self._connections: set[GrpcConnection] = set()
        self._is_draining: Callable[[], bool] = lambda: False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve; from `stop` on as not ready, until cancelled."""
        self._is_draining = stop.is_set
        ports = self._ports
        health: Services = {_path(HEALTH, "Check"): partial(HealthCall, self.status)}
        services: Services = {
            _path(EXT_PROC, "Process"): partial(PickerCall, self._picker),
            _path(ACCESS_LOG, "StreamAccessLogs"): partial(AccessLogCall, self._picker.requests),
            **health,
        }
        tls, watched = ports.tls, []
        if tls is not None:
            watched.append(WatchedFiles("the picker's certificates", tls.files, tls.reload))
        context = None if tls is None else tls.context
        servers = [await self._serve(ports.gateways, services, context)]
        if ports.probes is not None:
            servers.append(await self._serve(ports.probes, health, None))
        host, port = ports.gateways.getsockname()[:2]
        log.info("endpoint picker listens on %s:%d%s", host, port, "" if tls else ", without TLS")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch_forever(watched))
                group.create_task(self._keep_alive())
        finally:
            for server in servers:
                server.close()
            for connection in list(self._connections):
                connection.close()

    async def _serve(
        self, listener: socket.socket, services: Services, tls: ssl.SSLContext | None
    ) -> asyncio.Server:
        timeout_s = None if tls is None else self._picker.limits.head.header_timeout_s
        return await asyncio.get_running_loop().create_server(
            partial(GrpcConnection, services, self._connections, self._max_connections),
            sock=listener.dup(),
            ssl=tls,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=timeout_s,
        )

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            for connection in list(self._connections):
                connection.check_alive()

    def is_quiet(self, now_s: float) -> bool:
        """Return whether no request is in flight, and none began for `QUIET_S`."""
        return not self._picker.open_streams and now_s - self._picker.last_s >= QUIET_S

    def status(self, service: str) -> int:
        """Return the status of a service, by its name."""
        if service == LIVENESS:
            return _SERVING
        if service not in READINESS:
            return _UNKNOWN
        is_ready = not self._is_draining() and self._pool.unready_reason() is None
        return _SERVING if is_ready else _NOT_SERVING


def _path(service: str, method: str) -> bytes:
    return f"/{service}/{method}".encode()


class HealthCall:
    """A question about health. `status`: see `PickerServer.status`."""

    __slots__ = ("_status", "_stream")

    limit_bytes = 4096

    def __init__(self, status: Callable[[str], int], stream: GrpcStream) -> None:
        self._status = status
        self._stream = stream

    def expects(self, size_bytes: int) -> None:
        """Do nothing: its limit is small."""

    def received(self, message: bytes) -> None:
        """Answer the question."""
        try:
            service = HealthCheck.FromString(message).service
        except DecodeError:
            self._stream.finish(INVALID_ARGUMENT)
            return
        self._stream.send([Health(status=self._status(service)).SerializeToString()])
        self._stream.finish()

    def oversized(self) -> None:
        """Refuse the question."""
        self._stream.finish(RESOURCE_EXHAUSTED)

    def ended(self) -> None:
        """End a stream without a question."""
        self._stream.finish(INVALID_ARGUMENT)

    def lost(self) -> None:
        """Do nothing."""


def self_signed() -> tuple[bytes, bytes]:
    """Return the private key and a certificate in PEM, for gateways that do not verify it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kv-router")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _CERTIFICATE_YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("kv-router")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    written = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return written, certificate.public_bytes(pem)
