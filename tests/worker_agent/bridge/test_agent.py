"""An agent beside an engine: the engine's sockets and metrics, a real bus, a whole router."""

import asyncio
import base64
import secrets
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from itertools import count

import msgspec
import pytest
import zmq
import zmq.asyncio

from router.errors import ConfigError
from router.protocol.catalogue import decode_worker
from router.protocol.events import decode_log_message
from router.protocol.loads import decode_load_report
from router.protocol.ranges import RangeRequest, decode_range_answer, encode_range_request
from router.protocol.subjects import Subjects
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.runtime.bus.errors import TwinError
from support.blocks.vllm_halves import Halves, computed
from support.engines.engines import names
from support.engines.metrics_server import MetricsServer, vllm_metrics
from support.engines.trtllm_server import TrtllmServer
from support.engines.zmq_engines import Engine, removed, stored
from support.fleets.bridges import RunningBridge, looked_up, ready, tiered
from support.processes.running import RunningRouter
from support.processes.servers import equals, eventually, free_port
from support.values.token_files import token_lines, token_of
from worker_agent.blocks.changes import BlockStored
from worker_agent.blocks.names import BlockName
from worker_agent.bridge import agent, engine_tiers, peer_watch
from worker_agent.config.bridge import DEFAULT_EVENTS
from worker_agent.connector.tier_publisher import TierPublisher
from worker_agent.tiers.stack import TierChange

SUBJECTS = Subjects("test")
RANK = Rank(7, 0)


@pytest.fixture
def engine():
    with Engine(topic="kv@w1") as engine:
        yield engine


@pytest.fixture
def metrics():
    with MetricsServer(vllm_metrics(running=3, waiting=2)) as metrics:
        yield metrics


def blocks(first, last):
    return {names([n] * 4)[0] for n in range(first, last)}


def publish(engine, first, last):
    for n in range(first, last):
        engine.publish(stored([100 + n], [n] * 4))


async def held(router, dp_rank=0):
    """What the router believes, or None while it is not exact."""
    view = await router.view(7)
    if view is None or [r["trust"]["state"] for r in view["ranks"] if r["dp_rank"] == dp_rank] != [
        "exact"
    ]:
        return None
    dump = (await router.client.get("/dump")).json()
    events = [e for scope in dump.values() for e in scope["events"]]
    return {
        block["block_hash"]
        for event in events
        if event["event"]["dp_rank"] == dp_rank
        for block in event["event"]["data"]["stored"]["blocks"]
    }


async def holds(router, expected, dp_rank=0):
    return await held(router, dp_rank) == expected


async def announced(bus):
    """The announced worker, if there is one."""
    message = await bus.js.get_last_msg(SUBJECTS.bucket_stream, SUBJECTS.key("worker.7"))
    return decode_worker(message.data) if message.data else None


async def heard(bus, condition):
    """The first load report that is as wanted."""
    subscription = await bus.client.subscribe(SUBJECTS.load(RANK))
    async with asyncio.timeout(60):
        while True:
            report = decode_load_report((await subscription.next_msg(timeout=60)).data)
            if condition(report):
                await subscription.unsubscribe()
                return report


async def test_router_index_equals_the_engines_blocks(nats_server, engine, metrics):
    publish(engine, 1, 20)
    async with (
        RunningRouter(nats_server.url).running() as router,
        ready(RunningBridge(nats_server.url, engine, metrics)) as bridge,
    ):
        await eventually(lambda: holds(router, blocks(1, 20)))
        engine.publish(removed([101]), stored([500], [7] * 4, parent=102))
        expected = blocks(2, 20) | {names([2] * 4 + [7] * 4)[1]}
        await eventually(lambda: holds(router, expected))
        dump = (await bridge.client.get("/dump")).json()
        assert set(dump["ranks"]["0"]["device"]) == expected
        body = {"model_name": "tiny", "token_ids": [3] * 4 + [9] * 4}
        answer = await router.client.post("/select", json=body)
        assert (answer.json()["worker_id"], answer.json()["endpoint"]) == (7, "http://engine:8000")


