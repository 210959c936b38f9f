"""The doctor against real sockets: healthy engines, and every way in which they are not."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager, suppress

import msgspec
import pytest
import zmq

from router.protocol.workers import WorkerRegistration
from router.tools.doctor.attachment import attachment
from support.engines.engine_messages import SglangStored, Vllm9Stored, Vllm10Stored
from support.engines.zmq_engines import Engine, removed, stored
from support.processes.servers import eventually, free_port
from support.values.doctoring import examine, says, verdicts, while_repeating


async def examine_engine(publisher, *events, **settings):
    """The same of an engine that has published these, one a batch, and goes on with removals of
    what it never stored.
    """
    for event in events:
        publisher.publish(event)
    publisher.wait()
    with_endpoints = examine(publisher.endpoint, publisher.replay_endpoint, **settings)
    return await while_repeating(lambda: publisher.publish(removed([999])), with_endpoints)


PROMPT = stored([1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lora_name=None)


async def test_a_healthy_engine_has_nothing_wrong():
    with Engine(topic="kv@1@m") as engine:
        seen, found = await examine_engine(engine, PROMPT, topic="kv@", block_size=4)
    well = {
        "events endpoint", "replay endpoint", "live events", "frames", "topic", "sequence",
        "wire version", "rank", "block size", "hash type", "mediums", "would hold", "replay",
        "replay end", "replay reach", "replay content",
    }  # fmt: skip
    assert {check for check, verdict in verdicts(found).items() if verdict == "ok"} == well
    assert set(found) - well <= {"events exposure", "replay exposure"}
    says(found, "would hold", "ok", "2 on device")
    says(found, "replay content", "ok", "byte for byte")
    assert attachment(seen).worker == WorkerRegistration(
        worker_id=1, model_name="MODEL", endpoint="http://ENGINE:8000", block_size=4,
        data_parallel_start_rank=0, data_parallel_size=1, engine="vllm", topic="kv@",
        kv_events_endpoints={0: engine.endpoint}, replay_endpoints={0: engine.replay_endpoint},
    )  # fmt: skip


async def test_an_idle_engine_is_known_by_its_replay_and_silence_is_no_illness():
    with Engine(topic="kv") as engine:
        engine.publish(PROMPT)
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "live events", "unknown", "0 batches", "send it a request")
    says(found, "topic", "ok", "'kv'")
    says(found, "block size", "ok", "4 tokens")
    says(found, "replay content", "unknown")
    assert "wrong" not in verdicts(found).values()


# ── Endpoints ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def answering(answer, *, at_once=False):
    """A TCP server that says one thing, to a request or at once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    if at_once or b"GET" in connection.recv(64):
                        connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(1.0)
                    with suppress(OSError):
                        while connection.recv(64):  # until the other side has read and closed
                            pass

    threading.Thread(target=serve, daemon=True).start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


async def test_closed_port_is_reported_with_the_flags_that_open_it():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    seen, found = await examine(endpoint, engine="vllm")
    flags = ("--kv-events-config", '"enable_kv_cache_events":true', endpoint.rpartition(":")[2])
    says(found, "events endpoint", "wrong", "nothing listens", *flags)
    assert set(found) == {"events endpoint"}
    assert not seen.is_publisher


async def test_flags_are_those_of_the_engine():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    _, found = await examine(endpoint, engine="sglang")
    assert "enable_kv_cache_events" not in found["events endpoint"].fix
    _, found = await examine(endpoint, engine="trtllm")
    assert "kv_events_config:" in found["events endpoint"].fix


async def test_unknown_host_is_reported():
    _, found = await examine("tcp://no-such-engine.invalid:5557")
    says(found, "events endpoint", "wrong", "has no address")


async def test_http_server_is_distinguished_from_an_engine():
    with answering(b"HTTP/1.1 200 OK\r\n\r\n") as endpoint:
        _, found = await examine(endpoint)
    says(found, "events endpoint", "wrong", "is an HTTP server", "--url")


async def test_another_protocol_is_quoted():
    with answering(b'INFO {"server": 1}\r\n', at_once=True) as endpoint:
        _, found = await examine(endpoint)
    says(found, "events endpoint", "wrong", "another protocol", "INFO {")


