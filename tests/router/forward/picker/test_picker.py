"""A picker in a router's process, driven as gateways drive it, with workers of a real bus."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from h2.connection import H2Connection

from router.forward.picker.answers import BOOKING
from router.forward.picker.wire.kv_router_picker_pb2 import AccessLogs, ProcessingRequest
from support.fleets.gateways import (
    DESTINATION,
    Gateway,
    answer_head,
    body,
    chunks,
    completion,
    head,
    kinds,
    metadata,
    refusal,
    removed_headers,
    set_headers,
)
from support.processes.running import RunningRouter
from support.processes.servers import equals, eventually, free_port
from support.values.token_files import token_lines, token_of

ENDPOINTS = {1: "http://10.0.0.1:8000", 2: "http://10.0.0.2:8000"}


class Picked:
    """A router with a picker, and a gateway."""

    def __init__(self, router, gateway):
        self.router, self.gateway = router, gateway

    async def bookings(self):
        loads = (await self.router.client.get("/loads")).json()
        return {
            each["worker_id"]: each["active_requests"]
            for scope in loads
            for each in scope["loads"]
            if each["active_requests"]
        }

    async def until_booked(self, **expected):
        wanted = {int(name[1:]): count for name, count in expected.items()}

        async def is_booked():
            return await self.bookings() == wanted

        await eventually(is_booked)

    async def routed(self, stream, *messages, count=2):
        await stream.send(*(messages or (head(), body(completion()))))
        return await stream.received(count)

    async def metric(self, name):
        text = (await self.router.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(f"kv_router_epp_{name} ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@asynccontextmanager
async def picking(workers=ENDPOINTS, **fields):
    """A router without a bus, whose workers are registered over HTTP."""
    port = free_port()
    settings = {"epp_tls": False, "probe_interval_s": 0.0, **fields}
    running = RunningRouter("", epp_port=port, **settings)
    async with running.running() as router, Gateway(port).connected() as gateway:
        for worker_id, endpoint in workers.items():
            more = endpoint if isinstance(endpoint, dict) else {"endpoint": endpoint}
            worker = {"worker_id": worker_id, "block_size": 4, **more}
            assert (await router.post("/workers", worker)).status_code == 201
        for worker_id in workers:
            await eventually(lambda hint=f"10.0.0.{worker_id}:8000": _lists(gateway, hint))
        yield Picked(router, gateway)


async def _lists(gateway, address):
    """Whether the picker's list of workers has this one already."""
    async with gateway.stream() as stream:
        await stream.send(head("/v1/models", "GET", eos=True, subset=address))
        found = kinds(await stream.received())
        await stream.end()
        return found == ["request_headers"]


@pytest.fixture
async def picked():
    async with picking(epp_objectives="chat=5,batch=-1") as picked:
        yield picked


async def test_request_is_placed_booked_and_freed_with_its_stream(picked):
    async with picked.gateway.stream() as stream:
        first, second = await picked.routed(stream)
        at = set_headers(first)[DESTINATION]
        assert metadata(first)[DESTINATION] == at
        assert chunks([second]) == [(completion(), True)]
        worker_id = 1 if at == "10.0.0.1:8000" else 2
        await picked.until_booked(**{f"w{worker_id}": 1})
        await stream.send(answer_head(200, at))
        assert kinds(await stream.received()) == ["response_headers"]
        assert await picked.bookings() == {worker_id: 1}
        assert await stream.end() is grpc.StatusCode.OK
    await picked.until_booked()
    assert await picked.metric('requests_total{ended="answered"}') == 1


async def test_stream_that_is_cut_off_leaves_no_booking(picked):
    before = await picked.metric('requests_total{ended="no_answer"}')
    async with picked.gateway.stream() as stream:
        await picked.routed(stream)
        assert sum((await picked.bookings()).values()) == 1
    await picked.until_booked()
    assert await picked.metric('requests_total{ended="no_answer"}') == before + 1


async def has_one_booking(picked):
    return sum((await picked.bookings()).values()) == 1


