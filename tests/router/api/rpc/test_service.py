"""The same commands over NATS."""

import asyncio
import json

import msgspec
import pytest
from nats.errors import NoRespondersError

from router.client import RouterClient, SelectRequest
from router.runtime.bus.connection import connection
from support.processes.running import RunningRouter
from support.processes.servers import equals, eventually

PROMPT = list(range(40))
SUBJECT = "kv.test.router"


@pytest.fixture
async def ask(router, nats_server, eventually):
    await router.worker(1)
    async with connection(nats_server.url, "caller", lambda _: None) as bus:

        async def ask(body, **headers):
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await bus.client.request(SUBJECT, payload, timeout=60, headers=headers or None)
            assert answer.headers["Content-Type"] == "application/json"
            return json.loads(answer.data)

        ask.bus = bus
        yield ask


async def test_the_life_of_a_request(ask, router):
    answer = await ask({"method": "new", "tokens": PROMPT, "request_id": "x"})
    assert answer == {
        "method": "new", "request_id": "x", "worker_id": 1, "dp_rank": 0, "overlap_blocks": 0,
        "predicted_cached_blocks": 0, "endpoint": "http://w1",
    }  # fmt: skip
    answer = await ask({"method": "mark_prefill", "request_id": "x"})
    assert answer == {"method": "prefill_marked", "success": True}
    for success in (True, False):
        answer = await ask({"method": "mark_free", "request_id": "x"})
        assert answer == {"method": "free_marked", "success": success}
    assert await router.metric("kv_router_reservations") == 0


@pytest.mark.parametrize("method", ["select", "select_and_reserve", "new", "potential_loads"])
async def test_overrides_without_effect_are_named(ask, method):
    override = {"policy": "predictive", "overlap_score_weight": 2.0}
    answer = await ask(
        {"method": method, "token_ids": PROMPT, "router_config_override": override, "foo": 1}
    )
    named = [each.partition(" ")[0].partition(".")[2] for each in answer["warnings"]]
    ignored = ["overlap_score_weight", *(["policy"] if method == "potential_loads" else [])]
    assert named == [*ignored, ""]
    assert answer["warnings"][-1] == "field 'foo' is unknown, and ignored"
    assert "warnings" not in await ask({"method": method, "token_ids": PROMPT})


async def test_an_unknown_request_is_not_marked(ask):
    answer = await ask({"method": "mark_prefill", "request_id": "zz"})
    assert answer == {"method": "prefill_marked", "success": False}


async def test_potential_loads(ask):
    answer = await ask({"method": "potential_loads", "tokens": PROMPT, "cache_salt": "t"})
    assert answer["loads"][0]["potential_prefill_tokens"] == 40
    assert (answer["method"], answer["pending_count"]) == ("potential_loads", 0)


async def test_the_request_id_may_be_in_the_header(ask):
    answer = await ask({"method": "new", "tokens": PROMPT}, **{"x-request-id": "h"})
    assert answer["request_id"] == "h"
    answer = await ask({"method": "mark_free"}, **{"x-request-id": "h"})
    assert answer["success"]


async def test_an_unfit_header_is_refused_as_over_http(ask):
    answer = await ask({"method": "new", "tokens": PROMPT}, **{"x-request-id": "h" * 257})
    assert (answer["code"], answer["field"]) == ("invalid_field", "x-request-id")


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"method": "mark_free"}, "missing_request_id", "request_id"),
        ({"method": "new", "request_id": "x"}, "invalid_field", "tokens"),
        ({"method": "new", "request_id": "x", "tokens": [-1]}, "invalid_field", "tokens[0]"),
        ({"method": "fly"}, "invalid_field", "method"),
        ({"tokens": PROMPT}, "invalid_field", "method"),
        (b"garbage", "malformed_body", None),
        (b"", "malformed_body", None),
    ],
)
async def test_invalid_fields_are_named_as_over_http(ask, body, code, field):
    answer = await ask(body)
    assert (answer["method"], answer["code"], answer.get("field")) == ("error", code, field)


