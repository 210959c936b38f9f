"""Processes are killed; the fleet is right again without help."""

import asyncio

from support.processes.servers import equals, eventually

PROMPTS = [list(f"Prompt number {i}, {'long enough to be cached ' * 4}".encode()) for i in range(9)]


async def fill(fleet):
    for prompt in PROMPTS:
        await fleet.ask(prompt)
    await fleet.until_drained()


async def test_killed_agent_is_removed(fleet):
    await fleet.start(workers=3)
    await fill(fleet)
    fleet.workers[2].kill()
    await eventually(lambda: equals(fleet.worker_ids(), [1, 3]))
    for prompt in PROMPTS:
        assert (await fleet.select(prompt))["worker_id"] != 2
    assert not any(worker == 2 for worker, _ in await fleet.held_by_index())
    assert all(load["worker_id"] != 2 for load in (await fleet.get("/loads"))[0]["loads"])


async def test_a_killed_agent_comes_back_empty(fleet):
    await fleet.start(workers=3)
    await fill(fleet)
    held = set(await fleet.held_by_index())
    fleet.workers[2].kill()
    fleet.workers[2].start()
    await eventually(lambda: equals(_incarnations(fleet), 3))
    await fleet.until_ready(3)
    await fleet.until_drained()
    assert set(await fleet.held_by_index()) == held - {(2, 0)}
    await eventually(fleet.all_exact)
    await fill(fleet)


async def test_a_killed_router_comes_back_with_everything(fleet):
    await fleet.start(workers=3, dp_size=2)
    await fill(fleet)
    expected = await fleet.held_by_workers()
    assert expected
    for _ in range(2):
        fleet.router.kill()
        fleet.router.start()
        await fleet.until_ready(3)
        assert await fleet.held_by_index() == expected
        await eventually(fleet.all_exact)


async def test_router_killed_under_load_recovers(fleet):
    await fleet.start(workers=3, **{"num-blocks": 128})
    await fill(fleet)

    async def traffic():
        for number in range(40):
            prompt = list(f"Unique {number} {'and still more to say ' * 6}".encode())
            await fleet.complete(1 + number % 3, 0, prompt)
            completed.append(number)

    completed = []
    flowing = asyncio.create_task(traffic())
    await eventually(lambda: len(completed) > 5)
    fleet.router.kill()
    await eventually(lambda: len(completed) > 10)
    fleet.router.start()
    await flowing
    await fleet.until_ready(3)
    await fleet.until_drained()
    await eventually(fleet.all_exact)


async def test_a_killed_bus_comes_back_with_its_store(fleet, nats_server):
    await fleet.start(workers=3)
    await fill(fleet)
    nats_server.kill()
    by_cache = {"policy": "dynamo-1.0"}  # whatever a busy machine's engines look like in seconds
    for prompt in PROMPTS[:3]:
        decision = await fleet.select(prompt, router_config_override=by_cache)
        answer = await fleet.complete(
            decision["worker_id"], decision["dp_rank"], prompt + [65] * 64
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert not await fleet.is_drained()
    nats_server.start()
    await fleet.until_drained()
    await eventually(fleet.all_exact)


async def test_a_bus_that_lost_its_store_is_filled_again(fleet, nats_server):
    await fleet.start(workers=3)
    await fill(fleet)
    nats_server.kill()
    nats_server.start(empty=True)
    await eventually(fleet.all_exact)
    assert await fleet.is_drained()
    await fill(fleet)
    fleet.router.kill()
    fleet.router.start()
    await fleet.until_ready(3)
    await fleet.until_drained()


async def test_foreign_messages_on_a_rank_s_subject_are_written_over(fleet, bus):
    await fleet.start(workers=2)
    await fill(fleet)
    for payload in (b"", b"garbage", b"\x98" * 40):
        await bus.js.publish("kv.default.events.1.0", payload)
    for number in range(3):
        prompt = list(f"{number} more, and long enough to be cached as well".encode())
        await fleet.complete(1, 0, prompt)
    await fleet.until_drained()
    await eventually(fleet.all_exact)
    log = await bus.js.stream_info("kv-default-events", subjects_filter="kv.default.events.1.0")
    assert log.state.subjects["kv.default.events.1.0"] <= 4


async def test_a_second_agent_of_the_same_id_is_refused(fleet):
    await fleet.start(workers=2)
    await fill(fleet)
    fleet.add_worker(1)
    twin = fleet.workers[1]
    assert await asyncio.to_thread(twin.popen.wait, 60) == 3
    assert "worker.1 is taken" in twin.log.read_text()
    assert await fleet.worker_ids() == [1, 2]
    assert await fleet.all_exact()


async def test_both_stop_cleanly_on_sigterm(fleet):
    await fleet.start(workers=2)
    assert await asyncio.to_thread(fleet.workers[1].stop) == 0
    await eventually(lambda: equals(fleet.worker_ids(), [2]))
    assert await asyncio.to_thread(fleet.router.stop) == 0


async def _incarnations(fleet):
    """How many workers of a life that is alive now are announced."""
    workers = await fleet.get("/workers")
    return sum(worker["last_heard_s"] < 1.5 for worker in workers)