async def test_booking_of_a_long_answer_outlasts_the_time_without_progress():
    async with picking(reservation_ttl_s=0.6) as picked, picked.gateway.stream() as stream:
        first, _ = await picked.routed(stream)
        await stream.send(answer_head(200, set_headers(first)[DESTINATION]))
        await stream.received()
        for number in range(2):  # each is booked later, reports nothing, and expires
            asked = {"token_ids": [1, 2, 3, 4], "request_id": f"silent-{number}"}
            await picked.router.post("/select_and_reserve", asked)
            assert sum((await picked.bookings()).values()) == 2
            await eventually(lambda: has_one_booking(picked))
        for number in range(2):
            url = f"/reservations/silent-{number}"
            assert (await picked.router.client.delete(url)).status_code == 404


RANKS = {1: {"endpoint": ENDPOINTS[1], "data_parallel_size": 2}}
PREFILLS = {1: ENDPOINTS[1], 2: {"endpoint": ENDPOINTS[2], "role": "prefill"}}


async def test_rank_and_prefill_worker_of_a_request_are_named_to_its_engine():
    async with picking(RANKS) as picked, picked.gateway.stream() as stream:
        given = head(x_data_parallel_rank="7", x_prefiller_host_port="1.2.3.4:5")
        first, _ = await picked.routed(stream, given, body(completion()))
        assert set_headers(first)["x-data-parallel-rank"] in ("0", "1")
        assert "x-prefiller-host-port" in removed_headers(first)
    async with picking(PREFILLS) as picked:
        async with picked.gateway.stream() as stream:
            first, _ = await picked.routed(stream, head(), body(completion(prompt=[1] * 64)))
            assert set_headers(first)[DESTINATION] == "10.0.0.1:8000"
            assert set_headers(first)["x-prefiller-host-port"] == "10.0.0.2:8000"
            await picked.until_booked(w1=1, w2=1)
            await stream.send(answer_head(200, "10.0.0.1:8000"))
            await picked.until_booked(w1=1)
        await picked.until_booked()


async def test_request_served_elsewhere_is_booked_there(picked):
    async with picked.gateway.stream() as stream:
        first, _ = await picked.routed(stream)
        other = {"10.0.0.1:8000": 2, "10.0.0.2:8000": 1}[set_headers(first)[DESTINATION]]
        await stream.send(answer_head(200, f"10.0.0.{other}:8000"))
        await stream.received()
        await picked.until_booked(**{f"w{other}": 1})
        assert await picked.metric('served_elsewhere_total{outcome="moved"}') == 1
    await picked.until_booked()


async def test_subset_hint_limits_the_placement(picked):
    for number in (1, 2, 2, 1):
        async with picked.gateway.stream() as stream:
            hint = head(subset=[f"10.0.0.{number}:8000", "192.168.1.99:8000"])
            first, _ = await picked.routed(stream, hint, body(completion()))
            assert set_headers(first)[DESTINATION] == f"10.0.0.{number}:8000"


BAD = [
    ((head(subset=[]), body(completion())), (503, "no_endpoints")),
    ((head("/v1/models", "GET", eos=True, subset="1.1.1.1"),), (503, "no_endpoints")),
    ((head(), body(b"no healthy upstream")), (400, "malformed_body")),
    ((head(), body(completion(prompt=None))), (400, "invalid_field")),
    ((head(), body(completion(model="gpt"))), (404, "model_not_found")),
    ((head("/sleep"), body(b"{}")), (404, "not_found")),
    ((head("/metrics", "GET", eos=True),), (404, "not_found")),
    ((head("/v1/completions", "PUT"), body(b"{}")), (405, "method_not_allowed")),
    ((head(mode=1),), (500, "gateway_mode")),
    ((head(content_encoding="gzip"), body(b"")), (415, "unsupported_content_encoding")),
]


