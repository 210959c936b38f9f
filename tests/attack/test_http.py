"""Attacks over sockets on every process that speaks HTTP, by strangers and by callers."""

import gzip
import json
import re
from contextlib import ExitStack

import pytest

from attack.clients import answers, connected, read_all, until_closed
from attack.guarded_fleet import ATTACKER, GATEWAY, LIMITS, MONITOR, OPERATOR, SECRETS
from support.processes.servers import until
from support.values.token_files import token_of

pytestmark = pytest.mark.attack

EVERY = ("router", "indexer", "worker", "forwarder")
PLACES = ("router", "indexer", "forwarder")
"""Processes whose limits of bodies and connections are settings."""

ROUTES = {
    "router": "/select", "indexer": "/query", "worker": "/v1/completions",
    "forwarder": "/v1/completions",
}  # fmt: skip
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
TRICKLE_S = 0.05

every = pytest.mark.parametrize("name", EVERY)
places = pytest.mark.parametrize("name", PLACES)


def head(name, *lines, token=GATEWAY):
    """The beginning of a request that is allowed."""
    said = [f"POST {ROUTES[name]} HTTP/1.1", "host: x", "content-type: application/json"]
    if token is not None:
        said.append(f"authorization: Bearer {token_of(token)}")
    return "\r\n".join([*said, *lines, ""]).encode()


def status_of(answer):
    return int(answer.split()[1]) if answer else None


def body_of(name, **fields):
    """A body that is served, if fields are not at fault."""
    if name in ("router", "indexer"):
        return {"token_ids": [1, 2, 3], **fields}
    return {"model": "default", "prompt": "hello", "max_tokens": 1, **fields}


# ── Slowness ─────────────────────────────────────────────────────────────────────────────────────


@every
def test_headers_that_come_slowly_are_refused(fleet, name):
    with connected(fleet.ports[name]) as silent, connected(fleet.ports[name]) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        assert status_of(until_closed(slow, more=b"x-a: b\r\n", pause_s=0.2)) == 408
        assert status_of(read_all(silent)) == 408


@places
def test_body_that_comes_slowly_is_refused(fleet, name):
    with connected(fleet.ports[name]) as slow:
        slow.sendall(head(name, "content-length: 100000", ""))
        assert status_of(until_closed(slow, more=b" ")) == 408


@every
def test_half_closed_connections_leave_nothing(fleet, name):
    for said in (b"", GET[:9], head(name, "content-length: 10", "") + b"abc"):
        with connected(fleet.ports[name]) as connection:
            connection.sendall(said)
            connection.shutdown(1)
            assert status_of(read_all(connection)) in (None, 400, 408)


# ── Floods ───────────────────────────────────────────────────────────────────────────────────────


@places
def test_flood_of_connections_is_refused(fleet, name):
    most = LIMITS["max-connections"]
    with ExitStack() as stack:
        held = [stack.enter_context(connected(fleet.ports[name])) for _ in range(3 * most)]
        refused = held[-1]
        assert status_of(read_all(refused)) in (None, 503)
        assert fleet.descriptors(name) < 2 * most + 100
    until(lambda: fleet.is_ready(name))


@every
@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000,
        b"GET / HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x-%d: y\r\n" % n for n in range(300))
        + b"\r\n",
    ],
    ids=["url", "header", "headers"],
)
def test_flood_of_headers_is_refused(fleet, name, request_):
    with connected(fleet.ports[name]) as connection:
        connection.sendall(request_)
        assert status_of(connection.recv(100)) == 431


@places
def test_hundred_megabytes_are_refused(fleet, name):
    """By their length, or at the limit; memory is measured after each test."""
    announced = answers(fleet.ports[name], head(name, "content-length: 104857600", ""))
    assert status_of(announced) == (408 if name == "indexer" else 413)  # it counts what arrives
    with connected(fleet.ports[name]) as connection:
        connection.sendall(head(name, "transfer-encoding: chunked", ""))
        piece = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        assert status_of(until_closed(connection, more=piece, pause_s=0.001)) in (None, 413)


def test_bodies_of_the_forwarder_together_are_bounded(fleet):
    beginning = head("forwarder", "content-length: 1000000", "") + b" " * 999_000
    with ExitStack() as stack:
        held = [stack.enter_context(connected(fleet.ports["forwarder"])) for _ in range(12)]
        for connection in held:
            connection.sendall(beginning)
        statuses = {status_of(read_all(connection)) for connection in held}
    assert statuses >= {408, 503}
    assert "kv_router_forward_body_bytes 0.0" in fleet.metrics("forwarder")


