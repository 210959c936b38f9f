"""The gRPC server of a picker: streams, access logs and health, with TLS.

grpcio: it carries a stream at a third less processor time than `grpclib` with bodies of 1 MB, and
the same with small ones. It is imported by processes with a picker alone.
"""

import asyncio
import datetime
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError
from grpc import aio

from router.config.picker import PickerConfig
from router.errors import ConfigError
from router.forward.picker.picker import Picker
from router.forward.picker.pool import PoolView
from router.forward.picker.wire.kv_router_picker_pb2 import Health, HealthCheck
from router.runtime.security.edge import WatchedFiles

log = logging.getLogger(__name__)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
HEALTH = "grpc.health.v1.Health"

LIVENESS = "liveness"
READINESS = ("", "readiness", EXT_PROC, "inference-extension")
"""The names under which probes and gateways ask whether the picker is ready."""

MESSAGE_BYTES = 64 * 1024 * 1024
KEEP_ALIVE_MS = 20_000
QUIET_S = 5.0
"""Time without new requests after which a draining picker ends: gateways have noticed."""

_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # A gateway that vanished without a word must not hold its streams.
    ("grpc.keepalive_time_ms", KEEP_ALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEP_ALIVE_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
_CERTIFICATE_YEARS = 10


class PickerServer:
    """The server. `run` serves until it is cancelled; `drain` before."""

    def __init__(self, config: PickerConfig, host: str, picker: Picker, pool: PoolView) -> None:
        self._config = config
        self._host = host
        self._picker = picker
        self._pool = pool
        self._is_draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve; from `stop` on as not ready, until cancelled. Raises ConfigError."""
        config = self._config
        server = aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_streams(self._picker), _health(self.status)))
        at = f"{_bracketed(self._host)}:{config.epp_port}"
        if config.epp_tls:
            server.add_secure_port(at, credentials(config))
        else:
            server.add_insecure_port(at)
        probes = aio.server(options=_OPTIONS[:3])
        probes.add_generic_rpc_handlers((_health(self.status),))
        if config.epp_health_port:
            probes.add_insecure_port(f"{_bracketed(self._host)}:{config.epp_health_port}")
        await server.start()
        await probes.start()
        log.info("endpoint picker listens on %s%s", at, "" if config.epp_tls else ", without TLS")
        try:
            await stop.wait()
            self._is_draining = True
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(server.stop(None), probes.stop(None))

    def is_quiet(self, now_s: float) -> bool:
        """Return whether no request is in flight, and none began for `QUIET_S`."""
        return not self._picker.open_streams and now_s - self._picker.last_s >= QUIET_S

    def status(self, service: str) -> int:
        """Return the status of a service, by its name."""
        if service == LIVENESS:
            return _SERVING
        if service not in READINESS:
            return _UNKNOWN
        is_ready = not self._is_draining and self._pool.unready_reason() is None
        return _SERVING if is_ready else _NOT_SERVING


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _streams(picker: Picker) -> grpc.GenericRpcHandler:
    """Return the handlers of requests and access logs, in bytes."""
    process = grpc.stream_stream_rpc_method_handler(picker.process)
    logs = grpc.stream_unary_rpc_method_handler(picker.take_logs)
    return _Handlers({f"/{EXT_PROC}/Process": process, f"/{ACCESS_LOG}/StreamAccessLogs": logs})


def _health(status: Callable[[str], int]) -> grpc.GenericRpcHandler:
    async def check(data: bytes, context: Any) -> bytes:
        try:
            service = HealthCheck.FromString(data).service
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return Health(status=status(service)).SerializeToString()

    return _Handlers({f"/{HEALTH}/Check": grpc.unary_unary_rpc_method_handler(check)})


class _Handlers(grpc.GenericRpcHandler):
    """Handlers by path."""

    def __init__(self, by_path: dict[str, grpc.RpcMethodHandler]) -> None:
        self._by_path = by_path

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call, or None."""
        return self._by_path.get(handler_call_details.method)


# ── Certificates ─────────────────────────────────────────────────────────────────────────────────


def credentials(config: PickerConfig) -> grpc.ServerCredentials:
    """Return the credentials of the server; changed files are read again. Raises ConfigError."""
    if not config.epp_cert_file:
        pair = self_signed()
        clients = _bytes(config.epp_client_ca_file) if config.epp_client_ca_file else None
        return grpc.ssl_server_credentials([pair], clients, clients is not None)
    files = _CertificateFiles(config)
    return grpc.dynamic_ssl_server_credentials(
        files.current, files.changed, bool(config.epp_client_ca_file)
    )


class _CertificateFiles:
    """The files of certificates. `changed` is called by gRPC's threads, for every connection."""

    def __init__(self, config: PickerConfig) -> None:
        named = (config.epp_cert_file, config.epp_key_file, config.epp_client_ca_file)
        files = [Path(each) for each in named if each]
        self._config = config
        self._watched = WatchedFiles("the picker's certificates", files, self._reload)
        self.current = self._read()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the contents if the files have changed and can be read, otherwise None."""
        former = self.current
        self._watched.look()
        return None if self.current is former else self.current

    def _reload(self) -> None:
        self.current = self._read()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        certificate, key = _bytes(config.epp_cert_file), _bytes(config.epp_key_file)
        check_pair(config, certificate, key)
        clients = _bytes(config.epp_client_ca_file) if config.epp_client_ca_file else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], clients)


def check_pair(config: PickerConfig, certificate: bytes, key: bytes) -> None:
    """Raise ConfigError unless a certificate and its key can be read and belong together."""
    try:
        public = x509.load_pem_x509_certificate(certificate).public_key()
        own = serialization.load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError) as error:
        reason = f"{config.epp_cert_file} with {config.epp_key_file}: {error}"
        raise ConfigError("epp_cert_file", reason, "a PEM certificate and its key") from error
    if public != own:
        reason = f"{config.epp_cert_file} is not of {config.epp_key_file}"
        raise ConfigError("epp_key_file", reason, "the key of the certificate")


def _bytes(path: str) -> bytes:
    """Return the contents of a file of certificates. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        raise ConfigError("epp_cert_file", reason, "a readable PEM file") from error


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
