"""A prompt is computed by one process and answered by another: agents, router and what forwards are
processes of their own, and each of them may die.
"""

import asyncio
import json

import httpx
import pytest

from support.processes.processes import Process
from support.processes.servers import eventually, free_port

SMALL = {"num-blocks": 96, "max-model-len": 1024}
TEXT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom, " * 8)
CACHED_TOKENS = 288


def prompt(number):
    return list(f"{number}: ".encode()) + TEXT[:300]


class Pools:
    """Worker 1 computes prompts, 2 and 3 answer; before them `forwards`, by their fallback."""

    def __init__(self, fleet, directory, **options):
        self.fleet = fleet
        self._options = options
        self._directory = directory
        self.urls = {}
        self.client = httpx.AsyncClient(timeout=120)
        self._processes = []

    async def start(self):
        key, config = self._directory / "block.key", self._directory / "agent.toml"
        key.write_text("5e" * 32)
        config.write_text(f'share = true\nonboard_always = true\nblock_key_file = "{key}"\n')
        self.fleet.router_options |= {"block-key-file": key, "worker-silence-s": 600}
        options = {"config": config, **SMALL, **self._options}
        await self.fleet.start(1, role="prefill", **options)
        for worker_id in (2, 3):
            self.fleet.add_worker(worker_id, role="decode", **options)
        await self.fleet.until_ready(3)
        for falls_back in ("always", "unregistered"):
            port = free_port()
            options = {"router-url": self.fleet.url, "http-port": port, "drain-s": 0,
                       "prefill-fallback": falls_back}  # fmt: skip
            self._processes.append(
                Process(self._directory, falls_back, "router", "forward", **options)
            )
            self.urls[falls_back] = f"http://127.0.0.1:{port}"
        await eventually(self.are_ready)

    async def are_ready(self):
        try:
            answers = [await self.client.get(f"{url}/ready") for url in self.urls.values()]
        except httpx.HTTPError:
            return False
        return all(answer.status_code == 200 for answer in answers)

    async def complete(self, number, by="always", **fields):
        body = {"model": "default", "prompt": prompt(number), "max_tokens": 6,
                "return_token_ids": True, **fields}  # fmt: skip
        return await self.client.post(f"{self.urls[by]}/v1/completions", json=body)

    async def is_free(self):
        return not any([await self.booked(worker_id) for worker_id in (1, 2, 3)])

    async def booked(self, worker_id):
        loads = await self.fleet.get("/loads")
        ranks = [rank for scope in loads for rank in scope["loads"]]
        return sum(rank["active_requests"] for rank in ranks if rank["worker_id"] == worker_id)

    async def shared(self, worker_id, name):
        """A metric of what a worker shares."""
        text = (await self.client.get(f"{self.fleet.endpoints[worker_id]}/metrics")).text
        [row] = [row for row in text.splitlines() if row.startswith(f"kv_agent_share_{name}{{")]
        return float(row.rpartition(" ")[2])

    async def close(self):
        await self.client.aclose()
        for each in self._processes:
            each.end()


@pytest.fixture
async def pools(fleet, tmp_path):
    pools = Pools(fleet, tmp_path)
    yield pools
    await pools.close()


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_prompts_are_handed_over_and_dead_workers_are_replaced(pools):
    await pools.start()
    fleet = pools.fleet

    # What is handed over is not computed again, and all tokens are those of one worker alone.
    got = await pools.complete(0)
    assert (got.headers["x-prefill-worker-id"], got.headers["x-worker-id"] in "23") == ("1", True)
    assert cached(got.json()) == CACHED_TOKENS
    assert tokens(got.json()) == tokens(await fleet.complete(1, 0, prompt(0), 6))
    await fleet.until_drained()
    again = await pools.complete(0)  # what the router expects to be cached, the engines find
    assert tokens(again.json()) == tokens(got.json())
    text = "Tell me of prefixes. " * 4
    said = {"model": "default", "messages": [{"role": "user", "content": text}]}
    chat = await pools.client.post(f"{pools.urls['always']}/v1/chat/completions", json=said)
    assert chat.headers["x-prefill-worker-id"] == "1"
    assert cached(chat.json()) >= 80
    await eventually(pools.is_free)

    # The decode worker dies in the middle: another goes on, with the prompt's blocks of a holder.
    body = {"model": "default", "prompt": prompt(1), "max_tokens": 100, "stream": True,
            "return_token_ids": True}  # fmt: skip
    streamed = []
    url = f"{pools.urls['always']}/v1/completions"
    async with pools.client.stream("POST", url, json=body) as stream:
        assert stream.headers["x-prefill-worker-id"] == "1"
        dies = int(stream.headers["x-worker-id"])
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                streamed += choice["token_ids"]
                if len(streamed) == 3:
                    fleet.workers[dies].kill()
    whole = await fleet.complete(1, 0, prompt(1), 100)
    assert streamed == tokens(whole)
    await eventually(pools.is_free)
    lives = 5 - dies

    # The prefill worker dies during a prompt, and does not return.
    fleet.workers[1].pause()
    asking = {by: asyncio.create_task(pools.complete(2, by)) for by in ("always", "unregistered")}

    async def are_booked():
        return await pools.booked(1) == 2

    await eventually(are_booked)
    fleet.workers[1].kill()
    assert (await asking["unregistered"]).status_code == 502
    fell_back = await asking["always"]
    assert (fell_back.status_code, fell_back.headers["x-worker-id"]) == (200, str(lives))
    assert "x-prefill-worker-id" not in fell_back.headers
    assert tokens(fell_back.json()) == tokens(await fleet.complete(lives, 0, prompt(2), 6))
    assert (await pools.complete(3)).status_code == 200
    refused = await pools.complete(4, "unregistered")
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "prefill_failed")
    await eventually(pools.is_free)

    # No prefill worker is registered any more: either way the decode worker computes prompts.
    await pools.client.patch(f"{fleet.url}/workers/1", json={"lifecycle": "cordoned"})
    for by in ("always", "unregistered"):
        assert (await pools.complete(5, by)).status_code == 200
    metrics = (await pools.client.get(f"{pools.urls['always']}/metrics")).text
    assert 'kv_router_forward_prefills_total{outcome="handed_over"} 3.0' in metrics
    assert 'kv_router_forward_prefill_pools{state="unavailable"} 1.0' in metrics
    await eventually(pools.is_free)