async def test_a_server_that_says_nothing():
    with answering(b"") as endpoint:
        _, found = await examine(endpoint)
    says(found, "events endpoint", "wrong", "sends nothing")


async def test_exchanged_endpoints_are_recognised():
    with Engine() as engine:
        _, found = await examine(engine.replay_endpoint, engine.endpoint)
    says(found, "events endpoint", "wrong", "is the replay socket", "exchange --zmq and --replay")
    says(found, "replay endpoint", "wrong", "is the events socket")


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")
async def test_an_encrypted_socket_is_named():
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        public, secret = zmq.curve_keypair()
        publisher.curve_publickey, publisher.curve_secretkey = public, secret
        publisher.curve_server = True
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        _, found = await examine(f"tcp://127.0.0.1:{port}")
    says(found, "events endpoint", "wrong", "CURVE")


async def test_unix_sockets_are_endpoints_too(tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.bind(endpoint)
        _, found = await examine(endpoint)
    says(found, "events endpoint", "ok", "PUB")
    assert "events exposure" not in found
    _, found = await examine(f"ipc://{tmp_path}/none")
    says(found, "events endpoint", "wrong")


async def test_a_port_that_is_open_to_others_is_a_warning():
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://*")
        _, found = await examine(f"tcp://127.0.0.1:{port}")
    exposure = found.get("events exposure")
    if exposure is not None:  # a machine with the loopback alone exposes nothing
        says(found, "events exposure", "warning", "all of this machine", "prompt's tokens")
    with Engine() as engine:
        _, found = await examine(engine.endpoint)
    assert "events exposure" not in found


async def test_wildcard_address_is_not_one_to_connect_to():
    with Engine() as engine:
        _, found = await examine(f"tcp://0.0.0.0:{engine.port}")
    says(found, "events exposure", "wrong", "not one to connect to")


# ── Messages ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("frames", "words"),
    [((b"kv", b"only two"), "2 frames"), ((b"kv", b"short", b"payload"), "of other than 8 bytes")],
)
async def test_wrong_frames_are_reported(frames, words):
    with Engine(has_replay=False) as engine:
        examination = examine(engine.endpoint)
        _, found = await while_repeating(lambda: engine.send_raw(frames), examination)
    says(found, "frames", "wrong", words, "[topic][sequence, 8 bytes][payload]")


async def test_a_filter_that_matches_nothing_is_wrong():
    with Engine(topic="kv@1@m") as engine:
        _, found = await examine_engine(engine, topic="kv-events")
    says(found, "topic", "wrong", "'kv@1@m'", "'kv-events' is no prefix", "topic 'kv@1@m'")


async def test_a_filter_that_matches_some_topics_leaves_the_others_out():
    with Engine(topic="kv@1") as engine:

        def publish_under_two():
            engine.publish(PROMPT)
            engine.send_raw((b"kv@2", (0).to_bytes(8, "big"), engine_payload(PROMPT)))

        examination = examine(engine.endpoint, topic="kv@1")
        _, found = await while_repeating(publish_under_two, examination)
    says(found, "topic", "warning", "'kv@1', 'kv@2'", "only those that begin with 'kv@1'")


async def test_missing_numbers_are_a_warning():
    with Engine() as engine:

        def lose_every_second():
            engine.publish(PROMPT)
            engine.lose(removed([1]))

        _, found = await while_repeating(lose_every_second, examine(engine.endpoint))
    says(found, "sequence", "warning", "batches missing while watching")
    says(found, "would hold", "warning", "engine events lost")
    says(found, "replay", "warning", "no endpoint given", "--replay", '"replay_endpoint"')


async def test_a_restart_while_watching_is_a_warning():
    with Engine() as engine:
        for _ in range(20):
            engine.publish(PROMPT)
        engine.wait()

        async def restart():
            await eventually(lambda: engine.is_heard)
            before = len(engine.published)
            await eventually(lambda: len(engine.published) >= before + 4)
            await asyncio.to_thread(engine.restart)

        restarting = asyncio.create_task(restart())
        examination = examine(engine.endpoint, seconds=2.5)
        _, found = await while_repeating(lambda: engine.publish(PROMPT), examination)
        await restarting
    says(found, "sequence", "warning", "went back", "restarted")
    says(found, "connection", "warning", "lost 1 times")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Vllm9Stored([1], None, [1, 2, 3, 4], 4, None), "arrays of 6 elements: vLLM 0.9"),
        (Vllm10Stored([1], None, [1, 2, 3, 4], 4, None, "GPU"), "arrays of 7 elements: vLLM 0.10"),
        (SglangStored([-1], None, [1, 2, 3, 4], 4, None, "GPU"), "maps: SGLang"),
        (PROMPT, "maps: vLLM 0.24 or later"),
    ],
)
async def test_every_wire_version_is_named(event, words):
    with Engine() as engine:
        engine.publish(msgspec.to_builtins(event))
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "wire version", "ok", words)
    says(found, "would hold", "ok")


