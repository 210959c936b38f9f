"""The ports of a picker: certificates of both sides, and ports in use."""

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from router.config.picker import PickerConfig
from router.errors import ConfigError
from router.forward.picker.picker import Picker, PickerLimits
from router.forward.picker.server import PickerServer, picker_ports
from router.runtime.http_server.limits import HttpLimits
from support.processes.certificates import Authority
from support.processes.servers import eventually, free_port

LIMITS = PickerLimits(1000, HttpLimits(), 10, 10.0, 10_000)
HEALTHY = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@asynccontextmanager
async def serving(**fields):
    """A server without requests; its port."""
    config = PickerConfig(epp_port=free_port(), **fields)
    with picker_ports(config, "127.0.0.1") as ports:
        picker = Picker(None, NoRequests(), None, LIMITS)  # no request comes
        server, stop = PickerServer(ports, picker, None, 10), asyncio.Event()
        running = asyncio.create_task(server.run(stop))
        try:
            yield config.epp_port
        finally:
            running.cancel()
            await asyncio.wait([running])


class NoRequests:
    count = 0


async def shaken(port, *, certificate=None):
    """The certificate that a client is shown, and the protocol that is agreed; None if refused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(*certificate)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except OSError:
        return None
    try:
        writer.write(HEALTHY)
        if not await reader.read(9):
            return None
        shaken = writer.get_extra_info("ssl_object")
        shown = x509.load_der_x509_certificate(shaken.getpeercert(binary_form=True))
        name = shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        return name, shaken.selected_alpn_protocol(), shown.serial_number
    except OSError:  # TLS 1.3: a client learns with its first read that it is refused
        return None
    finally:
        writer.transport.abort()


async def test_certificate_of_its_own_is_shown_by_default_with_http2():
    async with serving() as port:
        assert (await shaken(port))[:2] == ("kv-router", "h2")


async def test_changed_certificate_is_shown_to_later_connections(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("picker")
    async with serving(epp_cert_file=certificate, epp_key_file=key) as port:
        first = await shaken(port)
        assert first[:2] == ("picker", "h2")
        authority.issue("picker")

        async def is_renewed():
            return (await shaken(port))[2] != first[2]

        await eventually(is_renewed)


async def test_client_without_a_certificate_of_the_current_authority_is_refused(tmp_path):
    former, later = Authority(tmp_path, "former"), Authority(tmp_path, "later")
    of_former, of_later = former.issue("gateway"), later.issue("other")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(former.path.read_bytes())
    async with serving(epp_client_ca_file=str(trusted)) as port:  # beside a self-signed one
        assert await shaken(port) is None
        assert await shaken(port, certificate=of_later) is None
        assert (await shaken(port, certificate=of_former))[:2] == ("kv-router", "h2")
        trusted.write_bytes(later.path.read_bytes())

        async def is_later():
            return await shaken(port, certificate=of_later) is not None

        await eventually(is_later)
        assert await shaken(port, certificate=of_former) is None


@pytest.mark.parametrize("field", ["epp_port", "epp_health_port"])
def test_port_in_use_is_named(field):
    with socket.create_server(("127.0.0.1", 0)) as used:
        ports = {"epp_port": free_port(), "epp_health_port": free_port()}
        config = PickerConfig(**{**ports, field: used.getsockname()[1]})
        error = f"^{field}: cannot listen on .*another process"
        with pytest.raises(ConfigError, match=error), picker_ports(config, "127.0.0.1"):
            pass


def test_key_of_another_certificate_is_refused(tmp_path):
    authority = Authority(tmp_path)
    certificate, (_, key) = authority.issue("one")[0], authority.issue("two")
    config = PickerConfig(epp_port=free_port(), epp_cert_file=certificate, epp_key_file=key)
    with pytest.raises(ConfigError, match=r"^epp_cert_file: "), picker_ports(config, "127.0.0.1"):
        pass
