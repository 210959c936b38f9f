"""A web page in a browser on the machine of a developer, whose router has no tokens."""

import pytest

from attack.clients import HttpClient, answers, connected
from support.processes.processes import Process
from support.processes.servers import free_port, until

pytestmark = pytest.mark.attack


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    port = free_port()
    options = {"http-port": port, "drain-s": 0, "name": "local"}
    process = Process(tmp_path_factory.mktemp("local"), "local", "router", "serve", **options)

    def is_up():
        try:
            with HttpClient(port) as client:
                return client.ask("GET", "/health").status == 200
        except OSError:
            return False

    until(is_up)
    yield port
    process.end()


@pytest.mark.parametrize("host", [b"evil.example", b"EVIL.example:80", b"127.0.0.1.nip.io"])
def test_name_that_was_bound_to_this_machine_is_refused(port, host):
    for path in (b"/workers", b"/dump", b"/"):
        answer = answers(port, b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, host))
        assert answer.startswith(b"HTTP/1.1 421")
        assert b"worker_id" not in answer


def test_second_host_is_refused(port):
    twice = b"GET /workers HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"
    assert answers(port, twice).startswith(b"HTTP/1.1 400")
    assert answers(port, b"GET /workers HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_forms_and_requests_of_other_sites_are_refused(port):
    worker = b'{"worker_id": 6, "endpoint": "http://evil.example", "block_size": 4}'
    forms = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
    with HttpClient(port) as client:
        for kind in forms:
            form = {"content-type": kind}
            assert client.ask("POST", "/workers", worker, **form).status == 415
            for other in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
                reply = client.ask("POST", "/workers", worker, **form, **other)
                assert (reply.status, reply.code) == (403, "cross_site")
        asks_first = {"access-control-request-method": "POST", "origin": "http://evil.example"}
        reply = client.ask("OPTIONS", "/workers", **asks_first)
        assert reply.status in (403, 404, 405)
        names = [name.lower() for name, _ in reply.headers]
        assert not [name for name in names if name.startswith("access-control")]
        assert client.ask("GET", "/workers").json() == []


def test_no_public_address_without_tokens(tmp_path):
    """The process ends and says why."""
    options = {"http-port": free_port(), "host": "0.0.0.0"}
    process = Process(tmp_path, "public", "router", "serve", **options)
    assert process.popen.wait(timeout=60) != 0
    assert "token_file" in process.log.read_text()
    with pytest.raises(OSError, match="refused"), connected(options["http-port"]):
        pass
