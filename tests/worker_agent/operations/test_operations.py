"""Tiers asked by operators: a real agent, over HTTP and NATS, with and without tokens."""

import asyncio

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.protocol.catalogue import order_key
from support.fleets.agents import RunningAgent
from support.processes.running import SUBJECTS
from support.processes.servers import eventually
from support.values.token_files import token_lines
from worker_agent.operations.command import tiers as tiers_command
from worker_agent.operations.messages import LevelReport, StatusReply, TierTraffic
from worker_agent.operations.table import tier_table

PROMPT = "x" * 100
"""Six blocks, and a rest."""
SUBJECT = "kv.test.worker.7.tiers"


@pytest.fixture
async def agent(nats_server, bus, tmp_path):
    tiers = {
        "host_cache_blocks": 8, "disk_cache_blocks": 32, "disk_cache_dir": str(tmp_path),
        "onboard_always": True, "onboard_timeout_s": 60.0,
    }  # fmt: skip
    async with RunningAgent(nats_server.url, **tiers).running() as agent:
        agent.bus = bus
        await agent.complete(PROMPT)
        await eventually(lambda: is_kept(agent))
        yield agent


async def is_kept(agent):
    found = await tiers(agent)
    kept = [found[level] for level in ("G2", "G3")]
    return all(each["inactive_blocks"] == each["traffic"]["stored_blocks"] == 6 for each in kept)


async def tiers(agent, **query):
    answer = await agent.client.get("/tiers", params=query)
    assert answer.status_code == 200, answer.text
    return {each["level"]: each for each in answer.json()["tiers"]}


async def asked(agent, method, token=None, **fields):
    """Over NATS."""
    headers = None if token is None else {"authorization": f"Bearer {token}"}
    body = msgspec.json.encode({"method": method, **fields})
    answer = await agent.bus.client.request(SUBJECT, body, timeout=60, headers=headers)
    return msgspec.json.decode(answer.data)


async def reported(agent):
    """What routers know of each tier."""
    ranks = (await agent.client.get("/dump")).json()["ranks"]
    return {name: len(held) for name, held in ranks["0"].items()}


async def test_every_tier_has_a_status(agent):
    found = await tiers(agent, hashes="true")
    assert [*found] == ["G1", "G2", "G3"]
    assert found["G1"]["num_blocks"] == 64
    assert found["G2"]["traffic"]["stored_blocks"] == 6
    assert found["G3"]["traffic"]["stored_bytes"] > 0
    held = (await agent.client.get("/dump")).json()["ranks"]["0"]
    assert sorted(found["G3"]["inactive_hashes"]) == sorted(held["disk"])
    assert [*await tiers(agent, level="G2", dp_rank="0")] == ["G2"]
    over_nats = await asked(agent, "tiers_status", level="G2")
    assert over_nats["worker_id"] == 7
    assert over_nats["tiers"][0]["inactive_blocks"] == 6


