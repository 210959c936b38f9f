"""An index that starts on an empty bus learns from its peers what is held."""

from contextlib import asynccontextmanager

import pytest

from router.runtime.bus.connection import connection
from support.processes.listening import listening
from support.processes.servers import NatsServer, equals, eventually
from support.values.indexing import PROMPT, Engine, RunningIndex, publishing

HELD = {"1": {"0": 160}}


@pytest.fixture
def empty_bus(tmp_path):
    server = NatsServer(tmp_path / "empty")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def peer(nats_server, bus, eventually):
    """It knows what instance 1 holds."""
    engine = Engine(bus, 1)
    engine.cache(PROMPT)
    async with RunningIndex(nats_server.url).running() as peer, publishing(engine):
        await peer.register(1)
        await eventually(lambda: equals(peer.scores(PROMPT), HELD))
        yield peer


@asynccontextmanager
async def answering(body):
    """Some server that answers everything with these bytes; its URL."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async with listening(answer) as port:
        yield f"http://127.0.0.1:{port}"


async def test_blind_ranks_are_restored_until_their_checkpoint(peer, empty_bus, eventually):
    async with RunningIndex(empty_bus.url, peers=peer.url).running() as late:
        await late.register(1)
        await late.register(2)
        assert await late.status(1) == "pending"
        await eventually(lambda: equals(late.scores(PROMPT), HELD))
        view = await late.instance(1)
        assert view["status"] == "degraded"
        assert "dump" in view["listeners"]["0"]["reason"]
        assert await late.status(2) == "pending"


async def test_a_peer_that_wants_a_token_gets_it(peer, nats_server, bus, empty_bus, tmp_path):
    tokens, secret = tmp_path / "tokens.toml", tmp_path / "token"
    token = "a-token-of-an-indexer"
    tokens.write_text(f'[[tokens]]\nname = "i"\ntoken = "{token}"\nscopes = ["admin", "route"]\n')
    secret.write_text(f"{token}\n")
    async with RunningIndex(nats_server.url, token_file=str(tokens)).running() as guarded:
        guarded.client.headers["authorization"] = f"Bearer {token}"
        await guarded.register(1)
        await eventually(lambda: equals(guarded.scores(PROMPT), HELD))
        fields = {"peers": guarded.url, "peer_token_file": str(secret)}
        async with RunningIndex(empty_bus.url, **fields).running() as late:
            await late.register(1)
            await eventually(lambda: equals(late.scores(PROMPT), HELD))


async def test_a_checkpoint_replaces_what_was_restored(peer, empty_bus, eventually):
    async with (
        RunningIndex(empty_bus.url, peers=peer.url).running() as late,
        connection(empty_bus.url, "engine", lambda _: None) as bus,
    ):
        await late.register(1)
        await eventually(lambda: equals(late.scores(PROMPT), HELD))
        engine = Engine(bus, 1)
        engine.cache(PROMPT[:32])
        async with publishing(engine):
            await eventually(lambda: equals(late.scores(PROMPT), {"1": {"0": 32}}))
            assert await late.status(1) == "active"


async def test_unhelpful_peers_are_skipped(peer, empty_bus, eventually, caplog):
    async with (
        answering(b"garbage") as garbage,
        answering(b" " * 4096) as endless,
        RunningIndex(
            empty_bus.url,
            peers=["http://127.0.0.1:1", garbage, endless, f"{peer.url}/nowhere", peer.url],
            peer_dump_limit_bytes=2048,
        ).running() as late,
    ):
        await late.register(1)
        await eventually(lambda: equals(late.scores(PROMPT), HELD))
    assert caplog.text.count("no dump from peer") == 4


@pytest.mark.parametrize("fields", [{"block_size": 32}, {"routing_group": "g"}])
async def test_a_rank_that_is_another_one_here_is_not_restored(
    peer, empty_bus, eventually, caplog, fields
):
    caplog.set_level("INFO")
    async with RunningIndex(empty_bus.url, peers=peer.url).running() as late:
        await late.register(1, **fields)
        await eventually(lambda: "has 1 ranks; 0 of them were blind here" in caplog.text)
        assert await late.status(1) == "pending"


async def test_without_blind_ranks_no_peer_is_queried(peer, nats_server, eventually, caplog):
    caplog.set_level("INFO")
    async with RunningIndex(nats_server.url, peers="http://127.0.0.1:1").running() as second:
        await second.register(1)
        await eventually(lambda: equals(second.scores(PROMPT), HELD))
        await eventually(lambda: "no rank is blind" in caplog.text)
    assert "no dump" not in caplog.text
