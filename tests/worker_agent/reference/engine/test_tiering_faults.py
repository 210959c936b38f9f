"""The engine over tiers that fail at random: right tokens, or none; and nothing is left behind."""

import random
from contextlib import ExitStack

import pytest
import torch
from redis import Redis

from router.protocol.values import Tier
from support.blocks.failing_disks import BROKEN, FULL, in_place_of
from support.blocks.tier_stacks import disk, host, remote
from support.blocks.tiered_rank import BLOCK_BYTES, TEXT, TieredRank, cold
from support.processes.servers import free_port
from worker_agent.reference.engine.batching import GenerationRequest

pytestmark = pytest.mark.integration

MOST_TOKENS = 4
WRONG = b"A" * BLOCK_BYTES
PROMPTS = [TEXT[begin : begin + size] for begin in range(3) for size in (70, 130, 200)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(_one_thread):
    return [cold(prompt, MOST_TOKENS) for prompt in PROMPTS]


class Mischief:
    """Requests and faults at random, over a rank whose every answer is known."""

    def __init__(self, rank, directory, redis_port, seed, expected):
        self.rank = rank
        self.directory = directory
        self.redis = Redis(port=redis_port)
        self.rng = random.Random(seed)
        self.expected = expected
        self.asked = {}
        self.said = {}
        self.faults = ExitStack()
        self.answered = 0

    def step(self, **arrived):
        output = self.rank.step(**arrived)
        self.rank.pool.check_invariants()
        for generated in output.generated:
            request_id = generated.request_id
            self.said[request_id].append(generated.token)
            if generated.is_last:
                prompt, count = self.asked.pop(request_id)
                assert self.said.pop(request_id) == self.expected[prompt][:count]
                self.answered += 1
        return output

    def ask(self):
        request_id = str(self.rng.random())
        prompt, count = self.rng.randrange(len(PROMPTS)), self.rng.randint(1, MOST_TOKENS)
        self.asked[request_id], self.said[request_id] = (prompt, count), []
        self.step(added=[GenerationRequest(request_id, PROMPTS[prompt], count)])

    def leave(self):
        for request_id in self.rng.sample(sorted(self.asked), min(len(self.asked), 1)):
            del self.asked[request_id], self.said[request_id]
            self.step(aborted=[request_id])

    def go_on(self):
        for _ in range(self.rng.randint(1, 8)):
            output = self.step()
            if not output.has_work and output.wait_s is not None:
                self.rank.news.wait(min(output.wait_s, 0.01))

    def forget(self):
        self.step(clear_cache=True)

    def damage(self):
        """As much as a block, so that it would change the output."""
        path = self.directory / self.rng.choice(("host", "disk"))
        with path.open("r+b") as file:
            file.seek(self.rng.randrange(path.stat().st_size - BLOCK_BYTES))
            file.write(WRONG)

    def damage_remotely(self):
        """Also while Redis is full: the limit is lifted for the damage itself."""
        limit = self.redis.config_get("maxmemory")["maxmemory"]
        self.redis.config_set("maxmemory", "0")
        for key in self.redis.scan_iter("*"):
            if self.redis.type(key) == b"string" and self.rng.random() < 0.5:
                self.redis.setrange(key, 8, WRONG)
        self.redis.config_set("maxmemory", limit)

    def flush(self):
        self.redis.flushdb()

    def fail_the_disk(self):
        device = self.rng.choice((FULL, BROKEN))
        self.faults.enter_context(in_place_of(self.directory / "disk", device))

    def fill_redis(self):
        self.redis.config_set("maxmemory", "1")
        self.faults.callback(self.redis.config_set, "maxmemory", "0")

    def heal(self):
        self.faults.close()

    def end(self):
        """Nothing fails any more, and every request is answered."""
        self.heal()
        while self.asked:
            output = self.step()
            if self.asked and not output.has_work:
                self.rank.wait(output)
        self.rank.settle()
        self.redis.close()
        assert self.step().gauges.kv_used_blocks == 0


def usual(mischief):
    return [mischief.ask] * 8 + [mischief.go_on] * 10 + [mischief.leave] * 2


def faults(mischief):
    return [
        *(
            mischief.damage,
            mischief.damage,
            mischief.damage_remotely,
            mischief.flush,
            mischief.forget,
        ),
        *(mischief.fill_redis, mischief.heal, mischief.heal),
    ]


def held(store):
    """What a tier really has, once it is unused."""
    store.pool.check_invariants()
    assert store.pool.used_blocks == 0
    names = [store.pool.name(block) for block in range(store.num_blocks)]
    return {name.sequence_hash for name in names if name is not None}


@pytest.mark.parametrize("seed", range(3))
def test_faults_give_right_output_and_leave_no_blocks(tmp_path, redis_port, seed, expected):
    stores = (
        host(tmp_path, 20, BLOCK_BYTES),
        disk(tmp_path, 40, BLOCK_BYTES),
        remote(redis_port, BLOCK_BYTES),
    )
    with TieredRank(*stores) as rank:
        mischief = Mischief(rank, tmp_path, redis_port, seed, expected)
        for _ in range(60):
            mischief.rng.choice(usual(mischief) + faults(mischief))()
        mischief.fail_the_disk()
        for _ in range(30):
            mischief.rng.choice(usual(mischief))()
        mischief.end()
        assert mischief.answered > 15
        for tier in (Tier.HOST, Tier.DISK):
            assert rank.told[tier] == rank.stack.call(tier, held).result(60)
        assert any(status.up.blocks for status in rank.stack.status())


def test_unreachable_redis_delays_no_request(tmp_path, expected):
    stores = host(tmp_path, 15, BLOCK_BYTES), disk(tmp_path, 30, BLOCK_BYTES)
    with TieredRank(*stores, remote(free_port(), BLOCK_BYTES, timeout_s=1.0)) as rank:
        for number in (2, 5, 8, 2):
            assert rank.run(PROMPTS[number], MOST_TOKENS) == expected[number]
        assert rank.told[Tier.REMOTE] == set()