async def test_hash_types_are_named():
    for hashes, words in (
        ([bytes(range(32))], "32 bytes"), ([-5], "64 bits, signed"), ([5], "64 bits, unsigned"),
    ):  # fmt: skip
        with Engine() as engine:
            engine.publish_payload(engine_payload(stored(hashes, [1, 2, 3, 4])))
            engine.wait()
            _, found = await examine(engine.endpoint, engine.replay_endpoint)
        says(found, "hash type", "ok", words)


def engine_payload(*events, rank=(0,)):
    return msgspec.msgpack.encode([time.time(), list(events), *rank])


async def test_hashes_of_another_length_are_wrong():
    with Engine() as engine:
        engine.publish_payload(engine_payload(stored([bytes(16)], [1, 2, 3, 4])))
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "events", "wrong", "1 cannot be read", "block_hashes")


async def test_invalid_batches_are_wrong():
    with Engine() as engine:
        engine.publish_payload(b"\xc1 garbage")
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "batches", "wrong", "1 of 1 are unreadable")


async def test_batches_without_a_rank_are_fine():
    with Engine() as engine:
        engine.publish_payload(engine_payload(PROMPT, rank=()))
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "rank", "ok", "contain no rank")


async def test_two_ranks_on_one_socket_are_wrong():
    with Engine() as engine:
        engine.publish_payload(engine_payload(PROMPT, rank=(0,)))
        engine.publish_payload(engine_payload(PROMPT, rank=(3,)))
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "rank", "wrong", "ranks 0, 3", "one port per rank")


async def test_the_published_rank_is_the_one_to_register():
    with Engine() as engine:
        engine.publish_payload(engine_payload(PROMPT, rank=(3,)))
        engine.wait()
        seen, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "rank", "ok", "dp_rank 3")
    body = attachment(seen).worker
    assert (body.data_parallel_start_rank, set(body.kv_events_endpoints)) == (3, {3})


async def test_unknown_fields_and_types_are_named():
    odd = {**stored([7], [1, 2, 3, 4]), "tenant": "x"}
    with Engine() as engine:
        _, found = await examine_engine(engine, PROMPT, odd, {"type": "BlockMoved"}, {"type": 5})
    sentence = (
        "events carry the field `tenant` of BlockStored, which this version does not know: "
        "blocks may be other than announced"
    )
    says(found, "fields", "warning", sentence, "degraded")
    says(found, "event types", "warning", "BlockMoved")
    says(found, "events", "wrong", "1 cannot be read", "type")


async def test_several_unknown_fields_are_named_unless_they_are_null_or_harmless():
    fields = {"tenant": "x", "region": 3, "later": None, "session_id": "s"}
    with Engine() as engine:
        _, found = await examine_engine(engine, stored([1], [1, 2, 3, 4], **fields))
        says(found, "fields", "warning", "`tenant`", "(all: region, tenant)")
        says(found, "would hold", "ok", "without a further doubt")


async def test_null_and_harmless_fields_are_no_finding():
    with Engine() as engine:
        _, found = await examine_engine(
            engine, stored([1], [1, 2, 3, 4], later=None, session_id="s", ownership="o")
        )
    assert "fields" not in found


# ── Blocks ───────────────────────────────────────────────────────────────────────────────────────


async def test_another_block_size_than_given_is_wrong():
    with Engine() as engine:
        _, found = await examine_engine(engine, PROMPT, block_size=16, engine="vllm")
    says(
        found, "block size", "wrong", "4 tokens", "16 was given", "block_size 4", "--block-size 16"
    )
    assert "would hold" not in found


FULL = stored([1], [1, 2, 3, 4], group_idx=0, kv_cache_spec_kind="full_attention")


