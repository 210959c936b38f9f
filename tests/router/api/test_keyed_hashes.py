"""A fleet's secret, from an engine's events to responses: no public hash is shown."""

import pytest

from router.api.index_queries import Lookups
from router.protocol.replies import TrustState
from router.protocol.values import SCHEME, Identity, Scope, Tier
from router.publisher.journal.journal import EventJournal
from router.runtime.kernels.hash_key import derive
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying
from support.engines.engines import Edge, names, stored
from support.fleets.direct import BLOCK_SIZE, DirectEngine, direct_router
from support.processes.servers import equals
from support.values.builders import World, rank
from support.values.indexing import PROMPT as LONG_PROMPT
from support.values.indexing import Engine, RunningIndex, local_hashes, publishing, sequence_hashes

SECRET = "00112233445566778899aabbccddeeff"
NAMING = HashKeying(derive(bytes.fromhex(SECRET)))
OTHER = HashKeying(derive(b"a secret of another fleet"))
PROMPT = list(range(40))
PUBLIC = names(PROMPT)


async def test_direct_engine_is_indexed_under_keyed_hashes(eventually):
    engine = DirectEngine(1)
    async with direct_router(engine, block_key=SECRET) as router:
        engine.cache(PROMPT)
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10}))
        by_hash = {"sequence_hashes": PUBLIC, "isl_tokens": 40}
        own_names = {"sequence_hashes": list(range(10)), "block_hashes": local_hashes(PROMPT, 4)}
        for body in ({"token_ids": PROMPT}, by_hash, by_hash | own_names):
            decision = (await router.post("/select", body)).json()
            assert decision["overlap_blocks"] == 10
        holders = (await router.client.get(f"/blocks/{PUBLIC[3]}")).json()["holders"]
        assert [each["worker_id"] for each in holders] == [1]
        dump = (await router.client.get("/dump")).text
        assert str(NAMING.name(PUBLIC[3])) in dump
        assert not [each for each in PUBLIC if str(each) in dump]
        config = (await router.client.get("/config")).text
        assert SECRET not in config
        assert '"block_key":{"value":"***"' in config


async def test_an_index_alone_is_asked_by_tokens_and_by_hashes(nats_server, bus, eventually):
    engine = Engine(bus, 1, naming=NAMING)
    engine.cache(LONG_PROMPT)
    async with RunningIndex(nats_server.url, block_key=SECRET).running() as index:
        assert (await index.register(1)).status_code == 201
        async with publishing(engine):
            held = {"1": {"0": 160}}
            await eventually(lambda: equals(index.scores(LONG_PROMPT), held))
            signed = [h - 2**64 if h >= 2**63 else h for h in local_hashes(LONG_PROMPT)]
            body = {"block_hashes": signed, "model_name": "m"}
            assert (await index.post("/query_by_hash", body)).json()["scores"] == held


def test_keyed_agent_and_keyed_router_agree_on_names():
    world = World(naming=NAMING)
    identity = Identity(NAMING.scheme, BLOCK_SIZE)
    world.worker(7, identity=identity)
    edge = Edge(identity, naming=NAMING)
    edge.feed(stored([1, 2, 3], PROMPT[:12]))
    assert edge.held() == {NAMING.name(each) for each in PUBLIC[:3]}
    world.journals[rank(7)] = edge.journal
    world.deliver(rank(7))
    assert world.select(PROMPT).overlap_blocks == 3


@pytest.mark.parametrize(("ours", "theirs"), [(NAMING, OTHER), (NAMING, PLAIN), (PLAIN, OTHER)])
def test_names_under_another_secret_are_refused_in_words(ours, theirs):
    world = World(naming=ours)
    world.worker(1, identity=Identity(theirs.scheme, BLOCK_SIZE))
    world.journals[rank(1)].stored(Tier.DEVICE, PUBLIC, None)
    world.deliver(rank(1))
    trust = world.core.trust(rank(1), 0.0)
    assert trust.state == TrustState.BLIND
    for said in (ours.scheme, theirs.scheme, "block_key_file"):
        assert said in trust.reason
    assert world.select(PROMPT).overlap_blocks == 0


def test_other_hash_scheme_is_not_reported_as_a_secret():
    world = World(naming=NAMING)
    world.worker(1, identity=Identity("sha256", BLOCK_SIZE))
    assert "block_key_file" not in world.core.trust(rank(1), 0.0).reason


async def test_lookups_by_local_hashes_find_what_is_keyed():
    world = World(naming=NAMING)
    identity = Identity(NAMING.scheme, 16)
    world.worker(1, identity=identity)
    journal = world.journals[rank(1)] = EventJournal(rank(1), 1, identity, naming=NAMING)
    public = sequence_hashes(LONG_PROMPT)
    journal.stored(Tier.DEVICE, NAMING.listed(public).tolist(), None)
    world.deliver(rank(1))
    found = await Lookups(world.core, 0.0).by_hashes(Scope(), local_hashes(LONG_PROMPT))
    assert [each.overlap.device for each in found.matches] == [10]
    assert SCHEME in NAMING.scheme
