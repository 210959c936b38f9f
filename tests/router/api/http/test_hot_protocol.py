"""Hot requests answered where they are parsed, and by the long way: the same answers."""

import asyncio
import json

import pytest

from support.processes.running import RunningRouter
from support.processes.servers import until_still

BODY = json.dumps({"token_ids": [*range(40)]}).encode()


@pytest.fixture
async def fleet(router):
    await router.worker(1)
    return router


def request(path="/select", body=BODY, method="POST", version="1.1", **headers):
    named = {"host": "x", "content-type": "application/json", "content-length": len(body)}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}\r\n" for name, value in named.items()]
    return f"{method} {path} HTTP/{version}\r\n{''.join(lines)}\r\n".encode() + body


async def connect(router):
    url = router.client.base_url
    return await asyncio.open_connection(url.host, url.port)


async def read_answer(reader):
    """Status, headers and body of the next answer."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.splitlines()[:-1]
        headers = dict(line.split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)


async def answers(router, *pieces, count=1, pause_s=0.0):
    reader, writer = await connect(router)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return [await read_answer(reader) for _ in range(count)]
    finally:
        writer.close()


def plain(answer):
    """An answer without what moves with time; the age of trust has now two digits, now three."""
    status, headers, body = answer
    return status, {**headers, "date": "", "content-length": ""}, {**body, "trust": ""}


async def test_whole_and_piecemeal_requests_get_the_same_answer(fleet):
    whole = request()
    (at_once,) = await answers(fleet, whole)
    cuts = (40, len(whole) - len(BODY), len(whole) - 3)
    for cut in cuts:
        (piecemeal,) = await answers(fleet, whole[:cut], whole[cut:], pause_s=0.05)
        assert plain(piecemeal)[0::2] == plain(at_once)[0::2]
        assert set(piecemeal[1]) == set(at_once[1])


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"body": b"{"}, 400, "malformed_body"),
        ({"body": b'{"token_ids":[-1]}'}, 422, "invalid_field"),
        ({"content_type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content_encoding": "gzip"}, 415, None),
        ({"path": "/reservations/x", "method": "DELETE"}, 404, "reservation_not_found"),
        ({"body": b'{"token_ids":[1],"model_name":"zz"}'}, 503, "no_endpoints"),
    ],
)
async def test_refusals_are_the_same_both_ways(fleet, fields, status, code):
    whole = request(**fields)
    (at_once,) = await answers(fleet, whole)
    (piecemeal,) = await answers(fleet, whole[:-1], whole[-1:], pause_s=0.05)
    assert plain(at_once)[::2] == plain(piecemeal)[::2]
    assert at_once[0] == status
    assert code in (None, at_once[2]["code"])


async def test_pipelined_requests_are_answered_in_order(fleet):
    book = [
        request("/select_and_reserve", json.dumps({"token_ids": [1], "request_id": n}).encode())
        for n in ("a", "b", "c")
    ]
    health = request("/health", b"", "GET")
    mixed = b"".join([book[0], health, book[1], request("/reservations/a", b"", "DELETE"), book[2]])
    found = await answers(fleet, mixed, count=5)
    assert [status for status, _, _ in found] == [200] * 5
    assert [body.get("request_id") for _, _, body in found] == ["a", None, "b", None, "c"]


async def test_very_many_pipelined_requests_are_answered(fleet):
    found = await answers(fleet, request("/reservations/x", b"", "DELETE") * 2_000, count=2_000)
    assert {status for status, _, _ in found} == {404}


async def test_the_connection_is_closed_where_the_caller_wants_it(fleet):
    for whole in (request(connection="close"), request(version="1.0")):
        reader, writer = await connect(fleet)
        writer.write(whole)
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""
        writer.close()


async def test_ids_come_back_with_the_answer(fleet):
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    (answer,) = await answers(fleet, request(x_request_id="mine", traceparent=span))
    assert answer[1]["x-request-id"] == "mine"
    assert answer[1]["traceparent"].split("-")[1] == span.split("-")[1]
    assert answer[2]["request_id"] == "mine"


async def test_100_continue_is_sent_before_the_body(fleet):
    whole = request(expect="100-continue")
    reader, writer = await connect(fleet)
    head, body = whole[: -len(BODY)], whole[-len(BODY) :]
    writer.write(head)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(body)
    assert (await read_answer(reader))[0] == 200
    writer.close()


async def test_a_refusal_before_the_body_keeps_the_connection(fleet):
    (reader, writer), (late, other) = [await connect(fleet) for _ in range(2)]
    head = request(content_encoding="gzip")[: -len(BODY)]
    for here, there in ((reader, writer), (late, other)):
        there.write(head)
        assert (await read_answer(here))[0] == 415
    writer.write(BODY)
    assert await late.read() == b""  # its body did not come in time
    writer.write(request())
    assert (await read_answer(reader))[0] == 200
    for each in (writer, other):
        each.close()


async def test_a_small_limit_holds_for_bodies_that_come_whole(nats_server):
    async with RunningRouter(nats_server.url, body_limit_bytes=1024).running() as router:
        answer = await router.post("/select", {"token_ids": [1] * 1_000})
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_a_caller_that_reads_nothing_does_not_fill_our_memory(router):
    """Beyond what sockets hold, answers wait for it to read; others are served meanwhile."""
    reader, writer = await connect(router)
    try:
        writer.transport.pause_reading()
        for _ in range(8):
            writer.write(request("/reservations/x", b"", "DELETE") * 1_000)
        await until_still(writer.transport.get_write_buffer_size)
        assert (await router.client.get("/health")).status_code == 200
        writer.transport.resume_reading()
        statuses = [(await read_answer(reader))[0] for _ in range(8_000)]
        assert set(statuses) == {404}
    finally:
        writer.close()


async def test_answers_of_one_turn_come_before_what_ends_the_connection(fleet):
    """They are written at the end of a loop turn; an earlier close writes them first."""
    whole = request()
    reader, writer = await connect(fleet)
    writer.write(whole + whole + b"garbage\r\n\r\n")
    statuses = [(await read_answer(reader))[0] for _ in range(3)]
    assert statuses == [200, 200, 400]
    assert await reader.read() == b""
    writer.close()
    found = await answers(fleet, whole + request(connection="close"), count=2)
    assert [status for status, _, _ in found] == [200, 200]


async def test_repeated_request_gets_the_same_response(fleet):
    """Known heads, parsed heads and uvicorn's way, in turn on one connection."""
    reader, writer = await connect(fleet)
    waits = request("/reservations", json.dumps({"token_ids": [1], "worker_id": 1}).encode())
    for number, whole in enumerate([request(), waits, request("/health", b"", "GET")] * 3):
        writer.write(whole)
        status, _, _ = await read_answer(reader)
        assert status == (200, 400, 200)[number % 3]
    for tokens in (40, 30_000, 40, 30_000):  # the long ones have to wait for a thread
        body = json.dumps({"token_ids": [5] * tokens}).encode()
        writer.write(request("/select", body))
        status, _, reply = await read_answer(reader)
        assert (status, reply["isl_tokens"]) == (200, tokens)
    for id_ in "abc":
        body = json.dumps({"token_ids": [1], "worker_id": 1, "request_id": id_}).encode()
        writer.write(request("/reservations", body))
        status, _, reply = await read_answer(reader)
        assert (status, reply["request_id"]) == (201, id_)
    writer.close()