# ── Ambiguity ────────────────────────────────────────────────────────────────────────────────────

HIDDEN = b"GET /dump HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n" % (
    token_of(OPERATOR).encode()
)


@every
@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 5", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "content-length: 5"),
        ("content-length: 5", "content-length: 6"),
        ("content-length: -1",),
        ("content-length: 5 5",),
        ("transfer-encoding: xchunked",),
        ("transfer-encoding: chunked, identity",),
        ("host: y",),
        ("a: b\rc: d",),
        ("x-a : b",),
        ("content-length: 5", " folded: x"),
    ],
    ids=str,
)
def test_smuggled_requests_are_refused(fleet, name, lines):
    answer = answers(fleet.ports[name], head(name, *lines, "") + b"0\r\n\r\n" + HIDDEN)
    assert (status_of(answer), answer.count(b"HTTP/1.1 ")) == (400, 1)
    assert b"events" not in answer


@every
def test_request_hidden_in_a_body_is_none(fleet, name):
    for lines, body in (
        (f"content-length: {len(HIDDEN)}", HIDDEN),
        ("transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
    ):
        upgrade = head(name, "connection: upgrade", "upgrade: h2c", lines, "")
        with connected(fleet.ports[name]) as connection:
            connection.sendall(upgrade + body)
            connection.shutdown(1)
            answer = read_all(connection)
        assert (status_of(answer), answer.count(b"HTTP/1.1 ")) == (400, 1)


@every
def test_trailers_are_no_headers_and_bounded(fleet, name):
    body = json.dumps(body_of(name)).encode()
    chunked = head(name, "transfer-encoding: chunked", "", token=None)
    trailer = f"authorization: Bearer {token_of(GATEWAY)}\r\n\r\n".encode()
    whole = chunked + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailer
    with connected(fleet.ports[name]) as connection:
        connection.sendall(whole)
        assert status_of(connection.recv(100)) == 401
    for barren in (b"0\r\nx: ", b"5;x="):
        with connected(fleet.ports[name]) as connection:
            connection.sendall(
                head(name, "transfer-encoding: chunked", "") + b"3\r\n   \r\n" + barren
            )
            answer = until_closed(connection, more=b"y" * 4096, pause_s=0.001)
            assert status_of(answer) in (None, 400, 431)


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────

DEEP = b"[" * 200_000 + b"]" * 200_000


@places
@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b'{"token_ids":[4294967296],"prompt":[4294967296]}', {}),
        (b'{"token_ids":[NaN],"prompt":[NaN]}', {}),
        (b'{"token_ids":[1],"prompt":"\xff\xfe"}', {}),
        (b'{"token_ids":%b,"prompt":%b}' % (DEEP, DEEP), {}),
        (b"", {}),
        (b"token_ids=1", {"content-type": "application/x-www-form-urlencoded"}),
        (b"{}", {"content-type": "text/plain", "origin": "http://evil.example"}),
        (gzip.compress(bytes(10_000_000)), {"content-encoding": "gzip"}),
        (b'{"prompt":[%b],"token_ids":[1]%b}' % (b'"",' * 70_000, b',"":1' * 70_000), {}),
    ],
    ids=lambda each: each[:24].decode("latin-1") if isinstance(each, bytes) else None,
)
def test_invalid_bodies_are_refused(fleet, name, content, headers):
    if name == "indexer" and content.startswith(b'{"token_ids":[1],"prompt":"\xff'):
        content = content.replace(b'"prompt"', b'"cache_salt"')
    with fleet.client(name, GATEWAY) as client:
        reply = client.ask("POST", ROUTES[name], content, **headers)
    assert reply.status in (400, 413, 415, 422)
    assert reply.code
    assert not [key for key, _ in reply.headers if key.lower().startswith("access-control")]


def test_deep_or_huge_tool_arguments_are_refused(fleet):
    for arguments in ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a": ' + "9" * 10_000 + "}"):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        body = {"model": "default", "messages": messages, "max_tokens": 1}
        with fleet.client("tokenizing", GATEWAY) as client:
            assert client.ask("POST", "/v1/chat/completions", body).status == 400


def test_registrations_beyond_any_range_are_refused(fleet):
    with fleet.client("router", OPERATOR) as client:
        for fields in (
            {"worker_id": 1 << 63}, {"worker_id": -1}, {"block_size": 1 << 40},
            {"data_parallel_size": 1 << 30}, {"total_kv_blocks": -1},
        ):  # fmt: skip
            worker = {"worker_id": 9, "endpoint": "http://w", "block_size": 4, **fields}
            assert client.ask("POST", "/workers", worker).status in (400, 409, 422)
        assert [each["worker_id"] for each in client.ask("GET", "/workers").json()] == [1, 2]