async def test_announcement_has_the_engines_limits(nats_server, engine, metrics, bus):
    shares = {"share_listen": "tcp://engine:7700", "p2p_listen": "engine:5710"}
    bridge = RunningBridge(nats_server.url, engine, metrics, **shares)
    async with ready(bridge):
        worker = await announced(bus)
    assert (worker.model_name, worker.endpoint) == ("tiny", "http://engine:8000")
    assert worker.block_addresses == {0: ["tcp://engine:7700", "vllm-p2p://engine:5710"]}
    assert (worker.identity.block_size, worker.total_kv_blocks) == (4, 1000)
    assert worker.max_num_batched_tokens == 2048
    assert not worker.agent_is_engine


async def test_reports_the_engines_load_and_lets_it_age(nats_server, engine, metrics, bus):
    async with ready(RunningBridge(nats_server.url, engine, metrics)) as bridge:
        report = await heard(bus, lambda report: report.gauges.running_requests == 3)
        assert report.gauges.waiting_requests == 2
        assert report.gauges.kv_used_blocks == 500
        assert report.counters.prefill_tokens == 600
        assert (report.constants.num_blocks, report.constants.chunk_tokens) == (1000, 2048)
        metrics.stop()
        report = await heard(bus, lambda report: not report.gauges.running_requests)
        assert report.counters.prefill_tokens == 600
        assert any(metrics.url in problem for problem in await bridge.degraded())
        metrics.text = vllm_metrics(running=9)
        metrics.start()
        await heard(bus, lambda report: report.gauges.running_requests == 9)


async def test_is_announced_only_once_the_engine_was_reached(nats_server, metrics, bus):
    engine = Engine(topic="kv@w1")
    metrics.stop()
    async with RunningBridge(nats_server.url, engine, metrics).running() as bridge:
        await eventually(lambda: _says(bridge, metrics.url))
        metrics.start()
        await eventually(lambda: _says(bridge, engine.endpoint))
        keys = await bus.js.streams_info()
        assert all(SUBJECTS.bucket_stream != stream.config.name for stream in keys)
        with engine:
            await eventually(bridge.is_ready)
            assert (await announced(bus)).worker_id == 7


async def _says(bridge, words):
    return any(words in reason for reason in await bridge.reasons())


async def test_without_metrics_the_sizes_are_set(nats_server, engine, bus):
    fields = {"block_size": 4, "total_kv_blocks": 50, "max_num_batched_tokens": 512}
    async with ready(RunningBridge(nats_server.url, engine, None, **fields)):
        worker = await announced(bus)
    assert (worker.model_name, worker.identity.block_size) == ("default", 4)
    assert (worker.total_kv_blocks, worker.max_num_batched_tokens) == (50, 512)


async def test_wrong_size_ends_the_agent(nats_server, engine, metrics):
    bridge = RunningBridge(nats_server.url, engine, metrics, block_size=16)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await bridge.service.run(asyncio.Event())
    assert caught.group_contains(ConfigError, match="16 was set, but the engine reports 4")
    await bridge.client.aclose()


async def test_an_engine_that_comes_back_as_another_is_learned_anew(
    nats_server, engine, metrics, bus
):
    publish(engine, 1, 5)
    async with (
        RunningRouter(nats_server.url).running() as router,
        ready(RunningBridge(nats_server.url, engine, metrics)) as bridge,
    ):
        await eventually(lambda: holds(router, blocks(1, 5)))
        first = await announced(bus)
        metrics.text = vllm_metrics(block_size=8, model_name="other")
        engine.restart([stored([1], [9] * 8, block_size=8)])

        async def is_other():
            worker = await announced(bus)
            return worker is not None and worker.incarnation > first.incarnation and worker

        worker = await eventually(is_other)
        assert (worker.model_name, worker.identity.block_size) == ("other", 8)
        await eventually(bridge.is_ready)
        await eventually(lambda: holds(router, {names([9] * 8, block_size=8)[0]}))