async def test_a_burst_does_not_exceed_the_limit_on_requests():
    """All of it is read in one turn of the loop, before anyone has begun to wait."""
    limits = {"use_kv_events": False, "router_queue_threshold": 0.0, "max_requests": 3}
    async with RunningRouter("", **limits).running() as router:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        await router.post("/workers", {**worker, "max_num_batched_tokens": 16})
        booked = await router.post("/select_and_reserve", {"token_ids": [1] * 64})
        assert booked.status_code == 200
        connections = [await connect(router) for _ in range(8)]
        for _, writer in connections:
            writer.write(request("/select_and_reserve"))
        reading = [asyncio.create_task(read_answer(reader)) for reader, _ in connections]
        for _ in range(5):
            done, waiting = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result()[2]["code"] for task in done} == {"too_many_requests"}
            reading = list(waiting)
            if len(reading) == 3:
                break
        assert len(reading) == 3
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
        for _, writer in connections:
            writer.close()


@pytest.fixture
async def plain_fleet(nats_server):
    async with RunningRouter(nats_server.url, policy="predictive").running() as router:
        await router.worker(1)
        yield router


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"x_request_id": "mine"},
        {"x_other": "1"},
        {"x_request_id": "mine", "authorization": "Bearer of-nobody"},
        {"x_dynamo_session_id": "s"},
    ],
)
async def test_cached_heads_are_answered_like_new_ones(plain_fleet, fields):
    """The third time head and words are known, so that nothing but the tokens is read, whatever
    else the head says.
    """
    body = b'{"token_ids":[%s],"routing_group":"default"}'
    found = [
        plain((await answers(plain_fleet, request(body=body % tokens, **fields)))[0])
        for tokens in (b"1", b"1,2", b"1,2,3", b"1,2,3", b"1,2,3,4")
    ]
    assert found[2][::2] == found[3][::2]  # not how long they are, which moves with time
    assert [answer["isl_tokens"] for _, _, answer in found] == [1, 2, 3, 3, 4]
    assert {answer.get("request_id") for _, _, answer in found} == {fields.get("x_request_id")}
    decided = 'kv_router_decisions_total{command="select"}'
    assert await plain_fleet.metric(decided) == len(found)
    counted = 'kv_router_requests_total{code="200",interface="http",route="/select"}'
    assert await plain_fleet.metric(counted) == len(found)
    assert await plain_fleet.metric("kv_router_prompt_tokens_total") == 13


