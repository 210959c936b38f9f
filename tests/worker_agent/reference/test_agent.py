"""An agent in process, with its engine, on a real bus."""

import asyncio
import json

import pytest

from router.protocol.catalogue import decode_worker
from router.protocol.events import Checkpoint, decode_log_message
from router.protocol.loads import decode_load_report
from router.protocol.ranges import RangeRequest, decode_range_answer, encode_range_request
from router.protocol.subjects import Subjects
from router.protocol.values import Rank, unpack_hashes
from router.runtime.bus.errors import TwinError
from support.fleets.agents import RunningAgent
from support.processes.servers import eventually
from support.values.token_files import token_lines, token_of

SUBJECTS = Subjects("test")
RANK = Rank(7, 0)


@pytest.fixture
async def agent(nats_server):
    async with RunningAgent(nats_server.url, data_parallel_size=2).running() as agent:
        yield agent


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def log_of(bus, rank):
    """Everything in a rank's log."""
    subject, messages, is_all = SUBJECTS.events(rank), [], False
    stream = await bus.js.stream_info(SUBJECTS.event_stream, subjects_filter=subject)
    if not stream.state.subjects:
        return messages
    subscription = await bus.js.subscribe(subject, ordered_consumer=True)
    while not is_all:
        message = await subscription.next_msg(timeout=60)
        messages.append(decode_log_message(message.data))
        is_all = message.metadata.num_pending == 0
    await subscription.unsubscribe()
    return messages


async def test_serves_completions(agent):
    status, answer = await agent.complete("x" * 100)
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 4)
    assert cached(answer) == 0
    _, again = await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})
    assert cached(again) == 96
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]


async def test_ranks_have_caches_of_their_own(agent):
    for rank, expected in (("0", 0), ("1", 0), ("1", 96)):
        headers = {"x-data-parallel-rank": rank}
        assert cached((await agent.complete("y" * 100, headers=headers))[1]) == expected


@pytest.mark.parametrize("rank", ["2", "-1", "x", "", "9" * 5000])
async def test_an_unknown_rank_is_refused(agent, rank):
    status, answer = await agent.complete("x", headers={"x-data-parallel-rank": rank})
    assert (status, answer["error"]["param"]) == (400, "x-data-parallel-rank")


async def test_completion_streams(agent):
    body = {"prompt": "x" * 50, "max_tokens": 3, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    async with agent.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(lines) == 3 + 1 + 1
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 3


async def test_a_client_that_leaves_frees_its_blocks(agent):
    body = {"prompt": "x" * 50, "max_tokens": 400, "stream": True}
    async with agent.client.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())

    async def is_idle():
        text = (await agent.client.get("/metrics")).text
        line = 'vllm:num_requests_running{dp_rank="%s",model_name="default"} 0.0'
        return all(line % rank in text for rank in (0, 1))

    await eventually(is_idle)


async def test_refuses_in_openais_words(agent):
    status, answer = await agent.complete("x", model="other")
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    said = {"content-type": "application/json"}
    answer = await agent.client.post("/v1/completions", content=b"{", headers=said)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_body")
    assert (await agent.complete("x"))[0] == 200


async def test_announces_itself_and_what_it_holds(agent, bus):
    store = await bus.js.key_value(SUBJECTS.bucket)
    announced = decode_worker((await store.get("worker.7")).value)
    assert announced.endpoint == f"http://127.0.0.1:{agent.port}"
    assert announced.ranks == (Rank(7, 0), Rank(7, 1))
    await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})

    async def is_logged():
        log = await log_of(bus, RANK)
        return log[-1].state.counts[0] == 6 and log

    log = await eventually(is_logged)
    assert isinstance(log[0], Checkpoint)
    dump = (await agent.client.get("/dump")).json()
    assert len(dump["ranks"]["0"]["device"]) == 6
    assert dump["ranks"]["1"]["device"] == []


async def test_reports_load_and_what_it_published(agent, bus):
    subscription = await bus.client.subscribe(SUBJECTS.load(RANK))
    await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})
    async with asyncio.timeout(60):
        async for message in subscription.messages:
            report = decode_load_report(message.data)
            if report.state.counts[0] == 6 and not report.gauges.running_requests:
                break
    assert report.counters.prefill_tokens == 100
    assert report.counters.requests_finished == 1
    assert report.constants.num_blocks == 64


async def test_writes_a_checkpoint_when_asked(agent, bus):
    await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})

    async def logged(length):
        return len(await log_of(bus, RANK)) == length

    await eventually(lambda: logged(2))
    await bus.client.publish(SUBJECTS.checkpoint_wanted(RANK))
    await eventually(lambda: logged(1))
    (checkpoint,) = await log_of(bus, RANK)
    assert checkpoint.state.counts[0] == 6