async def test_bad_requests_are_refused_by_an_immediate_response_and_no_status_of_grpc(picked):
    for messages, expected in BAD:
        async with picked.gateway.stream() as stream:
            await stream.send(*messages)
            status, error = refusal(await stream.received())
            assert (status, error["code"]) == expected
            assert await stream.end() is grpc.StatusCode.OK
    await picked.until_booked()


async def test_model_of_a_header_replaces_the_bodys_and_steering_is_removed(picked):
    async with picked.gateway.stream() as stream:
        steered = head(
            x_gateway_model_name_rewrite="default",
            x_gateway_inference_objective="chat",
            x_gateway_destination_endpoint="1.2.3.4:5",
        )
        first, second = await picked.routed(stream, steered, body(completion(model="alias")))
        assert chunks([second]) == [(b'{"model":"default","prompt":[1, 2, 3, 4]}', True)]
        assert set_headers(first)[DESTINATION] in ("10.0.0.1:8000", "10.0.0.2:8000")
        removed = {"x-gateway-model-name-rewrite", "x-gateway-inference-objective"}
        assert removed_headers(first) == removed


async def test_same_prefix_goes_to_the_same_worker_until_it_is_loaded(picked):
    """By the bookings alone: no engine has said anything yet."""
    prompt = list(range(2000))
    async with picked.gateway.stream() as one, picked.gateway.stream() as other:
        first, _ = await picked.routed(one, head(), body(completion(prompt=prompt)))
        second, _ = await picked.routed(other, head(), body(completion(prompt=[5, 6, 7])))
        assert set_headers(first)[DESTINATION] != set_headers(second)[DESTINATION]


async def test_health_names_are_those_that_gateways_and_probes_ask_for(picked):
    names = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
    assert [await picked.gateway.status(name) for name in names] == [1, 1, 1, 1]
    assert await picked.gateway.status("something") == 3


async def test_limits_are_refused_and_counted():
    async with picking(epp_max_streams=3, body_limit_bytes=2048) as picked:
        async with picked.gateway.stream() as stream:
            await stream.send(head(), body(bytes(4000)))
            assert refusal(await stream.received())[0] == 413
            await stream.end()
        streams = [picked.gateway.stream() for _ in range(4)]
        held = [await each.__aenter__() for each in streams]
        answered = []
        for each in held:
            await each.send(head(), body(completion()))
            answered += await each.received()
        assert kinds(answered) == ["request_headers"] * 3 + ["immediate_response"]
        assert refusal(answered[3:])[0] == 503
        for each in streams:
            await each.__aexit__(None, None, None)
        await picked.until_booked()
        assert await picked.metric('refusals_total{code="too_many_requests"}') == 1
        assert await picked.metric('refusals_total{code="body_too_large"}') == 1
        assert await picked.metric("streams") == 0


HEADS = {
    "completion": head(),
    "unknown route": head("/sleep"),
    "other method": head("/v1/completions", "PUT"),
    "models": head("/v1/models", "GET"),
    "subset": head(subset=["10.0.0.1:8000"]),
    "long body": head(content_length="999999999999"),
}


async def test_stranger_is_refused_by_the_headers_alone_and_learns_nothing(tmp_path):
    (tmp_path / "tokens.toml").write_text(token_lines("user", "route"))
    async with picking(workers={}, token_file=str(tmp_path / "tokens.toml")) as picked:
        for message in HEADS.values():
            async with picked.gateway.stream() as stream:
                await stream.send(message)  # and nothing of the body
                status, error = refusal(await stream.received())
                assert (status, error["code"]) == (401, "unauthenticated")


async def test_caller_is_refused_by_the_headers_alone(tmp_path):
    lines = token_lines("user", "route"), token_lines("limited", "route", requests_per_s=0.001)
    (tmp_path / "tokens.toml").write_text("".join(lines))
    expected = {
        "unknown route": (403, "user"),
        "subset": (503, "user"),
        "long body": (413, "user"),
        "completion": (429, "limited"),
    }
    async with picking(workers={}, token_file=str(tmp_path / "tokens.toml")) as picked:
        async with picked.gateway.stream() as stream:
            await stream.send(_with_token(head(), "limited"), body(completion()))
            await stream.received()
        for name, (expected_status, token) in expected.items():
            async with picked.gateway.stream() as stream:
                await stream.send(_with_token(HEADS[name], token))
                status, error = refusal(await stream.received())
                assert status == expected_status, error