# ── Strangers ────────────────────────────────────────────────────────────────────────────────────


@every
def test_stranger_is_refused_before_its_body_is_read(fleet, name):
    for token in (None, "a-guess"):
        lines = ["content-length: 20", ""]
        request = head(name, *lines, token=None)
        if token:
            request = request.replace(
                b"host: x", f"host: x\r\nauthorization: Bearer {token}".encode()
            )
        with connected(fleet.ports[name]) as connection:
            connection.sendall(request + b"{")
            assert status_of(connection.recv(100)) == 401


@every
def test_stranger_learns_only_whether_a_process_is_ready(fleet, name):
    addresses = [str(port) for port in (*fleet.ports.values(), fleet.nats.port)]
    with fleet.client(name) as stranger:
        ready = stranger.ask("GET", "/ready")
        assert ready.status == 200
        assert [each for each in addresses if each in ready.body.decode()] == []
        assert len(ready.body) < 100
        if name == "router":
            assert stranger.ask("GET", "/ready?verbose").status == 403
        for path in ("/metrics", "/dump", "/config", "/workers", "/tiers", "/nothing"):
            reply = stranger.ask("GET", path)
            assert (reply.status, reply.code) == (401, "unauthenticated")


def test_documentation_runs_no_script_and_has_a_rate(fleet):
    with fleet.client("router") as stranger:
        page = stranger.ask("GET", "/docs")
        assert "default-src 'none'" in dict(page.headers)["content-security-policy"]
        assert re.findall(rb"<script|<link|<img|<iframe|src=", page.body) == []
        statuses = {stranger.ask("GET", "/openapi.json").status for _ in range(150)}
        assert statuses == {200, 429}
        assert {stranger.ask("GET", "/health").status for _ in range(150)} == {200}


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/docs/../dump", "/%2e%2e/dump", "/dump%00", "/select/..%2fdump", "//dump",
     "/dashboard/files/..%2f..%2fetc%2fpasswd", "/DUMP", "/dump/", "/dump;x", "/dump?x=/health",
     "http://x/dump"],
)  # fmt: skip
@every
def test_no_path_leads_around_the_guard(fleet, name, path):
    with fleet.client(name, ATTACKER) as client:
        reply = client.ask("GET", path)
    assert reply.status in (403, 404)
    assert b"root:" not in reply.body
    assert b"events" not in reply.body


@every
def test_scopes_are_no_others(fleet, name):
    for token, path in ((ATTACKER, "/metrics"), (ATTACKER, "/dump"), (MONITOR, "/dump")):
        with fleet.client(name, token) as client:
            assert client.ask("GET", path).status in (403, 404)
    with fleet.client(name, MONITOR) as client:
        assert client.ask("POST", ROUTES[name], body_of(name)).status == 403


def test_guessed_tokens_and_injected_lines_reach_no_log_and_no_metric(fleet):
    before = sum(len(fleet.metrics(name)) for name in EVERY)
    for name in EVERY:
        with fleet.client(name, GATEWAY) as client:
            for number in range(20):  # a forwarder takes its time to look for unknown models
                client.ask("GET", f"/nothing-{number}")
                forged = f"m{number}\nERROR forged"
                body = body_of(
                    name, model_name=forged, policy_class=f"c{number}", **{f"f{number}": 1}
                )
                client.ask("POST", ROUTES[name], {**body, "model": forged})
        with fleet.client(name) as client:
            client.ask("GET", "/config", authorization="Bearer a-guess-that-is-wrong")
    spoken = fleet.spoken()
    assert [
        each for each in (*SECRETS, "a-guess-that-is-wrong", "nothing-7") if each in spoken
    ] == []
    assert not re.search(r"^ERROR forged", spoken, re.MULTILINE)
    assert sum(len(fleet.metrics(name)) for name in EVERY) < before + 10_000


def test_secrets_are_in_no_response(fleet):
    texts = []
    for name in EVERY:
        for token in (GATEWAY, OPERATOR, ATTACKER):
            with fleet.client(name, token) as client:
                for path in ("/config", "/dump", "/metrics", "/ready", "/workers"):
                    reply = client.ask("GET", path)
                    texts.append(reply.body.decode() + str(reply.headers))
    spoken = "".join(texts)
    assert [each for each in SECRETS if each in spoken] == []
