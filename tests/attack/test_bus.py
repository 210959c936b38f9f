"""Attacks over NATS, by hand: on routers, the indexer and agents that answer there."""

import json
from functools import partial

import pytest
from msgspec import structs

from attack.guarded_fleet import ATTACKER, GATEWAY, OPERATOR, SLOW, VICTIM
from router.protocol.loads import decode_load_report, encode_load_report
from support.processes.servers import until
from support.values.token_files import token_of

pytestmark = pytest.mark.attack

ROUTER, INDEX, TIERS = "kv.default.router", "kv.default.indexer.query", "kv.default.worker.1.tiers"
LOADS = "kv.default.load.1.0"
PROMPT = list(range(64))


@pytest.fixture
def bus(fleet):
    with fleet.wire() as bus:
        yield bus


def asked(bus, name, method, **fields):
    token = None if name is None else token_of(name)
    return json.loads(bus.request(ROUTER, {"method": method, **fields}, token))


def queried(bus, name, question):
    token = None if name is None else token_of(name)
    return json.loads(bus.request(INDEX, question, token)).get("Error", "answered")


def test_stranger_gets_no_details(bus):
    for body in ({"method": "select", "token_ids": PROMPT}, b"garbage", b"", b"\xff" * 1000):
        assert json.loads(bus.request(ROUTER, body))["code"] == "unauthenticated"
        assert json.loads(bus.request(ROUTER, body, "a-guess"))["code"] == "unauthenticated"
    assert queried(bus, None, "DumpTree").startswith("authorization")


def test_tenant_reaches_nothing_of_another(bus):
    salted = {"token_ids": PROMPT, "cache_salt": VICTIM}
    assert asked(bus, VICTIM, "select_and_reserve", request_id="n", **salted)["request_id"] == "n"
    for request_id in ("n", "victim/n"):
        for method in ("free", "prefill_complete", "output_block"):
            answer = asked(bus, ATTACKER, method, request_id=request_id)
            assert answer["code"] == "reservation_not_found"
        for method in ("mark_free", "mark_prefill"):
            assert asked(bus, ATTACKER, method, request_id=request_id)["success"] is False
    for method in ("select", "new", "overlap_scores", "potential_loads"):
        answer = asked(bus, ATTACKER, method, request_id="m", **salted)
        assert answer["code"] == "forbidden"
    matches = {"FindMatchesTokens": {"tokens": PROMPT, "cache_salt": VICTIM}}
    assert queried(bus, ATTACKER, matches).startswith("cache_salt")
    by_hash = {"FindMatchesHashed": {"block_hashes": [1]}}
    assert queried(bus, ATTACKER, by_hash).startswith("block_hashes")
    assert queried(bus, ATTACKER, "DumpTree").startswith("authorization")
    assert asked(bus, ATTACKER, "loads")["code"] == "forbidden"
    assert asked(bus, VICTIM, "free", request_id="n") == {"status": "ok"}


def test_batches_evade_no_rate(bus):
    requests = [{"token_ids": PROMPT}] * 3
    asked(bus, SLOW, "select:batch", requests=requests)
    assert asked(bus, SLOW, "select", token_ids=PROMPT)["code"] == "rate_limited"


@pytest.mark.parametrize("subject", [ROUTER, INDEX, "kv.default.worker.1.ping", TIERS])
@pytest.mark.parametrize(
    ("reply", "head"),
    [
        ("i", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        ("i", b"NATS/1.0 100 \xff\r\n\r\n"),
        ("i", b"NATS/1.0\r\n: \xff\r\n\xff\r\n\r\n"),
        ("i", b"NATS/1.0\r\n" + b"a" * 100_000 + b"\r\n\r\n"),
    ],
    ids=["status", "code", "names", "long"],
)
def test_no_message_disconnects_a_process(bus, fleet, subject, reply, head):
    bus.publish(subject, b"{}", reply, head)
    bus.flush()
    answer = asked(bus, GATEWAY, "select", token_ids=[1])
    assert answer["worker_id"] in (1, 2)
    assert queried(bus, GATEWAY, {"FindMatchesTokens": {"tokens": PROMPT}}) == "answered"
    for name in ("router", "indexer"):
        assert "lost the connection" not in fleet.processes[name].log.read_text()


@pytest.mark.parametrize("subject", [ROUTER, INDEX, TIERS])
def test_replies_go_to_inboxes_alone(bus, subject):
    """Not to the event log, to the server's own subjects, or to those of other applications."""
    foreign = ("kv.default.events.7.0", "$KV.kv-default-workers.worker.7", "orders.new")
    for seen in (*foreign, "control"):
        bus.subscribe(seen)
    bus.publish("control", b"")
    head = f"NATS/1.0\r\nAuthorization: Bearer {token_of(GATEWAY)}\r\n\r\n".encode()
    body = json.dumps({"method": "select", "token_ids": PROMPT}).encode()
    for reply in foreign:
        bus.publish(subject, body, reply, head)
    asked(bus, GATEWAY, "select", token_ids=[1])
    queried(bus, GATEWAY, {"FindMatchesTokens": {"tokens": PROMPT}})
    assert bus.flush() & {*foreign, "control"} == {"control"}


def test_flood_of_messages_leaves_the_fleet_exact(bus, fleet):
    """Commands, garbage and reports of load that are none; workers stay in service."""
    for number in range(2000):
        bus.publish(ROUTER, b"\xff" * 200, f"_INBOX.flood.{number}")
        bus.publish(LOADS, b"\xff" * 200)
        bus.publish("kv.default.beacons", b"\xff" * 200)
    bus.flush()
    assert asked(bus, GATEWAY, "select", token_ids=[1])["worker_id"] in (1, 2)


def test_forged_report_silences_no_worker(bus, fleet):
    """A copy of its last report, with the highest number: those that follow count all the same."""
    bus.subscribe(LOADS)
    forged = structs.replace(decode_load_report(bus.message()), report_id=(1 << 63) - 1)
    bus.publish(LOADS, encode_load_report(forged))
    for _ in range(12):  # longer than a worker may be silent
        bus.message()

    def worker_ids():
        with fleet.client("router", OPERATOR) as client:
            views = client.ask("GET", "/workers").json()
        return [each["worker_id"] for each in views if not each["not_schedulable_reasons"]]

    assert worker_ids() == [1, 2]
    only = partial(asked, bus, GATEWAY, "select", token_ids=[1], allowed_worker_ids=[1])
    until(lambda: only().get("worker_id") == 1)
