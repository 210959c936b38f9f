"""Two real engines that share blocks, with caches that evict: one loads what the other computed."""

import asyncio
import base64
import secrets
from contextlib import AsyncExitStack
from random import Random
from typing import NamedTuple

import pytest

from router.protocol.catalogue import decode_worker
from router.protocol.subjects import Subjects
from router.runtime.process.settings import id_of_name
from support.engines.tiny_llama import write_tiny_llama
from support.fleets.bridges import RunningBridge, ready
from support.processes.certificates import Authority
from support.processes.servers import eventually, free_port
from support.vllm.vllm_engines import BLOCK_SIZE, NUM_BLOCKS, VllmEngine
from support.vllm.vllm_stepped import transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

NUM_PROMPTS = 100
AT_ONCE = 4
MAX_TOKENS = 8
SUBJECTS = Subjects("test")


class Beside(NamedTuple):
    """What an agent has to know of an engine."""

    endpoint: str
    replay_endpoint: str
    url: str

    @classmethod
    def of(cls, engine):
        return cls(engine.events, engine.replay, f"{engine.url}/metrics")


def prompts():
    """Each of 4 to 12 whole blocks and a part of one; no two begin alike."""
    rng = Random(5)
    return [
        rng.choices(range(2, 500), k=BLOCK_SIZE * rng.randrange(4, 13) + rng.randrange(1, 30))
        for _ in range(NUM_PROMPTS)
    ]


