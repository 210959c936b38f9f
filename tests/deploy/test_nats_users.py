"""The template of NATS users, on a real nats-server: each does its work, and nothing else."""

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from router.client import RouterClient, SelectRequest
from router.protocol.ranges import RangeRequest, encode_range_request
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.runtime.bus.connection import connection
from router.runtime.security.nats_access import NatsAccess
from support.blocks.vllm_halves import computed
from support.fleets.agents import RunningAgent
from support.fleets.bridges import looked_up, tiered
from support.fleets.forwarding import RunningForward
from support.processes.guarded_nats import GuardedNats
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port
from support.values.indexing import RunningIndex
from worker_agent.bridge import peer_watch

ROOT = Path(__file__).parents[2]
USERS = (ROOT / "deploy/nats/users.conf").read_text()
ROLES = ("router", "indexer", "agent", "forwarder", "caller", "operator")
INBOXES = {role: f"_INBOX.{role}s" for role in ROLES} | {"caller": "_INBOX.callers.caller"}
SUBJECTS = Subjects("default")
RANK = Rank(7, 0)
PROMPT = "x" * 100


@pytest.fixture
def server(tmp_path):
    passwords = {f"KV_NATS_{role.upper()}_PASSWORD": f"password-of-{role}" for role in ROLES}
    with GuardedNats(tmp_path, USERS, environment=passwords) as server:
        server.passwords = tmp_path
        for role in ROLES:
            (tmp_path / role).write_text(f"password-of-{role}")
        yield server


def settings(server, role):
    """The settings of a process of this role."""
    return {
        "namespace": "default",
        "nats_user": role,
        "nats_password_file": str(server.passwords / role),
        "nats_inbox_prefix": INBOXES[role],
    }


def access(server, role, inbox_prefix=None):
    path = str(server.passwords / role)
    return NatsAccess(user=role, password_file=path, inbox_prefix=inbox_prefix or INBOXES[role])


@asynccontextmanager
async def connected(server, role):
    async with connection(server.url, role, lambda _: None, access(server, role)) as bus:
        yield bus


async def test_every_role_does_all_of_its_work(server):
    stored = {"snapshot_threshold": 1, "drain_s": 0.0, "openai_port": free_port()}
    tiers = {"host_cache_blocks": 8, "onboard_always": True, "onboard_timeout_s": 60.0}
    async with (
        RunningAgent(server.url, **settings(server, "agent"), **tiers).running() as agent,
        RunningRouter(server.url, **settings(server, "router"), **stored).running() as router,
        RunningIndex(server.url, **settings(server, "indexer")).running() as index,
        RunningForward("", nats_url=server.url, **settings(server, "forwarder")).running() as fwd,
    ):
        await eventually(router.is_ready)
        await agent.complete(PROMPT)
        await eventually(lambda: holds_blocks(router))
        await eventually(index.is_ready)
        await eventually(lambda: has_snapshot(router, agent))
        await eventually(lambda: is_forwarded(fwd))
        async with RouterClient.over_nats(server.url, access=access(server, "caller")) as client:
            decision = await client.select(SelectRequest(token_ids=list(range(40))))
            assert decision.worker_id == 7
        stored["openai_port"] = free_port()
        second = RunningRouter(server.url, name="r2", **settings(server, "router"), **stored)
        async with second.running():
            await eventually(lambda: second.metric("kv_router_snapshots_restored_total"))
            await eventually(second.is_ready)
        ordered = await router.client.patch("/workers/7", json={"lifecycle": "cordoned"})
        assert ordered.status_code == 200, ordered.text
        async with connected(server, "operator") as bus:
            assert await answers(bus, SUBJECTS.tiers(7), b'{"method": "tiers_status"}')
            assert await answers(bus, SUBJECTS.load_wanted(RANK), b"")
            asked = encode_range_request(RangeRequest())
            assert await answers(bus, SUBJECTS.events_wanted(RANK), asked)
    assert server.violations() == []