async def test_a_model_that_was_named_must_not_become_another(nats_server, engine, metrics):
    bridge = RunningBridge(nats_server.url, engine, metrics, model_name="alias")
    running = asyncio.create_task(bridge.service.run(asyncio.Event()))
    await eventually(bridge.is_up)
    await eventually(bridge.is_ready)
    metrics.text = vllm_metrics(model_name="other")
    await asyncio.wait([running], timeout=60)
    words = "alias was set when the engine served tiny; now it is other"
    assert running.exception().split(lambda e: isinstance(e, ConfigError) and words in str(e))[0]
    await bridge.client.aclose()


async def test_dead_engine_is_reported_then_withdrawn(
    nats_server, engine, metrics, bus, monkeypatch
):
    monkeypatch.setattr(agent, "GONE_S", 600.0)
    publish(engine, 1, 5)
    async with (
        RunningRouter(nats_server.url).running() as router,
        ready(RunningBridge(nats_server.url, engine, metrics)) as bridge,
    ):
        await eventually(lambda: holds(router, blocks(1, 5)))
        engine.stop()
        metrics.stop()
        await eventually(lambda: _is_degraded(bridge, "cannot connect"))
        await eventually(lambda: _trust_is(router, "lagging"))
        report = await heard(bus, lambda report: report.waiting_s > 1)
        assert report.rank == RANK
        monkeypatch.setattr(agent, "GONE_S", 0.1)
        await eventually(lambda: equals(router.view(7), None))
        monkeypatch.setattr(agent, "GONE_S", 600.0)
        reasons = "; ".join(await bridge.reasons())
        assert metrics.url in reasons
        assert "cannot connect" in reasons
        metrics.start()
        engine.start()
        publish(engine, 8, 9)
        await eventually(lambda: holds(router, blocks(8, 9)))
        await eventually(lambda: _is_degraded(bridge, None))


async def test_stranger_learns_only_whether_the_agent_is_ready(engine, tmp_path):
    url = f"nats://svc:s3cret@127.0.0.1:{free_port()}"
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(token_lines("operator", "admin"))
    operator = {"authorization": f"Bearer {token_of('operator')}"}
    numbers = {"total_kv_blocks": 100, "block_size": 4, "model_name": "m"}
    bridge = RunningBridge(url, engine, None, token_file=str(tokens), **numbers)

    async def waits_for_the_bus():
        answer = await bridge.client.get("/ready?verbose", headers=operator)
        return "not announced" in str(answer.json()["reason"])

    async with bridge.running():
        await eventually(waits_for_the_bus)
        stranger = await bridge.client.get("/ready")
        assert stranger.status_code == 503
        assert stranger.json() == {
            "ready": False, "reason": "not announced yet on NATS at nats://***"
        }  # fmt: skip
        assert (await bridge.client.get("/ready?verbose")).status_code == 403
        seen = (await bridge.client.get("/ready", headers=operator)).text
        assert "nats://***@127.0.0.1" in seen
        assert "s3cret" not in seen


async def test_engine_with_one_endpoint_left_is_not_gone(
    nats_server, engine, metrics, bus, monkeypatch
):
    monkeypatch.setattr(agent, "GONE_S", 0.3)
    async with ready(RunningBridge(nats_server.url, engine, metrics)) as bridge:
        metrics.stop()
        await eventually(lambda: _is_degraded(bridge, metrics.url))
        await asyncio.sleep(0.5)
        assert await bridge.is_ready()
        metrics.start()
        await eventually(lambda: _is_degraded(bridge, None))
        engine.stop()
        await eventually(lambda: _is_degraded(bridge, "cannot connect"))
        await asyncio.sleep(0.5)
        assert (await announced(bus)).worker_id == 7


async def _is_degraded(bridge, words):
    problems = await bridge.degraded()
    return not problems if words is None else any(words in problem for problem in problems)