async def test_answers_questions_about_its_events_and_its_load(agent, bus):
    await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})

    async def asked(start=None):
        question = encode_range_request(RangeRequest(start))
        answer = await bus.client.request(SUBJECTS.events_wanted(RANK), question, timeout=60)
        return decode_range_answer(answer.data)

    events, dump = await asked(1), await asked()
    stored = [h for e in events.events for h in unpack_hashes(e.sequence_hashes).tolist()]
    assert (len(stored), events.last_event_id, dump.event_id) == (6, dump.event_id, dump.event_id)
    assert (dump.rank, dump.state.counts) == (RANK, (6, 0, 0, 0))
    assert sorted(unpack_hashes(dump.blocks[0].sequence_hashes).tolist()) == sorted(stored)
    assert (await asked(dump.event_id + 1)).newest_available == dump.event_id
    answer = await bus.client.request(SUBJECTS.load_wanted(RANK), timeout=60)
    assert decode_load_report(answer.data).counters.prefill_tokens == 100
    line = 'kv_agent_queries_answered_total{dp_rank="%s",model_name="default"} %s'

    async def is_counted():
        metrics = (await agent.client.get("/metrics")).text
        return all(line % counted in metrics for counted in (("0", 4.0), ("1", 0.0)))

    await eventually(is_counted)

    async def is_logged():
        last = (await log_of(bus, RANK))[-1]
        return (last.state, last.incarnation) == (dump.state, dump.incarnation)

    await eventually(is_logged)


async def test_reset_prefix_cache_empties_the_cache(agent):
    await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})
    assert (await agent.client.post("/reset_prefix_cache")).status_code == 200
    _, answer = await agent.complete("x" * 100, headers={"x-data-parallel-rank": "0"})
    assert cached(answer) == 0


async def test_a_twin_is_refused(agent, nats_server, bus):
    twin = RunningAgent(nats_server.url)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await twin.agent.run(twin.stop)
    assert caught.group_contains(TwinError)
    await twin.client.aclose()
    assert (await agent.complete("x"))[0] == 200


async def test_withdraws_when_it_stops(nats_server, bus):
    async with RunningAgent(nats_server.url).running():
        store = await bus.js.key_value(SUBJECTS.bucket)
        assert (await store.get("worker.7")).value
    keys = [message async for message in _last(bus, "worker.7")]
    assert keys == [b""]


async def _last(bus, key):
    message = await bus.js.get_last_msg(
        f"KV_{SUBJECTS.bucket}", f"$KV.{SUBJECTS.bucket}.{key}", direct=True
    )
    yield message.data or b""


async def test_finishes_what_runs_before_it_stops(nats_server):
    async with RunningAgent(nats_server.url, num_layers=2).running() as agent:
        body = {"prompt": "x" * 200, "max_tokens": 100, "stream": True}
        async with agent.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            agent.stop.set()
            rest = [line async for line in lines if line]
    assert (len(rest), rest[-1]) == (100, "data: [DONE]")


async def test_serves_without_a_bus_and_joins_it_later(stopped_nats_server, eventually):
    server = stopped_nats_server
    async with RunningAgent(server.url).running("/health") as agent:
        assert (await agent.client.get("/ready")).status_code == 503
        assert (await agent.complete("x" * 100))[0] == 200
        server.start()
        await eventually(lambda: agent.answers("/ready"))


async def test_full_queue_is_refused(nats_server):
    config = {"max_waiting_requests": 1, "max_running_requests": 1, "num_layers": 2}
    async with RunningAgent(nats_server.url, **config).running() as agent:
        answers = await asyncio.gather(
            *(agent.complete("x" * 300, max_tokens=50) for _ in range(6))
        )
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}


async def test_blocks_on_disk_are_found_after_a_restart(nats_server, tmp_path):
    disk = {
        "disk_cache_blocks": 64, "disk_cache_dir": str(tmp_path),
        "onboard_always": True, "onboard_timeout_s": 60.0,
    }  # fmt: skip

    async def on_disk(agent):
        return len((await agent.client.get("/dump")).json()["ranks"]["0"]["disk"])

    slow = {"offload_bytes_per_s": 1.0, "offload_batch_blocks": 1}
    async with RunningAgent(nats_server.url, **disk, **slow).running() as agent:
        _, cold = await agent.complete("x" * 100)
        assert await on_disk(agent) < 6  # the others are stored when it stops
    async with RunningAgent(nats_server.url, **disk).running() as agent:
        await eventually(lambda: on_disk(agent))
        _, warm = await agent.complete("x" * 100)
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        assert cached(warm) == 96


async def test_tenant_uses_no_salt_but_its_own(nats_server, tmp_path):
    """The number of cached tokens, and the time, would show what another tenant has asked."""
    path = tmp_path / "tokens.toml"
    tenants = ("acme", "evil")
    lines = [token_lines(name, "route", tenant=name) for name in tenants]
    others = token_lines("others", "route", tenant="others", routing_groups=["others"])
    path.write_text("".join([*lines, others]))
    async with RunningAgent(nats_server.url, token_file=str(path)).running() as agent:
        for name, salt, allowed in (
            ("acme", "acme", 200), ("evil", "acme", 403), ("evil", None, 403),
            ("evil", "evil", 200), ("others", "others", 403),
        ):  # fmt: skip
            headers = {"authorization": f"Bearer {token_of(name)}"}
            messages = [{"role": "user", "content": "x" * 100}]
            for route, prompt in (("", {"prompt": "x" * 100}), ("chat/", {"messages": messages})):
                body = {"max_tokens": 1, "cache_salt": salt, **prompt}
                answer = await agent.client.post(
                    f"/v1/{route}completions", json=body, headers=headers
                )
                assert answer.status_code == allowed
                if allowed == 200:
                    assert cached(answer.json()) == 0
                else:
                    assert answer.json()["error"]["code"] == "forbidden"