async def test_a_hybrid_model_is_followed_by_its_layout():
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 6}
    with Engine() as engine:
        _, found = await examine_engine(
            engine, FULL, stored([1], [1, 2, 3, 4], group_idx=1, **window)
        )
    says(found, "attention", "ok", "sliding_window in 2 groups", "at every 4 tokens")


async def test_a_hybrid_model_of_an_unknown_layout_is_a_warning():
    chunk = stored([1], [1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="chunked_local_attention")
    with Engine() as engine:
        _, found = await examine_engine(engine, FULL, chunk)
    says(found, "attention", "warning", "chunked_local_attention", "chunk_tokens")


async def test_mediums_keys_and_placeholders_are_counted():
    image = stored([3], [1, 2, 3, 5], extra_keys=[[["9f" * 32, 0]]])
    salted = stored([4], [1, 2, 3, 4], extra_keys=[["secret-salt"]])
    adapter = stored([5], [1, 2, 3, 4], lora_name="ad", lora_id=1)
    odd = stored([6], [1, 2, 3, 6], extra_keys=[[b"digest"]])
    host = stored([1], [], block_size=0, medium="CPU")
    with Engine() as engine:
        _, found = await examine_engine(engine, PROMPT, image, salted, adapter, odd, host)
    says(found, "keys", "ok", "LoRA ad", "1 events with a salt", "1 multimodal blocks")
    assert "secret" not in str(found)
    says(found, "extra keys", "warning", "1 blocks")
    says(found, "placeholders", "warning", "1 offloaded blocks", "self_describing_kv_events")
    says(found, "mediums", "ok", "CPU (host): 1 blocks")
    says(found, "would hold", "ok", "1 on host")


async def test_an_unknown_medium_is_a_warning():
    with Engine() as engine:
        _, found = await examine_engine(engine, stored([1], [1, 2, 3, 4], medium="CXL"))
    says(found, "mediums", "warning", "CXL (unknown): 1 blocks", "not credited")


async def test_orphans_are_a_doubt():
    with Engine() as engine:
        _, found = await examine_engine(engine, stored([5], [1, 2, 3, 4], parent=4))
    says(found, "would hold", "warning", "unknown parents", "degraded")


# ── Replay ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_replay_that_begins_late_is_a_warning():
    with Engine(buffer_steps=2) as engine:
        for _ in range(4):
            engine.publish(PROMPT)
        engine.wait()
        _, found = await examine(engine.endpoint, engine.replay_endpoint)
    says(found, "replay reach", "warning", "back to batch 2 only", '"buffer_steps":100000')
    says(found, "would hold", "warning", "engine events lost")


async def test_a_replay_without_topics_is_read():
    with Engine(with_topic=False) as engine:
        _, found = await examine_engine(engine, PROMPT)
    says(found, "replay", "ok", "without a topic", "#45177")
    says(found, "replay end", "ok")


async def test_a_replay_of_another_engine_is_wrong():
    with Engine() as engine, Engine() as other:
        for each in range(100):
            other.publish(stored([each + 50], [each] * 4))
        other.wait()
        engine.replay_port = other.replay_port
        _, found = await examine_engine(engine, PROMPT)
        says(found, "replay content", "wrong", "differ from the live ones", "same engine")


async def test_a_replay_socket_that_answers_once_is_wrong():
    with zmq.Context() as context, context.socket(zmq.REP) as replayer, Engine() as engine:
        port = replayer.bind_to_random_port("tcp://127.0.0.1")

        def answer_once():
            if replayer.poll(10_000):
                replayer.recv_multipart()
                replayer.send_multipart(((0).to_bytes(8, "big"), engine_payload(PROMPT)))

        thread = threading.Thread(target=answer_once)
        thread.start()
        _, found = await examine(engine.endpoint, f"tcp://127.0.0.1:{port}")
        thread.join()
    says(found, "replay endpoint", "wrong", "is a REP socket", "ROUTER")
    says(found, "replay end", "wrong", "stopped after 1 batches")


async def test_a_replay_that_does_not_answer_is_wrong():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent, Engine() as engine:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        _, found = await examine(engine.endpoint, f"tcp://127.0.0.1:{port}")
    says(found, "replay", "wrong", "no response")