async def test_unreachable_tier_publisher_degrades_trust(nats_server, engine, metrics, bus):
    port = free_port()
    tiers = f"tcp://127.0.0.1:{port}"
    async with ready(RunningBridge(nats_server.url, engine, metrics, tiers=tiers)) as bridge:
        await eventually(lambda: _is_degraded(bridge, f"its tiers at {tiers}"))
        assert (await heard(bus, lambda report: report.waiting_s > 1)).rank == RANK
        assert "kv_agent_tiers_known{" in (await bridge.client.get("/metrics")).text
        with closing(TierPublisher(tiers, Identity(SCHEME, 4), 0)) as news:
            news.publish([TierChange(Tier.HOST, BlockStored(BlockName(b"a", 5)))])
            await eventually(lambda: _is_degraded(bridge, None))
            await heard(bus, lambda report: report.state.counts == (0, 1, 0, 0))
            text = (await bridge.client.get("/metrics")).text
        for line in ("known", "held_blocks", "snapshots_total"):
            assert f'kv_agent_tiers_{line}{{dp_rank="0",model_name="tiny"}} 1.0' in text


async def test_two_ranks_are_separate(nats_server):
    with (
        Engine(topic="kv@w1") as first,
        Engine(first.port, first.replay_port, topic="kv@w1", dp_rank=1) as second,
        MetricsServer(vllm_metrics(running=3, ranks=(0, 1))) as metrics,
    ):
        publish(first, 1, 5)
        publish(second, 50, 52)
        async with (
            RunningRouter(nats_server.url).running() as router,
            ready(RunningBridge(nats_server.url, first, metrics, data_parallel_size=2)),
        ):
            await eventually(lambda: holds(router, blocks(1, 5)))
            await eventually(lambda: holds(router, blocks(50, 52), dp_rank=1))
            view = await router.view(7)
            assert [rank["reported"]["running_requests"] for rank in view["ranks"]] == [3, 4]