async def test_cached_heads_are_refused_like_new_ones(plain_fleet, eventually):
    """A known head is no plain request without workers, or before another body."""
    bad, good = b'{"token_ids":[1,-2]}', b'{"token_ids":[1,2]}'
    for body in (good, good, good):
        assert (await answers(plain_fleet, request(body=body)))[0][0] == 200
    assert (await answers(plain_fleet, request(body=bad)))[0][0] == 422
    assert (await answers(plain_fleet, request(body=b'{"token_ids":[]}')))[0][0] == 200
    for _ in range(3):
        answer = await plain_fleet.post("/select?answer=headers", {"token_ids": [1, 2]})
        assert (answer.headers["x-worker-id"], answer.content) == ("1", b"")
    warned = request(body=b'{"token_ids":[1],"nobody":1}')
    for _ in range(3):
        assert (await answers(plain_fleet, warned))[0][2]["warnings"]
    order = {"lifecycle": "draining"}
    assert (await plain_fleet.client.patch("/workers/1", json=order)).status_code == 200

    async def is_refused():  # orders go over the bus
        return (await answers(plain_fleet, request(body=good)))[0][0] == 503

    await eventually(is_refused)


async def test_requests_under_ids_are_booked_and_answered_under_them(fleet):
    for said in ("a", "b", "c", "a"):
        answer = await fleet.client.post(
            "/select_and_reserve", json={"token_ids": [1]}, headers={"x-request-id": said}
        )
        assert answer.headers["x-request-id"] == said
        if answer.status_code == 200:
            assert answer.json()["request_id"] == said
    assert answer.json()["code"] == "duplicate_reservation"