def _with_token(message, name):
    given = ProcessingRequest.FromString(message.SerializeToString())
    value = f"Bearer {token_of(name)}".encode()
    given.request_headers.headers.headers.add(key="authorization", raw_value=value)
    return given


async def test_body_that_never_ends_is_refused_in_time():
    async with picking(body_timeout_s=0.3) as picked, picked.gateway.stream() as stream:
        await stream.send(head(), body(b"{", eos=False))
        assert refusal(await stream.received())[0] == 408


async def test_access_log_ends_a_booking_whose_stream_ended_before():
    async with picking(epp_ends="access_log") as picked:
        async with picked.gateway.stream() as stream:
            first, _ = await picked.routed(stream)
            assert await stream.end() is grpc.StatusCode.OK
        assert sum((await picked.bookings()).values()) == 1
        logs = AccessLogs()
        entry = logs.http_logs.log_entry.add()
        fields = {BOOKING: metadata(first)[BOOKING]}
        entry.common_properties.metadata.filter_metadata["envoy.lb"].update(fields)
        await picked.gateway.log(logs, AccessLogs())
        await picked.until_booked()
        assert await picked.metric('access_log_entries_total{outcome="ended"}') == 1


async def test_without_workers_requests_are_refused_and_the_picker_is_ready():
    async with picking(workers={}, no_worker_wait_s=0) as picked:

        async def is_ready():
            return await picked.gateway.status() == 1

        await eventually(is_ready)
        async with picked.gateway.stream() as stream:
            await stream.send(head(), body(completion()))
            status, error = refusal(await stream.received())
            assert (status, error["code"]) == (503, "no_endpoints")


async def test_vanished_client_of_a_waiting_request_takes_nothing():
    async with picking(workers={}, no_worker_wait_s=30) as picked:
        async with picked.gateway.stream() as stream:
            await stream.send(head(), body(completion()))
            await asyncio.sleep(0)
        async with picked.gateway.stream() as stream:
            await stream.send(head(), body(completion()))
            assert await stream.end() is grpc.StatusCode.OK

        async def is_over():
            return await picked.metric("streams") == 0

        await eventually(is_over)
        assert await picked.metric('requests_total{ended="unplaced"}') == 2


async def test_part_of_a_message_counts_among_the_bodies_that_are_held():
    limits = {"body_limit_bytes": 1_000_000, "bodies_limit_bytes": 1_500_000}
    async with picking(**limits) as picked:
        _, writer = await asyncio.open_connection(*picked.gateway.target.split(":"))
        http = H2Connection()
        http.initiate_connection()
        _begin_body(http, 900_000)
        writer.write(http.data_to_send())
        await eventually(lambda: equals(picked.metric("body_bytes"), 900_000))
        _begin_body(http, 900_000)
        writer.write(http.data_to_send())
        refused = 'refusals_total{code="too_much_at_once"}'
        await eventually(lambda: equals(picked.metric(refused), 1))
        assert await picked.metric("body_bytes") == 900_000
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: equals(picked.metric("body_bytes"), 0))


def _begin_body(http, size_bytes):
    """Send the headers of a request, and the begin of a message of this size."""
    stream, message = http.get_next_available_stream_id(), head().SerializeToString()
    path = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
    pseudo = {":method": "POST", ":scheme": "http", ":authority": "picker", ":path": path}
    http.send_headers(stream, [*pseudo.items(), ("content-type", "application/grpc")])
    prefixed = b"\0" + len(message).to_bytes(4, "big") + message
    http.send_data(stream, prefixed + b"\0" + size_bytes.to_bytes(4, "big") + bytes(10_000))
