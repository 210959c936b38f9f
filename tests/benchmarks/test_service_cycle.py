import asyncio
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import msgspec
import pytest
from service_cycle import (
    Cycle,
    body_of,
    bookings_left,
    client_booking,
    client_report,
    client_steps,
    wrong,
)
from service_load import (
    Address,
    Load,
    NatsGenerator,
    bare_request,
    nats_request,
    repeated,
    request,
    run_load,
)

from router.client.client import RouterClient
from router.protocol.replies import Decision, OverlapTokens, Trust
from router.protocol.requests import SelectRequest
from support.processes.http_server import LocalHttpServer
from support.processes.listening import listening

CYCLE = Cycle("r-1", holder=3, held_tokens=384, script=())


def reply(worker_id, gpu_tokens, selection_id="r-1", effective_tokens=None):
    to_compute = 512 - gpu_tokens if effective_tokens is None else effective_tokens
    overlap = {"gpu": gpu_tokens}
    fields = {"worker_id": worker_id, "overlap": overlap, "selection_id": selection_id}
    fields |= {"isl_tokens": 512, "effective_prefill_tokens": to_compute}
    return json.dumps(fields).encode()


def test_an_overlap_that_the_chosen_rank_holds_is_right():
    assert wrong(CYCLE, reply(3, 384)) == ""
    assert wrong(CYCLE, reply(4, 0)) == ""


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (reply(4, 384), "worker 4 holds 0 tokens, the answer claims 384"),
        (reply(3, 0), "worker 3 holds 384 tokens, the answer claims 0"),
        (reply(3, 384, selection_id="r-2"), "r-1 was answered as r-2"),
        (reply(3, 384, effective_tokens=512), "128 tokens are to be computed, not 512"),
    ],
)
def test_a_wrong_answer_is_described(answer, problem):
    assert wrong(CYCLE, answer) == problem


def test_ranks_with_any_load_are_left():
    idle = {"active_requests": 0, "potential_prefill_tokens": 0, "potential_decode_blocks": 0}
    held = idle | {"potential_decode_blocks": 2}
    assert list(bookings_left([{"loads": [idle, held]}, {"loads": [idle]}])) == [held]


class RecordingServer:
    """Answers like a router as far as a client of it needs, and keeps what came."""

    def __init__(self):
        self.received = []

    async def serve(self, reader, writer):
        with suppress(ConnectionError):
            while head := await reader.read(1 << 16):
                self.received.append(head)
                is_booking = b"/select_and_reserve" in head
                body = DECISION if is_booking else b'{"results":[{"status":200},{"status":200}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


DECISION = msgspec.json.encode(
    Decision(
        request_id="r-1",
        model_name="m",
        routing_group="g",
        worker_id=1,
        dp_rank=0,
        endpoint="http://w",
        block_size=16,
        isl_tokens=100,
        overlap=OverlapTokens(0, 0, 0, 0, 0, {}),
        overlap_blocks=0,
        predicted_cached_blocks=0,
        effective_prefill_tokens=100,
        potential_decode_blocks=7,
        policy="predictive",
        trust=Trust("exact", 1, 0.0, ""),
    )
)


async def test_bytes_are_those_of_the_client():
    router = RecordingServer()
    chosen = SelectRequest(
        token_ids=list(range(100)), model_name="m", routing_group="g", request_id="r-1"
    )
    async with (
        listening(router.serve) as port,
        RouterClient.over_http(f"http://127.0.0.1:{port}") as client,
        client.reserve(chosen) as reservation,
    ):
        reservation.note_tokens(1)
    booked, reported = (
        each.replace(b"host: 127.0.0.1:%d" % port, b"host: localhost") for each in router.received
    )
    ours = SelectRequest(token_ids=list(range(100)), model_name="m", routing_group="g")
    assert booked == client_booking("r-1", ours)
    assert reported == client_report([client_steps("r-1")])


class Refusing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503 if self.path == "/refused" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


class RefusingServer(LocalHttpServer):
    def _handler(self):
        return Refusing


def loaded(*paths, count=4, segments=1, **options):
    head, body = request(paths[0], b"", "a/b")[:-5], b"x" * 100_000
    first = head + b"%d\r\n\r\n" % len(body)
    booking = (first + body,) if segments == 1 else (first, body)
    script = (booking, *((bare_request("POST", path),) for path in paths[1:]))
    with RefusingServer() as server:
        return run_load((Address(server.port),), [script] * count, 2, **options)


@pytest.mark.parametrize("segments", [1, 2])
def test_scripts_are_carried_out_to_their_ends(segments):
    load = loaded("/one", "/two", "/three", segments=segments, keep_every=2)
    assert [len(each) for each in load.latencies_s] == [4, 4, 4]
    assert load.scripts == 4
    assert not load.refusals
    assert {number for number, _ in load.kept} == {0, 2}
    assert all(body_of(answer) == b"x" * 100_000 for _, answer in load.kept)


def test_a_refusal_ends_its_script():
    load = loaded("/one", "/refused", "/three")
    assert [len(each) for each in load.latencies_s] == [4, 0, 0]
    assert [each.step for each in load.refusals] == [1, 1, 1, 1]


def test_an_open_loop_is_spread_over_its_time():
    load = loaded("/one", count=6, per_s=50.0)
    assert load.seconds >= 5 / 50.0


def test_figures_of_a_load():
    load = Load(seconds=2.0, latencies_s=[[0.3, 0.1, 0.2], [0.1]], processor_s=0.5)
    assert (load.scripts, load.per_s, load.processor_s_each) == (1, 0.5, 0.5)
    assert (load.p50_s(), load.p99_s()) == (0.2, 0.3)


def test_requests_are_repeated_in_turn():
    assert repeated([b"a", b"b"], 3) == [((b"a",),), ((b"b",),), ((b"a",),)]


async def test_scripts_over_nats_are_carried_out_to_their_ends(nats_server, bus):
    answered = []

    async def answer(message):
        answered.append(message.data)
        await message.respond(b"answer to " + message.data)

    await bus.client.subscribe("asked", cb=answer)
    await bus.client.flush()
    scripts = [
        tuple((nats_request("asked", number, step, "a/b"),) for step in (b"one", b"two"))
        for number in range(5)
    ]
    port = int(nats_server.url.rsplit(":", 1)[1])
    generator = NatsGenerator(port, scripts, concurrency=2)
    load = await asyncio.to_thread(generator.run, 2)
    generator.close()
    assert [len(each) for each in load.latencies_s] == [5, 5]
    assert dict(load.kept) == dict.fromkeys((0, 2, 4), b"answer to one")
    assert sorted(answered) == [b"one"] * 5 + [b"two"] * 5