class LoadSocket:
    """The load socket of an SGLang rank, which publishes twenty times a second."""

    def __init__(self, port, *stat):
        self._address = f"tcp://127.0.0.1:{port}"
        self._message = [b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", *stat])]

    @asynccontextmanager
    async def running(self):
        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
            publisher.bind(self._address)
            task = asyncio.create_task(self._tell(publisher))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def _tell(self, publisher):
        while True:
            await publisher.send_multipart(self._message)
            await asyncio.sleep(0.05)


SGLANG_METRICS = """\
sglang:num_running_reqs{model_name="tiny"} 99.0
sglang:cache_config_info{model_name="tiny",page_size="4",num_pages="500"} 1.0
"""


async def test_sglang_events_and_loads_are_read(nats_server, bus):
    port = free_port()
    array = ["BlockStored", [-5], None, [1] * 4, 4, None, "GPU"]
    load = LoadSocket(port + 1, 6, 1, 40, 2_000, 0, 70)
    with (
        Engine(port=port, topic="kv@w1", with_topic=False) as engine,
        MetricsServer(SGLANG_METRICS) as metrics,
    ):
        engine.publish(array)
        bridge = RunningBridge(nats_server.url, engine, metrics, engine="sglang", load="auto")
        async with (
            load.running(),
            RunningRouter(nats_server.url).running() as router,
            ready(bridge),
        ):
            await eventually(lambda: holds(router, blocks(1, 2)))
            report = await heard(bus, lambda report: report.gauges.running_requests)
    assert (report.gauges.running_requests, report.gauges.waiting_requests) == (6, 1)
    assert (report.gauges.waiting_uncached_tokens, report.gauges.kv_used_blocks) == (70, 10)


async def test_trtllm_streams_vllms_maps(nats_server, engine, trtllm_metrics, bus):
    publish(engine, 1, 4)
    bridge = RunningBridge(nats_server.url, engine, trtllm_metrics, engine="trtllm")
    async with RunningRouter(nats_server.url).running() as router, ready(bridge):
        await eventually(lambda: holds(router, blocks(1, 4)))
        worker = await announced(bus)
    assert (worker.total_kv_blocks, worker.max_num_batched_tokens) == (500, 8192)


async def test_range_requests_and_checkpoints_are_answered(nats_server, engine, metrics, bus):
    publish(engine, 1, 5)
    async with ready(RunningBridge(nats_server.url, engine, metrics)):

        async def asked(start=None):
            question = encode_range_request(RangeRequest(start))
            answer = await bus.client.request(SUBJECTS.events_wanted(RANK), question, timeout=60)
            return decode_range_answer(answer.data)

        async def is_told():
            return (await asked()).state.counts[0] == 4

        await eventually(is_told)
        info = await bus.js.stream_info(SUBJECTS.event_stream)
        await bus.client.publish(SUBJECTS.checkpoint_wanted(RANK))

        async def is_written():
            now = await bus.js.stream_info(SUBJECTS.event_stream)
            return now.state.last_seq > info.state.last_seq and now.state.messages == 1

        await eventually(is_written)


async def test_a_twin_is_refused(nats_server, engine, metrics):
    async with ready(RunningBridge(nats_server.url, engine, metrics)) as bridge:
        twin = RunningBridge(nats_server.url, engine, metrics)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(60):
                await twin.service.run(asyncio.Event())
        assert caught.group_contains(TwinError)
        await twin.client.aclose()
        assert await bridge.is_ready()


async def test_stop_withdraws_and_publishes_the_rest(nats_server, engine, metrics, bus):
    fields = {"event_flush_s": 0.5}
    async with ready(RunningBridge(nats_server.url, engine, metrics, **fields)) as bridge:
        publish(engine, 1, 2)
        await eventually(lambda: _has_published(bridge, 1))
        publish(engine, 2, 9)

        async def is_followed():
            dump = (await bridge.client.get("/dump")).json()
            return len(dump["ranks"]["0"]["device"]) == 8

        await eventually(is_followed, poll_s=0.001)
    message = await bus.js.get_last_msg(SUBJECTS.bucket_stream, SUBJECTS.key("worker.7"))
    assert not message.data
    message = await bus.js.get_last_msg(SUBJECTS.event_stream, SUBJECTS.events(RANK))
    assert decode_log_message(message.data).state.counts[0] == 8


async def _has_published(bridge, event_id):
    return (await bridge.client.get("/dump")).json()["event_ids"]["0"] >= event_id


async def test_agent_metrics_are_counted(nats_server, engine, metrics):
    publish(engine, 1, 4)
    engine.publish({"type": "Unknown"})
    async with ready(RunningBridge(nats_server.url, engine, metrics)) as bridge:

        async def counted():
            names = ("applied_total", "dropped_events_total", "connections_total")
            return [await of_engine(bridge, name) for name in names]

        await eventually(lambda: equals(counted(), [4, 1, 1]))
        assert await of_engine(bridge, "condition", 'condition="following",') == 1
        assert await of_rank(bridge, "engine_load_reports_total") >= 1
        assert await of_engine(bridge, "waiting_seconds") < 5
        assert await of_rank(bridge, "load_reports_missed_total") == 0
        assert await bridge.metric("kv_agent_metrics_readings_total") >= 1
        assert await bridge.metric("kv_agent_metrics_readable") == 1
        engine.stop()
        metrics.stop()
        connecting = 'condition="connecting",'
        await eventually(lambda: equals(of_engine(bridge, "condition", connecting), 1))
        await eventually(lambda: equals(bridge.metric("kv_agent_metrics_readable"), 0))


async def of_rank(bridge, name):
    return await bridge.metric(f'kv_agent_{name}{{dp_rank="0",model_name="tiny"}}')


async def of_engine(bridge, name, more=""):
    return await bridge.metric(f'kv_engine_{name}{{{more}dp_rank="0",worker_id="7"}}')


def test_without_torch_the_reference_engine_is_refused_in_words():
    program = (
        "import sys; sys.modules['torch'] = None; from worker_agent.cli import main; "
        "sys.exit(main(['run']))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ran.returncode == 2
    assert b"engine: reference, but torch is not installed" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_no_torch_and_no_engine_are_loaded():
    program = (
        "import sys; from worker_agent.cli import main; import worker_agent.bridge.agent; "
        "main(['--help']); "
        "moves = ('reference.engine', 'storage.base', 'transfer', 'tiers', 'manager'); "
        "print([m for m in sys.modules if m.split('.')[0] == 'torch' "
        "or m in [f'worker_agent.{each}' for each in moves]])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.decode().splitlines()[-1] == "[]"


TRTLLM_METRICS = """
trtllm_num_requests_running{model_name="tiny"} 4.0
trtllm_kv_cache_max_blocks{model_name="tiny"} 500.0
trtllm_kv_cache_tokens_per_block{model_name="tiny"} 4.0
trtllm_max_num_tokens_runtime{model_name="tiny"} 8192.0
"""


@pytest.fixture
def trtllm():
    with TrtllmServer() as server:
        yield server


@pytest.fixture
def trtllm_metrics():
    with MetricsServer(TRTLLM_METRICS) as metrics:
        yield metrics


def pulling(nats_url, trtllm, metrics, **fields):
    nowhere = Engine()
    settings = {"engine": "trtllm", "zmq": DEFAULT_EVENTS, "replay": None, "topic": ""}
    settings |= {"events_url": trtllm.url, **fields}
    return RunningBridge(nats_url, nowhere, metrics, **settings)


async def test_trtllm_is_asked_for_its_events(nats_server, trtllm, trtllm_metrics):
    trtllm.store(1, 5)
    async with (
        RunningRouter(nats_server.url).running() as router,
        ready(pulling(nats_server.url, trtllm, trtllm_metrics)) as bridge,
    ):
        await eventually(lambda: holds(router, blocks(1, 5)))
        trtllm.store(5, 8)
        trtllm.remove(2)
        await eventually(lambda: holds(router, blocks(1, 8) - blocks(2, 3)))
        trtllm.status = 500
        await eventually(lambda: _is_degraded(bridge, f"events from {trtllm.url}: status 500"))
        trtllm.store(8, 9)
        trtllm.status = 200
        await eventually(lambda: holds(router, blocks(1, 9) - blocks(2, 3)))
        assert await of_engine(bridge, "new_lives_total") == 0
        trtllm.stop()
        await eventually(lambda: _is_degraded(bridge, trtllm.url))
        trtllm.start()
        trtllm.store(20, 22)
        await eventually(lambda: holds(router, blocks(20, 22)))
        assert await of_engine(bridge, "new_lives_total") == 1
        assert await of_engine(bridge, "lost_total") == 0


async def test_trtllm_events_taken_by_others_are_doubted(nats_server, trtllm, trtllm_metrics):
    trtllm.store(1, 5)
    trtllm.forget()
    trtllm.store(5, 8)
    async with (
        RunningRouter(nats_server.url).running() as router,
        ready(pulling(nats_server.url, trtllm, trtllm_metrics)) as bridge,
    ):
        await eventually(lambda: _trust_is(router, "degraded"))
        dump = (await bridge.client.get("/dump")).json()
        assert set(dump["ranks"]["0"]["device"]) == blocks(5, 8)


async def _trust_is(router, state):
    view = await router.view(7)
    return view is not None and view["ranks"][0]["trust"]["state"] == state


async def test_a_restarted_agent_goes_on_pulling(nats_server, trtllm, trtllm_metrics, tmp_path):
    fields = {"state_dir": str(tmp_path / "state")}
    trtllm.store(1, 5)
    async with RunningRouter(nats_server.url).running() as router:
        async with ready(pulling(nats_server.url, trtllm, trtllm_metrics, **fields)):
            await eventually(lambda: holds(router, blocks(1, 5)))
        trtllm.store(5, 8)
        trtllm.remove(1)
        async with ready(pulling(nats_server.url, trtllm, trtllm_metrics, **fields)):
            await eventually(lambda: holds(router, blocks(2, 8)))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()}
    assert (modes, (tmp_path / "state").stat().st_mode & 0o777) == ({0o600}, 0o700)


async def test_trtllm_ranks_are_separate(nats_server, trtllm_metrics):
    with TrtllmServer(ranks=(0, 1)) as trtllm:
        trtllm.store(1, 3, rank=0)
        trtllm.store(7, 9, rank=1)
        bridge = pulling(nats_server.url, trtllm, trtllm_metrics, data_parallel_size=2)
        async with RunningRouter(nats_server.url).running() as router, ready(bridge):
            await eventually(lambda: holds(router, blocks(1, 3)))
            await eventually(lambda: holds(router, blocks(7, 9), dp_rank=1))


# ── The tiers of a connector in the engine ──────────────────────────────────────────────────────


async def test_engines_find_each_other_by_announcement_and_agents_forward_commands(
    nats_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(peer_watch, "ROUND_S", 0.1)
    monkeypatch.setattr(engine_tiers, "INTERVAL_S", 0.1)
    key = tmp_path / "key"
    key.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    key.chmod(0o600)
    async with (
        tiered(nats_server.url, tmp_path, str(key), 7) as (giver, holding),
        tiered(nats_server.url, tmp_path, str(key), 8) as (other, asking),
    ):
        await asyncio.to_thread(looked_up, holding, "a")
        computed(holding)
        keys = map(str, count())

        def is_found():
            return looked_up(asking, next(keys)) == 8

        await eventually(lambda: asyncio.to_thread(is_found))

        await eventually(lambda: imported_is(other, [7]))
        [ours] = (await blocksets(giver))["exported"]
        [theirs] = (await blocksets(other))["imported"]["0"]
        assert theirs == ours
        assert ours["sets"]["0"]["num_blocks"] == 32

        [tier] = (await giver.client.get("/tiers")).json()["tiers"]
        assert (tier["level"], tier["inactive_blocks"]) == ("G2", 2)
        line = 'kv_agent_tier_inactive_blocks{dp_rank="0",level="G2",model_name="tiny"} 2.0'
        await eventually(lambda: is_exposed(giver, line))
        refused = await giver.client.post("/tiers/reset_pool", json={"level": "G3"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "engine_tiers")
        done = await giver.client.post("/tiers/reset_pool", json={"level": "G2"})
        assert done.json()["ranks"][0]["reset"] == ["G2"]
        assert (await giver.client.get("/tiers")).json()["tiers"][0]["inactive_blocks"] == 0
        holding.worker.close()
        assert (await giver.client.get("/tiers")).status_code == 503
        await eventually(lambda: is_degraded(giver, "its tiers are unknown"))


async def blocksets(bridge):
    return (await bridge.client.get("/blocksets")).json()


async def imported_is(bridge, workers):
    found = (await blocksets(bridge))["imported"]["0"]
    return [each["worker_id"] for each in found] == workers


async def test_blockset_of_the_engines_next_process_is_announced_in_place(
    nats_server, tmp_path, monkeypatch, bus
):
    monkeypatch.setattr(engine_tiers, "INTERVAL_S", 0.05)
    key = tmp_path / "key"
    key.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    key.chmod(0o600)
    async with tiered(nats_server.url, tmp_path, str(key), 7) as (_, first):

        async def blockset():
            worker = await announced(bus)
            assert worker is not None, "it is not withdrawn"
            return worker.blocksets.get(0)

        before = await eventually(blockset)
        assert (before["worker_id"], before["addresses"]) == (
            7, (await announced(bus)).block_addresses[0]
        )  # fmt: skip
        first.worker.close()
        with closing(Halves(first.settings)) as second:
            second.started()

            async def is_later():
                return (await blockset())["epoch"] > before["epoch"]

            await eventually(is_later)


async def is_exposed(bridge, line):
    return line in (await bridge.client.get("/metrics")).text


async def is_degraded(bridge, reason):
    return any(reason in each for each in await bridge.degraded())