async def test_an_unknown_model_has_no_endpoints(ask):
    body = {"method": "new", "tokens": PROMPT, "request_id": "x", "model_name": "zz"}
    assert (await ask(body))["code"] == "no_endpoints"


async def test_commands_are_counted(ask, router):
    await ask({"method": "new", "tokens": PROMPT, "request_id": "x"})
    await ask(b"garbage")
    line = 'kv_router_requests_total{code="%s",interface="nats",route="%s"}'
    assert await router.metric(line % ("ok", "new")) == 1
    assert await router.metric(line % ("malformed_body", "unknown")) == 1


LIFE = [
    ("POST", "/select", {"token_ids": PROMPT}, {}),
    ("POST", "/reservations", {"token_ids": PROMPT, "worker_id": 1, "request_id": "r"}, {}),
    ("DELETE", "/reservations/r", None, {"request_id": "r"}),
    ("POST", "/select_and_reserve", {"token_ids": PROMPT, "request_id": "r"}, {}),
    ("GET", "/loads", None, {}),
    ("POST", "/overlap_scores", {"token_ids": PROMPT}, {}),
    ("POST", "/reservations/r/prefill_complete", None, {"request_id": "r"}),
    ("POST", "/reservations/r/output_block", {"decay_fraction": 0.5}, {"request_id": "r"}),
    ("DELETE", "/reservations/r", None, {"request_id": "r"}),
    ("DELETE", "/reservations/r", None, {"request_id": "r"}),
    ("POST", "/select", {"token_ids": [-1]}, {}),
    ("POST", "/select", {"token_ids": PROMPT, "model_name": "zz"}, {}),
    ("POST", "/reservations", {"token_ids": PROMPT, "worker_id": 9, "request_id": "r"}, {}),
]
METHODS = {"/reservations": "reserve"}


def method_of(verb, path):
    if verb == "DELETE":
        return "free"
    return METHODS.get(path, path.rpartition("/")[2])


def timeless(answer):
    """Without how long ago something was."""
    if isinstance(answer, dict):
        return {key: timeless(value) for key, value in answer.items() if key != "age_s"}
    return [timeless(each) for each in answer] if isinstance(answer, list) else answer


async def test_answers_and_errors_are_those_of_http(ask, router):
    """The same steps over both."""
    over_http, over_nats = [], []
    for verb, path, body, _ in LIFE:
        answer = await router.client.request(verb, path, json=body)
        over_http.append(timeless(answer.json()))
    for verb, path, body, in_path in LIFE:
        answer = await ask({"method": method_of(verb, path), **(body or {}), **in_path})
        if "error" in answer:
            assert answer.pop("method") == "error"
        over_nats.append(timeless(answer))
    assert over_nats == over_http


async def test_msgpack_is_answered_in_msgpack(ask):
    body = {"method": "select_and_reserve", "token_ids": PROMPT, "request_id": "m"}
    for media_type in ("application/msgpack", "application/X-MsgPack; charset=binary"):
        answer = await ask.bus.client.request(
            SUBJECT, msgspec.msgpack.encode(body), headers={"content-type": media_type}
        )
        assert answer.headers["Content-Type"] == "application/msgpack"
    said = msgspec.msgpack.decode(answer.data)
    assert (said["code"], said["request_id"]) == ("duplicate_reservation", "m")
    assert answer.headers["Nats-Service-Error-Code"] == "409"
    assert answer.headers["Nats-Service-Error"] == "reservation m is already reserved"
    garbage = await ask.bus.client.request(
        SUBJECT, b"\xc1", headers={"Content-Type": "application/msgpack"}
    )
    assert "allowed: valid application/msgpack" in msgspec.msgpack.decode(garbage.data)["error"]


CODECS = {"application/json": msgspec.json, "application/msgpack": msgspec.msgpack}


