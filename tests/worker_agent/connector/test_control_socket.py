"""Commands from an agent to the tiers in an engine's process, over real sockets."""

import asyncio
import json
import socket
from contextlib import suppress

import pytest
from msgspec.structs import replace

from router.errors import ConfigError, InvalidFieldError
from support.blocks.vllm_halves import FACTS, Halves, computed
from support.processes.servers import eventually, free_port
from worker_agent.blocks.names import CacheLevel
from worker_agent.bridge import engine_tiers
from worker_agent.bridge.engine_tiers import EngineTiers, EngineTiersError
from worker_agent.connector.vllm_parts.settings import connector_settings
from worker_agent.operations.messages import (
    AnnouncedBlockset,
    ResetAll,
    ResetBlocks,
    ResetPool,
    StatusQuery,
)
from worker_agent.sharing.reports import SharingReport

G2, G3 = CacheLevel.G2, CacheLevel.G3


def opened(at):
    halves = Halves(connector_settings({"host_cache_blocks": 32, "control_listen": at}))
    halves.started()
    return halves


@pytest.fixture
def at(tmp_path):
    return f"unix://{tmp_path}/control"


@pytest.fixture
def engine(at):
    halves = opened(at)
    yield halves
    halves.worker.close()


def reports(status):
    return {(each.dp_rank, each.level): each for each in status.tiers}


async def test_status_and_resets_reach_the_engines_tiers(engine, at):
    computed(engine)
    tiers = EngineTiers(7, {0: [at]})
    found = reports(await tiers.answer(StatusQuery(hashes=True)))
    assert list(found) == [(0, G2)]
    held = found[0, G2].inactive_hashes
    assert len(held) == found[0, G2].traffic.stored_blocks == 2
    removed = await tiers.answer(ResetBlocks(level=G2, sequence_hashes=[held[0], 5]))
    assert (removed.ranks[0].reset_blocks, removed.ranks[0].not_found) == ([held[0]], [5])
    [outcome] = (await tiers.answer(ResetAll())).ranks
    assert G2 in outcome.reset
    assert G3 in outcome.skipped_unconfigured
    assert reports(await tiers.answer(StatusQuery()))[0, G2].inactive_blocks == 0


async def test_a_rank_is_reset_in_all_its_workers(tmp_path):
    workers = [f"unix://{tmp_path}/{number}" for number in range(2)]
    engines = [opened(each) for each in workers]
    try:
        for each in engines:
            computed(each)
        tiers = EngineTiers(7, {0: workers})
        [outcome] = (await tiers.answer(ResetPool(level=G2))).ranks
        assert outcome.reset == [G2]
        for each in workers:
            status = await EngineTiers(7, {0: [each]}).answer(StatusQuery())
            assert reports(status)[0, G2].inactive_blocks == 0
    finally:
        for each in engines:
            each.worker.close()


async def test_what_the_engine_refuses_has_its_status_and_reason(engine, at):
    tiers = EngineTiers(7, {0: [at]})
    with pytest.raises(EngineTiersError, match="level: G3 is not configured") as caught:
        await tiers.answer(ResetPool(level=G3))
    assert caught.value.http_status == 400
    with pytest.raises(InvalidFieldError, match="dp_rank: 3"):
        await tiers.answer(StatusQuery(dp_rank=3))
    with pytest.raises(EngineTiersError, match="nothing is shared here"):
        await tiers.name_peers(0, [AnnouncedBlockset("tcp://a:1", 8, 0, {})])
    assert (await tiers.sharing()) == SharingReport()
    with pytest.raises(EngineTiersError) as unreachable:
        await EngineTiers(7, {0: ["tcp://127.0.0.1:1"]}).answer(StatusQuery())
    assert unreachable.value.http_status == 503


@pytest.mark.parametrize("line", [b"{", b'{"method": "stop"}\n', b"[]\n", b"\xff\n"])
def test_a_line_that_is_no_command_is_refused(engine, at, line):
    with socket.socket(socket.AF_UNIX) as client, client.makefile("rb") as answers:
        client.connect(at.removeprefix("unix://"))
        client.sendall(line if line.endswith(b"\n") else line + b"\n")
        refusal = json.loads(answers.readline())["refusal"]
        assert refusal["code"] == "invalid_field"
        client.sendall(b'{"method": "tiers_status"}\n')
        assert json.loads(answers.readline())["reply"]["tiers"]


class EarlierConnector:
    """One that knows tiers and addresses, but no blocksets; it refuses what it does not know."""

    def __init__(self):
        self.named = []

    async def serve(self, reader, writer):
        command = json.loads(await reader.readline())
        refusal = {"reason": "command: unknown", "code": "invalid_field", "status": 400}
        answer = {"refusal": refusal}
        if command["method"] == "tiers_status":
            answer = {"reply": {"worker_id": 7, "tiers": [], "advice": []}}
        elif command["method"] == "name_peers" and command.keys() == {"method", "addresses"}:
            self.named.append(command["addresses"])
            answer = {"reply": None}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()


async def test_an_earlier_connector_is_told_addresses_only(tmp_path, at, monkeypatch):
    monkeypatch.setattr(engine_tiers, "INTERVAL_S", 0.01)
    earlier = EarlierConnector()
    tiers = EngineTiers(7, {0: [at]}, {0: "tcp://a:1"})
    peer = AnnouncedBlockset("tcp://b:1", 8, 0, {"worker_id": 8})
    async with await asyncio.start_unix_server(earlier.serve, at.removeprefix("unix://")):
        asking = asyncio.create_task(tiers.run())

        async def is_named():
            with suppress(EngineTiersError):
                await tiers.name_peers(0, [peer])
            return earlier.named

        await eventually(is_named)
        failures = tiers.failures
        await tiers.name_peers(0, [peer])
        assert earlier.named == [["tcp://b:1"]] * 2
        assert (tiers.failures, tiers.problem, tiers.blocksets) == (failures, None, {})
        asking.cancel()


async def test_idle_connections_keep_no_agent_out(engine, at):
    idle = []
    for _ in range(12):
        client = socket.socket(socket.AF_UNIX)
        client.connect(at.removeprefix("unix://"))
        idle.append(client)
    assert (await EngineTiers(7, {0: [at]}).answer(StatusQuery())).tiers
    for client in idle:
        client.close()


def test_workers_of_ranks_listen_at_addresses_of_their_own():
    port = free_port()
    at = {"host_cache_blocks": 8, "control_listen": f"tcp://127.0.0.1:{port}"}
    facts = [FACTS, replace(FACTS, dp_rank=1)]
    engines = [Halves(connector_settings(at), each) for each in facts]
    for number, each in enumerate(engines):
        with socket.create_connection(("127.0.0.1", port + number), 5):
            pass
        each.worker.close()


@pytest.mark.parametrize("at", ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "http://a", "unix://a"])
def test_an_address_that_other_hosts_reach_is_refused(at):
    with pytest.raises(ConfigError, match="control_listen"):
        connector_settings({"host_cache_blocks": 1, "control_listen": at})