async def test_blocks_of_a_dead_prefill_worker_are_recomputed(fleet, tmp_path):
    """It has handed over, and is gone before they were fetched."""
    pools = Pools(fleet, tmp_path)
    await pools.start()
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    first = await fleet.complete(1, 0, prompt(0), 1, **asked)
    fleet.workers[1].kill()
    params = first["kv_transfer_params"]
    answer = await fleet.complete(2, 0, prompt(0), 6, kv_transfer_params=params)
    assert (tokens(answer)[0], cached(answer)) == (tokens(first)[0], 0)
    assert tokens(answer) == tokens(await fleet.complete(3, 0, prompt(0), 6))
    await pools.close()


@pytest.fixture
async def pushing(fleet, tmp_path):
    """Their host memory takes prompts that others push; the first answer says that they do."""
    pools = Pools(fleet, tmp_path, **{"host-cache-blocks": 200})
    await pools.start()
    assert cached((await pools.complete(0)).json()) == CACHED_TOKENS
    yield pools
    await pools.close()


async def test_prompts_are_pushed_while_they_are_computed(pushing):
    got = await pushing.complete(1)
    assert (got.headers["x-prefill-worker-id"], cached(got.json())) == ("1", CACHED_TOKENS)
    decodes = int(got.headers["x-worker-id"])
    assert await pushing.shared(decodes, "push_named_blocks_total") == 18
    assert await pushing.shared(1, "pushed_blocks_total") == 18
    read = [await pushing.shared(worker_id, "pulled_blocks_total") for worker_id in (2, 3)]
    assert sum(read) == 18  # the first prompt's
    assert await pushing.shared(1, "leases") == 0  # nothing is kept for a reader
    assert tokens(got.json()) == tokens(await pushing.fleet.complete(1, 0, prompt(1), 6))


async def test_death_in_the_middle_of_a_push_costs_no_request(pushing):
    fleet = pushing.fleet

    async def only(worker_id):
        """Let one worker decode what is placed from now on."""
        for each in (2, 3):
            lifecycle = "schedulable" if each == worker_id else "cordoned"
            await pushing.client.patch(f"{fleet.url}/workers/{each}", json={"lifecycle": lifecycle})

    async def pushed_to_paused(number, worker_id):
        """A request whose blocks wait for a worker that does not answer."""
        begun = await pushing.shared(1, "pushes_total")
        fleet.workers[worker_id].pause()
        asking = asyncio.create_task(pushing.complete(number))

        async def is_begun():
            return await pushing.shared(1, "pushes_total") > begun

        await eventually(is_begun)
        return asking

    await only(2)
    assert cached((await pushing.complete(1)).json()) == CACHED_TOKENS
    asking = await pushed_to_paused(2, 2)
    await only(3)
    fleet.workers[2].kill()
    answer = await asking
    assert (answer.status_code, answer.headers["x-worker-id"]) == (200, "3")
    assert tokens(answer.json()) == tokens(await fleet.complete(1, 0, prompt(2), 6))

    assert cached((await pushing.complete(3)).json()) == CACHED_TOKENS
    named = await pushing.shared(3, "push_named_blocks_total")
    assert named == CACHED_TOKENS // 16
    asking = await pushed_to_paused(4, 3)
    fleet.workers[1].kill()
    fleet.workers[3].go_on()
    answer = await asking
    assert (answer.status_code, answer.headers["x-worker-id"]) == (200, "3")
    assert tokens(answer.json()) == tokens(await fleet.complete(3, 0, prompt(4), 6))

    async def has_ended():
        return await pushing.shared(3, "push_leases") == 0

    await eventually(has_ended)
    assert await pushing.shared(3, "push_named_blocks_total") == named
    await eventually(pushing.is_free)