@pytest.mark.parametrize("media_type", CODECS)
async def test_unknown_fields_are_warned_of_as_over_http(ask, router, media_type):
    body = {"token_ids": PROMPT, "foo": 1, "bar": {"worker_id": [2, {"x": 1}]}}
    over_http = (await router.client.post("/select", json=body)).json()
    codec = CODECS[media_type]
    said = codec.encode({"method": "select", **body})
    answer = await ask.bus.client.request(SUBJECT, said, headers={"Content-Type": media_type})
    assert codec.decode(answer.data)["warnings"] == over_http["warnings"]
    assert len(over_http["warnings"]) == 2
    plain = codec.encode({"method": "select", "token_ids": PROMPT})
    answer = await ask.bus.client.request(SUBJECT, plain, headers={"Content-Type": media_type})
    assert "warnings" not in codec.decode(answer.data)
    metrics = (await router.client.get("/metrics")).text
    assert 'kv_router_unknown_fields_total{interface="nats",route="select"}' in metrics


def packed(*pairs):
    """A msgpack map with these fields, one of which may be there twice."""
    return bytes([0x80 | len(pairs)]) + b"".join(
        msgspec.msgpack.encode(name) + value for name, value in pairs
    )


TWICE = packed(("a", b"\x01"), ("a", b"\x02"))


@pytest.mark.parametrize(
    "body",
    [
        packed(("method", b"\xa6select"), ("token_ids", b"\x91\x01"), ("token_ids", b"\x91\x02")),
        packed(("method", b"\xa6select"), ("token_ids", b"\x91\x01"), ("foo", TWICE)),
        packed(("method", b"\xa6select"), ("token_ids", b"\x91\x01"), ("foo", b"\x91" + TWICE)),
        b'{"method":"select","token_ids":[1],"token_ids":[2]}',
        b'{"method":"select","token_ids":[1],"foo":[{"a":1,"a":2}]}',
    ],
)
async def test_fields_that_are_there_twice_are_refused_as_over_http(ask, body):
    media_type = "application/json" if body.startswith(b"{") else "application/msgpack"
    answer = await ask.bus.client.request(SUBJECT, body, headers={"Content-Type": media_type})
    refused = CODECS[media_type].decode(answer.data)
    assert refused["code"] == "invalid_field"
    assert "duplicate field" in refused["error"]


@pytest.mark.parametrize("media_type", CODECS)
async def test_progress_and_ends_come_in_batches_as_over_http(ask, router, media_type):
    codec = CODECS[media_type]

    async def asked(body):
        headers = {"Content-Type": media_type}
        answer = await ask.bus.client.request(SUBJECT, codec.encode(body), headers=headers)
        return codec.decode(answer.data)

    for request_id in ("a", "b"):
        body = {"method": "select_and_reserve", "token_ids": PROMPT, "request_id": request_id}
        assert (await asked(body))["request_id"] == request_id
    steps = [
        {"step": "prefill_complete", "request_id": "a", "usage": {"prompt_tokens": 40}},
        {"step": "output_block", "request_id": "a"},
        *({"step": "free", "request_id": each} for each in "abc"),
        {"step": "sleep"},
    ]
    said = await asked({"method": "reservations:batch", "steps": steps})
    assert [each["status"] for each in said["results"]] == [200, 200, 200, 200, 404, 422]
    over_http = await router.client.post("/reservations:batch", json={"steps": steps[-2:]})
    assert said["results"][-2:] == over_http.json()["results"]
    assert await router.metric("kv_router_reservations") == 0
    line = 'kv_router_requests_total{code="ok",interface="nats",route="reservations:batch"}'
    assert await router.metric(line) == 1


async def test_another_encoding_is_refused(ask):
    answer = await ask({"method": "loads"}, **{"Content-Type": "text/plain"})
    assert answer["code"] == "unsupported_media_type"
    assert answer["error"].endswith("(allowed: application/json, application/msgpack)")


async def test_ids_come_back(ask):
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"X-Request-Id": "r-1", "Traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = await ask.bus.client.request(SUBJECT, b'{"method": "loads"}', headers=headers)
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.headers["traceparent"].split("-")[1] == trace


