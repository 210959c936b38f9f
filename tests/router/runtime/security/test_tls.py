"""HTTPS, with real certificates: which clients are served, and changed certificates."""

import asyncio
import os
import ssl
import warnings
from contextlib import asynccontextmanager

import httpx
import pytest

from router.errors import ConfigError
from router.runtime.security.tls import ServerTls, client_context
from support.processes.certificates import Authority
from support.processes.running import RunningRouter
from support.processes.servers import eventually


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


class TlsRouter(RunningRouter):
    """A router behind TLS, asked by a client that trusts an authority."""

    def __init__(self, ca_file, cert=("", ""), **fields):
        super().__init__("", **fields)
        self.url = f"https://127.0.0.1:{self.config.http.http_port}"
        self.ca_file = ca_file
        self.client = self.new_client(*cert)

    def new_client(self, cert_file="", key_file="", **versions):
        context = client_context(str(self.ca_file), cert_file, key_file)
        for name, version in versions.items():
            setattr(context, name, version)
        return httpx.AsyncClient(base_url=self.url, verify=context, timeout=30)

    async def is_served(self, *arguments, **versions):
        async with self.new_client(*arguments, **versions) as client:
            try:
                return (await client.get("/health")).status_code == 200
            except (httpx.TransportError, ssl.SSLError):
                return False


@asynccontextmanager
async def tls_router(authority, **fields):
    cert_file, key_file = authority.issue("router")
    files = {"tls_cert_file": cert_file, "tls_key_file": key_file}
    async with TlsRouter(authority.path, **files, **fields).running() as router:
        yield router


async def is_answered_in(version, router):
    """By a client that would take any certificate, of this version alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    try:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", router.config.http.http_port, ssl=context
        )
    except OSError:
        return False
    writer.close()
    return True


async def test_https_is_served_and_http_and_old_tls_are_not(authority):
    async with tls_router(authority) as router:
        assert await router.is_served()
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(router.url.replace("https", "http") + "/health")
        assert not await is_answered_in(ssl.TLSVersion.TLSv1_1, router)
        assert await is_answered_in(ssl.TLSVersion.TLSv1_2, router)
        assert await router.is_served(maximum_version=ssl.TLSVersion.TLSv1_2)


async def test_handshakes_that_take_long_are_ended(authority):
    async with tls_router(authority, header_timeout_s=0.2) as router:
        for hello in (b"", b"\x16\x03\x01\x02\x00\x01"):
            port = router.config.http.http_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello)
            assert await reader.read() == b""
            writer.close()
        await eventually(router.is_served)  # once both are quick enough


async def test_callers_need_certificates_of_the_authority(authority, tmp_path):
    folder = tmp_path / "others"
    folder.mkdir()
    caller, stranger = authority.issue("caller"), Authority(folder, "stranger").issue("caller")
    fields = {"tls_client_ca_file": str(authority.path), "cert": caller}
    async with tls_router(authority, **fields) as router:
        assert await router.is_served(*caller)
        assert not await router.is_served()
        assert not await router.is_served(*stranger)
        assert await router.is_served(*caller)


async def test_certificates_and_authorities_that_change_count_without_a_restart(
    authority, tmp_path
):
    """The next handshake is by the new files; files that make no sense change nothing."""
    folder = tmp_path / "next"
    folder.mkdir()
    after = Authority(folder, "next")
    first, second = authority.issue("caller"), after.issue("caller")
    client_ca = tmp_path / "clients.pem"
    client_ca.write_bytes(authority.path.read_bytes())
    fields = {"tls_client_ca_file": str(client_ca), "cert": first}
    async with tls_router(authority, **fields) as router:
        edge = router.service.host.edge
        assert await router.is_served(*first)
        client_ca.write_text("nonsense")
        await eventually(lambda: sum(each.failures for each in edge.watched) == 1)
        assert await router.is_served(*first)
        cert_file, key_file = after.issue("router")
        os.replace(key_file, router.config.security.tls_key_file)
        os.replace(cert_file, router.config.security.tls_cert_file)
        client_ca.write_bytes(after.path.read_bytes())
        router.ca_file = after.path
        await eventually(lambda: router.is_served(*second))
        assert not await router.is_served(*first)


def test_invalid_certificate_files_are_named(authority, tmp_path):
    cert_file, key_file = authority.issue("router")
    _, other_key = authority.issue("other")
    with pytest.raises(ConfigError, match="tls_cert_file"):
        ServerTls(cert_file, other_key, "")
    with pytest.raises(ConfigError, match="tls_client_ca_file"):
        ServerTls(cert_file, key_file, key_file)
    with pytest.raises(ConfigError, match="nats_tls_ca_file"):
        client_context(str(tmp_path / "none"), "", "")