def whole(prompt):
    """The tokens of a prompt that can be restored."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


async def asked(engine, wanted, source=None):
    """The answers to these prompts, a few at once."""
    answers = []
    for first in range(0, len(wanted), AT_ONCE):
        batch = wanted[first : first + AT_ONCE]
        some = (engine.complete(each, MAX_TOKENS, source=source) for each in batch)
        answers += await asyncio.gather(*some)
    return answers


def tokens(answers):
    return [each.token_ids for each in answers]


def source_at(name):
    return {"worker_id": id_of_name(name), "dp_rank": 0, "blocks": 12, "tier": "host_pinned"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vllm") / "tiny"
    write_tiny_llama(directory)
    return directory


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    path.chmod(0o600)
    return str(path)


async def answers_without_connector(vllm_python, model, tmp_path):
    engine = VllmEngine(vllm_python, model, tmp_path, "plain", has_events=False)
    engine.start()
    try:
        engine.wait()
        return tokens(await asked(engine, prompts()))
    finally:
        engine.kill()


async def test_what_a_peer_holds_is_restored_from_it(
    model, vllm_python, tmp_path, key_file, record_property
):
    """300 requests: each engine computes half of the prompts, loads the other half from its peer,
    then one loads all while the other is killed. They connect over TLS alone.
    """
    right = await answers_without_connector(vllm_python, model, tmp_path)
    addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in "ab"}
    engines = {}
    authority = Authority(tmp_path)
    for name, other in (("a", "b"), ("b", "a")):
        certificate, certificate_key = authority.issue(name)
        transfer = transfer_config(
            {
                "name": name,
                "host_cache_blocks": 2048,
                "block_key_file": key_file,
                "share_listen": addresses[name],
                "share_peers": addresses[other],
                "tls_cert_file": certificate,
                "tls_key_file": certificate_key,
                "share_ca_file": str(authority.path),
            }
        )
        paths = vllm_python, model, tmp_path, name
        engines[name] = VllmEngine(*paths, has_events=False, transfer=transfer)
    wanted = prompts()
    halves = {"a": wanted[::2], "b": wanted[1::2]}
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            engine.wait()
        for name, engine in engines.items():
            assert tokens(await asked(engine, halves[name])) == right["ab".index(name) :: 2]
            blocks = sum(map(whole, halves[name])) // BLOCK_SIZE
            assert blocks > 4 * NUM_BLOCKS, "its own memory holds a small part"
            await eventually(lambda engine=engine, blocks=blocks: has_stored(engine, blocks))
        restored = await swapped(engines, halves, right)
        pulled = [
            await each.metric("vllm:kv_router_pulled_blocks_total") for each in engines.values()
        ]
        failed = [
            await each.metric("vllm:kv_router_failed_blocks_total") for each in engines.values()
        ]
        assert min(pulled) > 0
        assert sum(failed) == 0
        assert restored >= 0.95 * NUM_PROMPTS
        left = asyncio.create_task(asked(engines["b"], wanted))
        await asyncio.sleep(0.5)
        engines["a"].kill()
        assert tokens(await left) == right
    finally:
        for engine in engines.values():
            engine.kill()
    record_property(
        "measured", f"{restored} of {NUM_PROMPTS} prompts restored, {sum(pulled)} blocks"
    )


async def swapped(engines, halves, right):
    """How many of the prompts that the other has computed are restored, every token of them."""
    restored = 0
    for place, (name, other) in enumerate((("a", "b"), ("b", "a"))):
        wanted = halves[other]
        answers = await asked(engines[name], wanted, source_at(other))
        assert tokens(answers) == right[1 - place :: 2]
        restored += sum(
            answer.cached_tokens == whole(prompt)
            for answer, prompt in zip(answers, wanted, strict=True)
        )
    return restored


async def has_stored(engine, blocks):
    return await engine.metric("vllm:kv_router_stored_blocks_total", 'tier="host"') >= blocks


async def test_engines_announce_their_blocksets_and_find_each_other_by_them(
    model, vllm_python, tmp_path, key_file, nats_server, bus
):
    """The agents beside them show what is exported and imported; one loads what the other holds,
    through NIXL.
    """
    engines, bridges = {}, {}
    async with AsyncExitStack() as stack:
        for number, name in enumerate("ab", 1):
            shared = {
                "worker_id": number,
                "block_key_file": key_file,
                "share_listen": f"tcp://127.0.0.1:{free_port()}",
                "control_listen": f"unix://{tmp_path}/{name}.control",
            }
            own = {"host_cache_blocks": 256, "share_nixl": True}
            transfer = transfer_config({**shared, **own})
            engine = VllmEngine(vllm_python, model, tmp_path, name, transfer=transfer)
            stack.callback(engine.kill)
            engine.start()
            engines[name] = engine
            beside = Beside.of(engine)
            bridges[name] = RunningBridge(
                nats_server.url, beside, beside, topic="", name=name, **shared
            )
        for engine in engines.values():
            engine.wait()
        for bridge in bridges.values():
            await stack.enter_async_context(ready(bridge))

        async def has_imported(name, other):
            report = (await bridges[name].client.get("/blocksets")).json()
            return [each["worker_id"] for each in report["imported"]["0"]] == [other] and report

        reports = await eventually(lambda: has_imported("a", 2), 60.0)
        theirs = await eventually(lambda: has_imported("b", 1), 60.0)
        assert theirs["imported"]["0"] == reports["exported"]
        assert reports["exported"][0]["sets"]["0"]["num_blocks"] == 256
        message = await bus.js.get_last_msg(SUBJECTS.bucket_stream, SUBJECTS.key("worker.1"))
        assert decode_worker(message.data).blocksets[0]["worker_id"] == 1

        wanted = prompts()[:10]
        first = await asked(engines["a"], wanted)
        blocks = sum(map(whole, wanted)) // BLOCK_SIZE
        await eventually(lambda: has_stored(engines["a"], blocks))
        second = await asked(engines["b"], wanted)
        assert tokens(second) == tokens(first)
        assert [each.cached_tokens for each in second] == list(map(whole, wanted))
        assert await engines["b"].metric("vllm:kv_router_pulled_blocks_total") == blocks
        assert await engines["b"].metric("vllm:kv_router_nixl_pulled_blocks_total") == blocks