async def test_pool_reset_is_published_to_routers(agent):
    answer = await agent.client.post("/tiers/reset_pool", json={"level": "G2"})
    reset = {"dp_rank": 0, "reset": ["G2"], "failed": {}, "skipped_unconfigured": []}
    assert answer.json() == {"worker_id": 7, "ranks": [reset]}
    await eventually(lambda: is_told(agent, device=6, host=0, disk=6))
    assert (await asked(agent, "tiers_reset_pool", level="G1"))["ranks"][0]["reset"] == ["G1"]
    await eventually(lambda: is_told(agent, device=0, host=0, disk=6))
    assert (await agent.complete(PROMPT))[1]["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ] == 96


async def is_told(agent, **expected):
    return expected.items() <= (await reported(agent)).items()


async def test_single_blocks_are_given_up(agent):
    held = (await agent.client.get("/dump")).json()["ranks"]["0"]["host"]
    body = {"level": "G2", "sequence_hashes": [held[-1], 12, held[-1]]}
    answer = (await agent.client.post("/tiers/reset_blocks", json=body)).json()
    assert answer["ranks"] == [
        {"dp_rank": 0, "reset_blocks": [held[-1]], "not_found": [12], "not_reset": []}
    ]
    await eventually(lambda: is_told(agent, host=5, device=6))
    signed = held[-1] - (2**64 if held[-1] >= 2**63 else 0)
    again = await asked(agent, "tiers_reset_blocks", level="G1", sequence_hashes=[signed])
    assert again["ranks"][0]["reset_blocks"] == [held[-1]]
    await eventually(lambda: is_told(agent, device=5))


async def test_blocks_in_use_stay(agent):
    running = asyncio.create_task(agent.complete(PROMPT, max_tokens=300))
    await eventually(lambda: is_running(agent))
    [rank] = (await agent.client.post("/tiers/reset_all", json={})).json()["ranks"]
    assert (rank["reset"], rank["skipped_unconfigured"]) == (["G2", "G3"], ["G4"])
    assert "blocks" in rank["failed"]["G1"]
    held = (await tiers(agent, level="G1", hashes="true"))["G1"]["active_hashes"]
    answer = await asked(agent, "tiers_reset_blocks", level="G1", sequence_hashes=held[:1])
    assert answer["ranks"][0]["not_reset"] == held[:1]
    await running


async def is_running(agent):
    return (await tiers(agent))["G1"]["active_blocks"] > 0


REFUSED = [
    ("reset_pool", {}, "level"),
    ("reset_pool", {"level": "G5"}, "level"),
    ("reset_pool", {"level": "G4"}, "level"),
    ("reset_pool", {"level": "G1", "dp_rank": 3}, "dp_rank"),
    ("reset_pool", {"level": "G1", "pool": 3}, "body"),
    ("reset_blocks", {"level": "G1"}, "sequence_hashes"),
    ("reset_blocks", {"level": "G1", "sequence_hashes": [2**64]}, "sequence_hashes"),
]


async def test_unknown_command_is_refused(agent):
    for path, body, field in REFUSED:
        answer = await agent.client.post(f"/tiers/{path}", json=body)
        assert answer.status_code in {400, 422}, body
        assert answer.json()["error"]["param"] == field
        refused = await asked(agent, f"tiers_{path}", **body)
        assert (refused["method"], refused["field"]) == ("error", field)


async def test_operation_arguments_are_validated(agent):
    for query in ({"level": "G9"}, {"dp_rank": "x"}, {"leval": "G1"}):
        answer = await agent.client.get("/tiers", params=query)
        assert answer.status_code == 422, query
    assert (await agent.bus.client.request(SUBJECT, b"{", timeout=60)).headers[
        "Nats-Service-Error-Code"
    ] == "400"
    assert (await asked(agent, "tiers_status", dp_rank=4))["field"] == "dp_rank"


async def test_agent_replies_only_to_inboxes(agent):
    """Its answers in the bucket would be orders, or the end of an announcement."""
    reported = []

    async def note(message):
        reported.append(message.data)

    client, reply = agent.bus.client, SUBJECTS.key(order_key(7))
    await client.subscribe(reply, cb=note)
    for subject in (SUBJECT, SUBJECTS.ping(7)):
        await client.publish(subject, b"{}", reply=reply)
        await client.request(subject, b"{}", timeout=60)
    assert reported == []


async def test_only_operators_may(nats_server, bus, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(token_lines("operator", "admin") + token_lines("gateway", "route"))
    guarded = RunningAgent(nats_server.url, token_file=str(path))
    guarded.client.headers["authorization"] = "Bearer a-token-of-operator-1234"
    async with guarded.running() as agent:
        agent.bus = bus
        assert (await agent.client.get("/tiers")).status_code == 200
        status = await asked(agent, "tiers_status", "a-token-of-operator-1234")
        assert [each["level"] for each in status["tiers"]] == ["G1"]
        for token, code in (("a-token-of-gateway-1234", "forbidden"), (None, "unauthenticated")):
            assert (await asked(agent, "tiers_reset_all", token))["code"] == code
        headers = {"authorization": "Bearer a-token-of-gateway-1234"}
        assert (await agent.client.get("/tiers", headers=headers)).status_code == 403


async def test_metrics_have_dynamo_s_names_beside_ours(agent):
    await agent.client.post("/tiers/reset_pool", json={"level": "G1"})
    await agent.complete(PROMPT)
    text = (await agent.client.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("level") or sample.labels.get("pool")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expected = {
        ("kvbm_matched_tokens", None): 96,
        ("kvbm_offload_blocks_d2h", None): 6,
        ("kvbm_offload_blocks_h2d", None): 6,
        ("kvbm_offload_blocks_d2d", None): 0,
        ("kvbm_onboard_blocks_h2d", None): 6,
        ("kvbm_onboard_blocks_d2d", None): 0,
        ("kvbm_host_cache_hit_rate", None): pytest.approx(96 / 200),
        ("kvbm_disk_cache_hit_rate", None): 0,
        ("kvbm_registrations_total", "G2"): 6,
        ("kvbm_inactive_pool_size", "G3"): 6,
        ("kvbm_inflight_immutable", "G1"): 0,
        ("kv_agent_tier_blocks", "G2"): 8,
        ("kv_agent_tier_loaded_blocks_total", "G2"): 6,
        ("kv_agent_tier_corrupt_blocks_total", "G3"): 0,
        ("kv_agent_tier_broken", "G3"): 0,
    }
    assert {key: samples[key] for key in expected} == expected
    assert samples["kvbm_offload_requests", None] >= 2


async def shown(*arguments):
    return await asyncio.to_thread(tiers_command, [*arguments, "--once"])


async def test_the_command_line_shows_a_table(agent, nats_server, capsys):
    capsys.readouterr()
    assert await shown("--url", str(agent.client.base_url)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:7] == ["rank", "tier", "blocks", "used", "kept", "free", "hit"]
    assert lines[1].split()[:6] == ["0", "G1", "64", "0", "6", "58"]
    assert lines[2].split()[:6] == ["0", "G2", "8", "0", "6", "2"]
    assert any(line.startswith("advice: ") for line in lines)  # the host is smaller than the device
    over_nats = ("--nats", nats_server.url, "--namespace", "test")
    assert await shown(*over_nats, "--worker-id", "7", "--json") == 0
    reply = msgspec.json.decode(capsys.readouterr().out, type=StatusReply)
    assert [each.level for each in reply.tiers] == ["G1", "G2", "G3"]
    assert await shown(*over_nats, "--name", "nobody") == 1
    assert "kv-worker-agent tiers: " in capsys.readouterr().err


async def test_command_line_shows_errors(capsys, tmp_path):
    assert await shown("--url", "http://127.0.0.1:1") == 1
    assert await shown("--token-file", str(tmp_path / "none")) == 2
    for wrong in (["--nats", "nats://h"], ["--interval", "0"], ["--namespace", "a.b"]):
        with pytest.raises(SystemExit) as caught:
            tiers_command(wrong)
        assert caught.value.code == 2


def report(level, **through):
    fields = dict.fromkeys(TierTraffic.__struct_fields__, 0) | through
    return LevelReport(
        dp_rank=0, level=level, num_blocks=8, active_blocks=1, inactive_blocks=2, empty_blocks=5,
        traffic=TierTraffic(**fields | {"is_broken": False, "probe": None}),
    )  # fmt: skip


def test_speeds_are_those_since_the_last_table():
    first = StatusReply(7, [report("G2", stored_bytes=1_000_000, store_s=0.5)], [])
    assert "2.0 M" in tier_table(first)
    then = StatusReply(7, [report("G2", stored_bytes=4_000_000, store_s=0.6)], ["too small"])
    assert "1.5 M" in tier_table(then, first, passed_s=2.0)
    assert tier_table(then).endswith("advice: too small")