@pytest.fixture
def key_file(tmp_path):
    key = tmp_path / "key"
    key.write_text("5e" * 32)
    key.chmod(0o600)
    return str(key)


async def test_agents_import_each_other_s_blocksets(server, key_file):
    fields = {**settings(server, "agent"), "share": True, "block_key_file": key_file}
    first = RunningAgent(server.url, worker_id=1, name="w1", **fields)
    second = RunningAgent(server.url, worker_id=2, name="w2", **fields)
    async with first.running() as first, second.running() as second:
        handed = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
        _, answer = await first.complete(PROMPT, **handed)
        params = {**answer["kv_transfer_params"], "do_remote_prefill": True}
        await second.complete(PROMPT, kv_transfer_params=params)
        report = (await second.client.get("/blocksets")).json()
        assert [each["worker_id"] for each in report["imported"]["0"]] == [1]
    assert server.violations() == []


async def test_agents_beside_engines_find_peers_and_answer_operators(
    server, key_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(peer_watch, "ROUND_S", 0.1)
    user = settings(server, "agent")
    async with (
        tiered(server.url, tmp_path, key_file, 7, **user) as (_, holding),
        tiered(server.url, tmp_path, key_file, 8, **user) as (_, asking),
        connected(server, "operator") as bus,
    ):
        await asyncio.to_thread(looked_up, holding, "a")
        computed(holding)
        keys = map(str, count())
        await eventually(lambda: asyncio.to_thread(lambda: looked_up(asking, next(keys)) == 8))
        status = json.loads(await answers(bus, SUBJECTS.tiers(7), b'{"method": "tiers_status"}'))
        assert "G2" in json.dumps(status)
        reset = b'{"method": "tiers_reset_pool", "level": "G2"}'
        assert "reset" in json.loads(await answers(bus, SUBJECTS.tiers(7), reset))["ranks"][0]
    assert server.violations() == []


async def answers(bus, subject, body):
    return (await bus.client.request(subject, body, timeout=60)).data


async def holds_blocks(router):
    view = await router.view(7)
    return view is not None and view["ranks"][0]["held_blocks"] > 0


async def has_snapshot(router, agent):
    await agent.complete(f"{time.monotonic()} {PROMPT}")
    text = (await router.client.get("/metrics")).text
    found = re.search(r"^kv_router_snapshots_written_total ([\d.e+]+)$", text, re.M)
    return found is not None and float(found[1]) > 0


async def is_forwarded(forward):
    body = {"model": "default", "prompt": list(range(40)), "max_tokens": 2}
    return (await forward.post("/v1/completions", body)).status_code == 200


PUBLISHED = {
    "events of a rank": "kv.default.events.7.0",
    "the load of a rank": "kv.default.load.7.0",
    "bookings": "kv.default.sequences.1",
    "a beacon": "kv.default.beacons",
    "a prefill": "kv.default.prefill",
    "an announcement": "$KV.kv-default-workers.worker.7",
    "a router": "$KV.kv-default-workers.router.7",
    "an order": "$KV.kv-default-workers.order.7",
    "a snapshot": "$O.kv-default-radix.C.x",
    "a new stream": "$JS.API.STREAM.CREATE.mine",
    "deletion of events": "$JS.API.STREAM.DELETE.kv-default-events",
    "purge of events": "$JS.API.STREAM.PURGE.kv-default-events",
    "a consumer of events": "$JS.API.CONSUMER.CREATE.kv-default-events",
    "a read of the bucket": "$JS.API.DIRECT.GET.KV_kv-default-workers.$KV.kv-default-workers.x",
    "tiers": "kv.default.worker.7.tiers",
    "a checkpoint": "kv.default.worker.7.0.checkpoint",
    "another response": "_INBOX.callers.other.x",
}
MAY_PUBLISH = {
    "router": "the load of a rank, bookings, a beacon, a prefill, a router, an order, a snapshot, "
    "a consumer of events, a read of the bucket, a checkpoint, another response",
    "indexer": "a beacon, a consumer of events, a read of the bucket, a checkpoint, "
    "another response",
    "agent": "events of a rank, the load of a rank, an announcement, purge of events, "
    "a read of the bucket",
    "forwarder": "a prefill",
    "caller": "",
    "operator": "tiers",
}
SUBSCRIBED = (
    ">",
    "_INBOX.>",
    "_INBOX.callers.>",
    "_INBOX.callers.other.>",
    "_INBOX.routers.>",
    "$KV.>",
    "$JS.>",
    "kv.>",
    "kv.default.events.>",
    "kv.default.worker.>",
)


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_is_refused_what_is_not_its_work(server, role):
    may = {each for each in MAY_PUBLISH[role].split(", ") if each}
    assert may <= PUBLISHED.keys()
    async with connected(server, role) as bus:
        for subject in PUBLISHED.values():
            await bus.client.publish(subject, b"{}", reply=f"{INBOXES[role]}.x")
        others = [each for each in SUBSCRIBED if not each.startswith(INBOXES[role])]
        for subject in others:
            await bus.client.subscribe(subject)
        await bus.client.flush()
    refused = {name for name, subject in PUBLISHED.items() if is_refused(server, subject)}
    assert refused == PUBLISHED.keys() - may
    assert [each for each in others if is_refused(server, each, "Subscription")] == others


def is_refused(server, subject, kind="Publish"):
    return any(
        f"{kind} Violation" in line and f'"{subject}"' in line for line in server.violations()
    )


def allowed(role, direction):
    """The subjects that a role's user may publish or subscribe to."""
    section = USERS.partition(f"{role.upper()}_MAY {{")[2].partition("\n}")[0]
    listed = section.partition(f"{direction} {{ allow: [")[2].partition("] }")[0]
    lines = [line for line in listed.splitlines() if not line.lstrip().startswith("#")]
    return re.findall(r'"([^"]+)"', "\n".join(lines))


def matches(pattern, subject):
    parts, tokens = pattern.split("."), subject.split(".")
    if parts[-1] == ">":
        return len(tokens) >= len(parts) and matches(
            ".".join(parts[:-1]), ".".join(tokens[: len(parts) - 1])
        )
    return len(parts) == len(tokens) and all(
        p in ("*", t) for p, t in zip(parts, tokens, strict=True)
    )


def rows():
    """Subject, kept in which stream, publishers and readers of each row of the table."""
    table = (ROOT / "SECURITY.md").read_text().partition("## NATS subjects")[2]
    fields = {"namespace": "default", "rank": "7.0", "router": "1", "worker": "7", "key": "KEY.7"}
    for line in table.splitlines():
        if not line.startswith(("| `kv.", "| bucket")):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        named = [each.format(**fields) for each in re.findall(r"`([^`]+)`", cells[0])]
        subject = next(each for each in named if each.startswith(("kv.", "$")))
        stream = next(
            (e for e in named if e.startswith(("KV_", "OBJ_", "kv-")) and "-events" in e), None
        )
        stream = stream or next((e for e in named if e.startswith(("KV_", "OBJ_"))), None)
        publishers, readers = ({role for role in ROLES if role in cell} for cell in cells[1:3])
        yield subject, stream, publishers, readers


@pytest.mark.parametrize("row", [*rows()], ids=lambda row: row[0])
def test_users_have_the_permissions_of_the_table(row):
    subject, stream, publishers, readers = row
    keys = ("worker", "router", "order") if "KEY" in subject else ("",)
    names = [subject.replace("KEY", key) for key in keys]
    may_publish = {
        role
        for role in ROLES
        if any(matches(each, name) for each in allowed(role, "publish") for name in names)
    }
    if stream is None:
        may_read = {
            role
            for role in ROLES
            if any(matches(each, subject) for each in allowed(role, "subscribe"))
        }
    else:
        reads = (f"$JS.API.CONSUMER.CREATE.{stream}", f"$JS.API.DIRECT.GET.{stream}.>")
        may_read = {r for r in ROLES if any(each in allowed(r, "publish") for each in reads)}
    assert may_publish == publishers
    assert may_read == readers | (publishers if stream else set())