async def test_bodies_behind_a_known_head_are_read_without_the_parser(fleet):
    """In two pieces, in three, with the next request behind it, and refused by its length."""
    body = json.dumps({"token_ids": [1, 2, 3]}).encode()
    whole = request(body=body)
    head = whole[: -len(body)]
    for _ in range(3):
        (first,) = await answers(fleet, head, body, pause_s=0.02)
    assert first[0] == 200
    cut = ([head, body], [head, body[:5], body[5:]], [whole[:-3], whole[-3:] + whole])
    for pieces in cut:
        found = await answers(
            fleet, *pieces, count=sum(map(len, pieces)) // len(whole), pause_s=0.02
        )
        assert {plain(answer)[0] for answer in found} == {200}
        assert {plain(answer)[2]["isl_tokens"] for answer in found} == {3}
    long = head.replace(b"content-length: %d" % len(body), b"content-length: 999999999")
    ((status, _, told),) = await answers(fleet, long)
    assert (status, told["code"]) == (413, "body_too_large")


async def test_a_client_that_only_closes_its_sending_side_is_answered(fleet):
    """Also where the end comes together with the request."""
    for _ in range(4):
        reader, writer = await connect(fleet)
        writer.write(request())
        writer.write_eof()
        assert (await read_answer(reader))[0] == 200
        assert await reader.read() == b""
        writer.close()


async def test_pipelined_requests_that_wait_follow_one_of_the_application(fleet):
    """The application reads its body, and so the connection, while others are queued."""
    tokens = {"token_ids": [1]}
    asked = [request("/potential_loads", json.dumps(tokens).encode())]
    for number in range(3):
        body = {**tokens, "worker_id": 1, "request_id": str(number)}
        asked.append(request("/reservations", json.dumps(body).encode()))
    found = await answers(fleet, b"".join(asked), count=4)
    assert [status for status, _, _ in found] == [200, 201, 201, 201]
    assert [body["request_id"] for _, _, body in found[1:]] == ["0", "1", "2"]


async def test_repeated_life_cycles_of_other_ids_and_traces_are_answered_alike(fleet):
    """From the third on, no head is parsed; ids that paths contain only encoded always are."""
    reader, writer = await connect(fleet)
    names = ["a", "b", "c", "d:1", "e%20f", "g", "e%20f", "h~", "unknown"]
    for number, name in enumerate(names):
        booked = {"token_ids": [1, 2], "request_id": name.replace("%20", " ")}
        span = f"00-{number + 1:032x}-b7ad6b7169203331-01"
        steps = (
            request("/select_and_reserve", json.dumps(booked).encode(), traceparent=span),
            request(f"/reservations/{name}/prefill_complete", b"", x_request_id=f"x{number}"),
            request(f"/reservations/{name}", b"", "DELETE", traceparent=span),
            request(f"/reservations/{name}", b"", "DELETE"),
        )
        found = []
        for step in steps:
            writer.write(step)
            found.append(await read_answer(reader))
        assert [status for status, _, _ in found] == [200, 200, 200, 404]
        assert [body.get("status") for _, _, body in found[1:3]] == ["ok", "ok"]
        traces = [headers.get("traceparent", "")[3:35] for _, headers, _ in found]
        assert traces == [span[3:35], "", span[3:35], ""]
        assert found[1][1]["x-request-id"] == f"x{number}"
        assert found[3][2]["request_id"] == booked["request_id"]
    writer.close()


async def test_life_cycles_as_ordinary_clients_write_them_need_no_body(fleet):
    """A DELETE without a length has no body; bytes after it are the next request."""
    reader, writer = await connect(fleet)
    for number in range(4):
        booked = json.dumps({"token_ids": [1], "request_id": f"r{number}"}).encode()
        writer.write(request("/select_and_reserve", booked))
        assert (await read_answer(reader))[0] == 200
        writer.write(f"DELETE /reservations/r{number} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert (await read_answer(reader))[0] == 200
    writer.write(b"".join(b"DELETE /reservations/r0 HTTP/1.1\r\nhost: x\r\n\r\n" for _ in "ab"))
    assert [(await read_answer(reader))[0] for _ in "ab"] == [404, 404]
    writer.close()