@pytest.mark.parametrize("said", ["", "soon", "0", "-1", "nan", "inf", "86401"])
async def test_a_deadline_is_seconds(ask, said):
    answer = await ask({"method": "loads"}, **{"x-timeout-s": said})
    assert (answer["code"], answer["field"]) == ("invalid_field", "x-timeout-s")


async def test_a_body_over_the_limit_is_refused(nats_server, bus, eventually):
    async with RunningRouter(nats_server.url, body_limit_bytes=1024).running():
        answer = await eventually(lambda: requested(bus, b" " * 1025))
        assert answer["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("reply", "head"),
    [
        (b"i", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        (b"i", b"NATS/1.0 100 \xff\r\n\r\n"),
        (b"\xff\xfe", b"NATS/1.0\r\n\r\n"),
        (b"i", b"NATS/1.0\r\n: \xff\r\n\xff\r\n\r\n"),
    ],
)
async def test_no_message_disconnects_a_router(ask, nats_server, caplog, reply, head):
    """Said by hand: clients would not."""
    host, _, port = nats_server.url.removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    lengths = b"%d %d" % (len(head), len(head) + 2)
    writer.write(b"HPUB %s %s %s\r\n%s{}\r\nPING\r\n" % (SUBJECT.encode(), reply, lengths, head))
    await reader.readuntil(b"PONG\r\n")
    assert isinstance(await ask({"method": "loads"}), list)
    assert "lost the connection" not in caplog.text
    writer.close()


async def test_router_replies_only_to_inboxes(ask, router):
    """Replies go to inboxes only, not to the event log, nor to subjects of the server."""
    reported = []

    async def note(message):
        reported.append(message.subject)

    for subject in ("kv.test.>", "$KV.>", "orders.>"):
        await ask.bus.client.subscribe(subject, cb=note)
    asked = b'{"method": "loads"}'
    foreign = ("kv.test.events.1.0", "kv.test.router", "$KV.kv-test-workers.worker.1", "orders.new")
    for reply in foreign:
        await ask.bus.client.publish(SUBJECT, asked, reply=reply)
    await ask({"method": "loads"})
    assert "kv.test.events.1.0" not in reported
    assert "$KV.kv-test-workers.worker.1" not in reported
    assert "orders.new" not in reported


async def requested(bus, payload, **headers):
    """An answer; None while there is no subscriber."""
    try:
        answer = await bus.client.request(SUBJECT, payload, timeout=60, headers=headers or None)
    except NoRespondersError:
        return None
    return json.loads(answer.data)


@pytest.fixture
async def queueing(nats_server, eventually):
    """A router of one worker, that has work for one request; and a caller."""
    options = {"router_queue_threshold": 0.5, "max_bus_requests": 1}
    async with RunningRouter(nats_server.url, **options).running() as router:
        await router.worker(1, max_num_batched_tokens=64)
        async with connection(nats_server.url, "caller", lambda _: None) as bus:
            body = {"method": "new", "tokens": PROMPT, "request_id": "first"}
            assert (await requested(bus, json.dumps(body).encode()))["worker_id"] == 1
            router.bus = bus
            yield router


async def pending(bus):
    (loads,) = await requested(bus, b'{"method": "loads"}')
    return loads["pending_count"]


def waiting(request_id, **fields):
    body = {"method": "select_and_reserve", "token_ids": PROMPT, "request_id": request_id}
    return json.dumps({**body, **fields}).encode()


async def test_waiting_request_is_answered_later_without_blocking_others(queueing, eventually):
    bus = queueing.bus
    second = asyncio.create_task(requested(bus, waiting("second")))
    await eventually(lambda: equals(pending(bus), 1))
    freed = await requested(bus, b'{"method": "free", "request_id": "first"}')
    assert freed == {"status": "ok"}
    answer = await second
    assert (answer["request_id"], answer["worker_id"]) == ("second", 1)
    assert answer["waited_s"] > 0


async def test_waiting_is_announced_where_the_caller_says(queueing, eventually):
    """To an inbox alone, and not to one that would be read as another command."""
    bus, announced = queueing.bus, []

    async def note(message):
        announced.append(message.subject)

    for subject in ("_INBOX.waits.*", "orders.>"):
        await bus.client.subscribe(subject, cb=note)
    inboxes = ("_INBOX.waits.a", "orders.new", "_INBOX.waits.a 0 0", "_INBOX.waits.b")
    asked = [
        asyncio.create_task(requested(bus, waiting(f"w{number}"), **{"x-waiting-inbox": inbox}))
        for number, inbox in enumerate(inboxes)
    ]
    await eventually(lambda: equals(pending(bus), len(inboxes)))
    await eventually(lambda: announced == ["_INBOX.waits.a", "_INBOX.waits.b"])
    for request_id in ("first", "w0", "w1", "w2"):
        assert await requested(bus, b'{"method": "free", "request_id": "%s"}' % request_id.encode())
    assert [(await each)["request_id"] for each in asked] == ["w0", "w1", "w2", "w3"]
    refused = 'kv_router_refusals_total{code="undeliverable",interface="nats"}'
    assert await queueing.metric(refused) == 1


async def test_request_past_its_timeout_is_withdrawn(queueing, eventually):
    answer = await requested(queueing.bus, waiting("second"), **{"x-timeout-s": "0.05"})
    assert (answer["code"], answer["timeout_s"]) == ("deadline_exceeded", 0.05)
    assert await pending(queueing.bus) == 0
    assert await queueing.metric("kv_router_reservations") == 1


async def test_request_beyond_the_limit_is_refused_at_once(queueing):
    """Prompts long enough for the hashing thread, until they are too many."""
    long = json.dumps({"method": "select", "token_ids": list(range(60_000))}).encode()
    codes = []

    async def is_one_refused():
        answers = await asyncio.gather(*(requested(queueing.bus, long) for _ in range(4)))
        codes.extend(answer.get("code") for answer in answers)
        return "too_many_requests" in codes

    await eventually(is_one_refused)
    assert set(codes) == {None, "too_many_requests"}
    assert await queueing.metric('kv_router_bus_requests{queue_group="router"}') == 0
    refused = 'kv_router_refusals_total{code="too_many_requests",interface="nats"}'
    assert await queueing.metric(refused) == codes.count("too_many_requests")


async def test_a_router_that_ends_finishes_what_it_has_begun(nats_server, bus):
    """No request waits in vain: it gets an answer, or an error at once if no router is there."""
    async with RunningRouter(nats_server.url).running() as router:
        await router.worker(1)
        body = json.dumps({"method": "select", "token_ids": list(range(60_000))}).encode()
        asked = [asyncio.create_task(requested(bus, body)) for _ in range(8)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    answers = await asyncio.gather(*asked)
    assert all(answer is None or answer["worker_id"] == 1 for answer in answers)
    assert any(answers)


async def test_router_without_workers_leaves_requests_to_the_others(
    router, nats_server, monkeypatch
):
    """It would refuse for want of workers what they can place."""
    monkeypatch.setattr("router.discovery.router_presence.ANSWERS_AFTER_S", 3600.0)
    answered = 'kv_router_requests_total{code="ok",interface="nats",route="select"}'
    await router.worker(1)
    young = RunningRouter(nats_server.url, name="young", min_initial_workers=2)
    async with young.running(), RouterClient.over_nats(nats_server.url, "test") as client:
        await eventually(lambda: young.view(1))
        for _ in range(20):
            await client.select(SelectRequest(token_ids=PROMPT))
        assert await router.metric(answered) == 20
        assert (await young.client.get("/ready")).status_code == 503
        await router.worker(2)
        await eventually(young.is_ready)

        async def young_answers():
            await client.select(SelectRequest(token_ids=PROMPT))
            return await young.metric(answered)

        await eventually(young_answers)
