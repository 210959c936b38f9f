"""Handshakes that never end, at a router that serves over TLS; and responses that none reads."""

import ssl
from contextlib import ExitStack

import pytest

from attack.clients import connected, read_all
from attack.guarded_fleet import GATEWAY
from support.processes.certificates import Authority
from support.processes.processes import Process
from support.processes.servers import free_port, until, wait_for_port
from support.values.token_files import token_of

pytestmark = pytest.mark.attack

STUCK_CONNECTIONS = 8


def test_handshakes_that_never_end_are_aborted(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("router")
    options = {"http-port": free_port(), "drain-s": 0, "header-timeout-s": 1.0, "name": "tls"}
    process = Process(
        tmp_path, "tls", "router", "serve",
        **{**options, "tls-cert-file": certificate, "tls-key-file": key},
    )  # fmt: skip
    try:
        wait_for_port(options["http-port"])
        with ExitStack() as stack:
            held = [stack.enter_context(connected(options["http-port"])) for _ in range(50)]
            for connection in held[::2]:
                connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello
            assert {read_all(connection) for connection in held} == {b""}
        context = ssl.create_default_context(cafile=authority.path)
        with (
            connected(options["http-port"]) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as honest,
        ):
            honest.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert honest.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        process.end()


def test_responses_that_are_never_read_hold_no_connection(fleet):
    """Each has 60 s in which some of it must be read."""
    before = fleet.descriptors("router")
    ask = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(STUCK_CONNECTIONS):
            connection = stack.enter_context(connected(fleet.ports["router"]))
            connection.sendall(ask % token_of(GATEWAY).encode() * 150)
        until(lambda: fleet.descriptors("router") >= before + STUCK_CONNECTIONS // 2)
        until(lambda: fleet.descriptors("router") <= before + 2, timeout_s=240)
