"""What the connector for vLLM is made of, without vLLM: objects of its shape stand for its own."""

import asyncio
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from router.errors import ConfigError
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher.follower.tier_follower import TierFollower
from router.publisher.journal.consolidator import JournalConsolidator
from router.publisher.journal.journal import EventJournal
from router.runtime.process.settings import settings_of
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from support.blocks.vllm_halves import (
    BLOCK_SIZE,
    HYBRID,
    NUM_BLOCKS,
    SETTINGS,
    Halves,
    Request,
    computed,
    hybrid_computed,
    step_output,
)
from support.processes.servers import eventually, free_port
from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared
from worker_agent.blocks.names import BlockName
from worker_agent.config.reference import ReferenceConfig
from worker_agent.connector.slots.block_groups import BlockGroup
from worker_agent.connector.slots.protocol import Completion, StepPlan, StepReport
from worker_agent.connector.vllm_parts.counters import METRICS, of_scheduler, of_worker, together
from worker_agent.connector.vllm_parts.engine import (
    CacheKinds,
    check_engine,
    engine_geometry,
    groups_of,
)
from worker_agent.connector.vllm_parts.messages import (
    GivenUp,
    Instructions,
    Looked,
    Lookup,
    WorkerEvents,
    encoded,
    instructions,
    worker_events,
)
from worker_agent.connector.vllm_parts.peer_sharing import NO_PEERS
from worker_agent.connector.vllm_parts.remote_lookups import LOOK_S, RemoteLookups
from worker_agent.connector.vllm_parts.scheduler_side import (
    QUIET_S,
    START_S,
    Inventory,
)
from worker_agent.connector.vllm_parts.settings import connector_settings
from worker_agent.connector.vllm_parts.steps import prompt_of, scheduled_step
from worker_agent.connector.vllm_parts.worker_side import distinct, layout_groups
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.strides import LayoutKind
from worker_agent.tiers.stack import TierChange

NAMES = [BlockName(bytes([i]) * 16, i) for i in range(4)]


# ── What a user says ─────────────────────────────────────────────────────────────────────────────


def test_tiers_have_the_agent_s_names():
    said = {"host_cache_blocks": 7, "disk_cache_gb": 0.5, "worker_id": 3, "cache_model": "m"}
    settings = connector_settings(said)
    tiers = settings.tiers
    assert (tiers.host_cache_blocks, tiers.disk_cache_gb, settings.worker.id) == (7, 0.5, 3)
    ours = {each.name for each in settings_of(settings)}
    agents = {each.name for each in settings_of(ReferenceConfig())}
    special = {"cache_model", "tier_events", "share_listen", "share_peers", "control_listen"}
    assert ours - agents == special | {"layer_by_layer"}


KEYED = {"host_cache_blocks": 1, "block_key_file": "k"}
SHARED = {"share_listen": "tcp://a:1", **KEYED}


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({}, r"host_cache_blocks: no tier in memory or on disk"),
        ({"remote_cache_url": "redis://x", "block_key": "a"}, "block_key: given here"),
        ({"host_cache_block": 7}, r"host_cache_block: unknown key \(kv_connector_extra_config\)"),
        ({"host_cache_blocks": -1}, r"host_cache_blocks: -1 .* a whole number >= 0"),
        ({"host_cache_blocks": "many"}, r"host_cache_blocks: 'many'"),
        ({"nats_url": "x", "host_cache_blocks": 1}, "nats_url: given here .*kv-worker-agent"),
        (
            {"disk_cache_dir": "/x", "host_cache_blocks": 1},
            "disk_cache_dir: .* the tier is not configured",
        ),
        ({"remote_cache_url": "redis://x", "host_cache_blocks": 1}, "remote_cache_url: .*secret"),
        ({"share_listen": "tcp://a:1", "host_cache_blocks": 1}, "share_listen: .*fleet's secret"),
        ({"share_peers": "tcp://a:1", "host_cache_blocks": 1}, "share_peers: .*fleet's secret"),
        ({"share_peers": "http://a", **KEYED}, "share_peers: 'http://a' is no address"),
        ({"share_peers": "tcp://a:0", **KEYED}, "share_peers: 'tcp://a:0' for worker 0: port 0"),
        ({"share_peers": ["tcp://a:1"] * 33, **KEYED}, "share_peers: 33 of them"),
        ({"share_listen": "unix://x", **KEYED}, "share_listen: 'unix://x' is no address"),
        (
            {"share_listen": "tcp://a:1", "block_key_file": "k", "disk_cache_blocks": 1},
            "share_listen: no host memory to share",
        ),
        ({"tls_cert_file": "c", **SHARED}, "tls_cert_file: .*a certificate requires its key"),
        ({"tls_key_file": "k", **SHARED}, "tls_key_file: .*a key requires its certificate"),
        ({"tls_cert_file": "/no", "tls_key_file": "/no", **SHARED}, "tls_cert_file: /no: No such"),
        ({"share_ca_file": "a", **SHARED}, "share_ca_file: .*would be sent without TLS"),
        ({"share_ca_file": "a", **KEYED}, "share_ca_file: .*blocks are not shared"),
        ({"share_ca_file": "/no", "share_peers": "tcp://a:1", **KEYED}, "share_ca_file: /no: No"),
        ({"tls_cert_file": "c", "tls_key_file": "k", **KEYED}, "tls_cert_file: .*no server"),
        (
            {"tls_cert_file": "c", "tls_key_file": "k", "share_nixl": True, **SHARED},
            "share_nixl: .*does not encrypt",
        ),
        ({"tls_client_ca_file": "c", **SHARED}, "tls_client_ca_file: given here"),
    ],
)
def test_invalid_fields_are_named(said, complaint):
    with pytest.raises(ConfigError, match=complaint):
        connector_settings(said)


# ── What the engine is ───────────────────────────────────────────────────────────────────────────


class FullAttention:
    def __init__(self, block_size=BLOCK_SIZE):
        self.block_size, self.prefix_cacheable = block_size, True


class SlidingWindow(FullAttention):
    def __init__(self, block_size=BLOCK_SIZE, extra_retained_tokens=0):
        super().__init__(block_size)
        self.sliding_window, self.extra_retained_tokens = 6, extra_retained_tokens


class ChunkedLocalAttentionSpec(FullAttention):
    pass


class MambaSpec(FullAttention):
    pass


KINDS = CacheKinds((FullAttention,), (SlidingWindow,))


def engine_config(**said):
    transfer = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    parallel = {"rank": 1, "world_size": 2, "data_parallel_rank": 3, "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1}  # fmt: skip
    parts = {
        "kv_transfer_config": transfer,
        "parallel_config": parallel,
        "model_config": {"model": "m", "revision": None, "dtype": "bf16", "quantization": None},
        "cache_config": {"cache_dtype": "auto", "block_size": BLOCK_SIZE},
        "attention_config": {"backend": None},
    }
    spaces = {
        name: SimpleNamespace(**{key: said.get(key, value) for key, value in part.items()})
        for name, part in parts.items()
    }
    return SimpleNamespace(**spaces, speculative_config=said.get("speculative_config"))


def cache_config(*specs, **said):
    fields = {"is_eagle_group": False, "host_resident": False, "enable_kv_transfer": True, **said}
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{place}"], **fields)
        for place, spec in enumerate(specs)
    ]
    layout = said.get("layout", "LBNHC")
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS, kv_cache_layout=layout)


@pytest.mark.parametrize(
    ("said", "what_helps"),
    [
        ({"kv_load_failure_policy": "fail"}, "recompute"),
        ({"kv_role": "kv_producer"}, "kv_both; prefill engines with share_listen"),
        ({"kv_role": "kv_consumer"}, "decode engines with share_peers"),
        ({"speculative_config": object()}, "no --speculative-config"),
        ({"decode_context_parallel_size": 2}, "no --decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "no --prefill-context-parallel-size"),
    ],
)
def test_engines_that_it_cannot_serve_are_refused_with_what_helps(said, what_helps):
    with pytest.raises(ConfigError, match=f"^{next(iter(said))}: .*{what_helps}"):
        check_engine(engine_config(**said))


def test_blocks_of_one_kind_have_no_tag():
    assert groups_of(cache_config(FullAttention()), KINDS) == (BlockGroup(BLOCK_SIZE),)


def test_groups_of_a_hybrid_are_told_apart_by_their_layers():
    specs = SlidingWindow(), FullAttention(8), SlidingWindow()
    groups = groups_of(cache_config(*specs), KINDS)
    assert [(each.block_size, each.window) for each in groups] == [(4, 6), (8, None), (4, 6)]
    assert len({each.tag for each in groups}) == 3


@pytest.mark.parametrize(
    ("specs", "said", "complaint"),
    [
        ([SlidingWindow()], {}, "none of full attention .*--disable-hybrid-kv-cache-manager"),
        (
            [FullAttention(), ChunkedLocalAttentionSpec()], {},
            r"kv_cache_groups\[1\]: ChunkedLocal.* --disable-hybrid-kv-cache-manager makes chunks",
        ),
        ([FullAttention(), MambaSpec()], {}, "MambaSpec, which is not restored .*no connector"),
        ([FullAttention()], {"is_eagle_group": True}, "of draft layers .*no speculative decoding"),
        ([FullAttention()], {"host_resident": True}, "does not cache by prefix"),
        ([FullAttention()], {"enable_kv_transfer": False}, "does not cache by prefix"),
        (
            [FullAttention(), SlidingWindow(extra_retained_tokens=3)], {},
            "tokens of a draft .*no speculative decoding",
        ),
    ],
)  # fmt: skip
def test_kinds_that_cannot_be_restored_are_refused(specs, said, complaint):
    with pytest.raises(ConfigError, match=complaint):
        groups_of(cache_config(*specs, **said), KINDS)


def test_blocks_that_routers_could_not_name_are_not_published():
    groups = groups_of(cache_config(FullAttention(8), SlidingWindow()), KINDS)
    settings = connector_settings({"host_cache_blocks": 1, "tier_events": "tcp://x:1"})
    with pytest.raises(ConfigError, match="tier_events: full attention has blocks of 8 tokens"):
        engine_geometry(engine_config(), cache_config(), groups, settings)


def test_layers_that_share_memory_are_not_copied_one_by_one():
    groups = groups_of(cache_config(FullAttention(), SlidingWindow()), KINDS)
    settings = connector_settings({"host_cache_blocks": 1, "layer_by_layer": True})
    with pytest.raises(ConfigError, match="layer_by_layer: 2 groups of layers"):
        engine_geometry(engine_config(), cache_config(), groups, settings)


def test_blocks_of_another_engine_have_other_names():
    def model(settings=SETTINGS, layout="LBNHC", **said):
        groups = (BlockGroup(BLOCK_SIZE),)
        cache = cache_config(layout=layout)
        return engine_geometry(engine_config(**said), cache, groups, settings).model

    named = connector_settings({"host_cache_blocks": 1, "cache_model": "mine"})
    others = [model(dtype="f32"), model(model="n"), model(tensor_parallel_size=4), model(named)]
    assert len({model(), model(layout="LBHNC"), *others}) == 6
    assert model() == model(rank=0)


@pytest.mark.parametrize(
    ("shape", "kind", "inner"),
    [((16, 2, 4, 6), LayoutKind.BLOCK_FIRST, 12), ((2, 16, 4, 3, 5), LayoutKind.BLOCK_SECOND, 15)],
)
def test_layouts_follow_from_the_engine_s_own_numbers(shape, kind, inner):
    layers = {f"layer.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(3)}
    [group] = layout_groups(layers, 16, 4)
    assert (group.kind, group.layers, group.config.inner_dim) == (kind, tuple(layers), inner)
    assert group.config.num_blocks * group.config.block_bytes == 3 * layers["layer.0"].nbytes


def test_layers_of_several_shapes_are_several_groups():
    layers = {"a": torch.zeros(16, 8), "b": torch.zeros(16, 4), "c": torch.zeros(16, 8)}
    groups = layout_groups(layers, 16, 4)
    assert [group.layers for group in groups] == [("a", "c"), ("b",)]


def test_layers_of_several_groups_over_one_memory_are_one():
    memory = [torch.arange(16 * 8, dtype=torch.uint8) for _ in range(2)]
    layers = {
        "full.0": memory[0].view(16, 8),
        "full.1": memory[1].view(16, 8),
        "window.0": memory[0].view(32, 4),  # Kernels use half a block.
        "window.1": memory[1].view(torch.bfloat16).view(16, 4),
    }
    for order in (("0", "1"), ("1", "0")):  # whichever has the lower address
        named = {f"{kind}.{n}": layers[f"{kind}.{n}"] for kind in ("full", "window") for n in order}
        assert list(distinct(named, 16)) == [f"full.{n}" for n in order]
    assert distinct({"split": memory[0].view(64, 2)}, 16)["split"].shape == (16, 8)


def test_layers_that_share_a_part_of_their_memory_are_refused():
    memory = torch.zeros(16 * 8)
    for other in (memory[:64].view(16, 4), memory[64:].view(16, 4)):
        with pytest.raises(LayoutError, match="shares a part of the memory of a"):
            distinct({"a": memory.view(16, 8), "b": other}, 16)


@pytest.mark.parametrize(("shape", "blocks"), [((2, 2, 4), 2), ((15, 4, 8), 16), ((16, 6), 16)])
def test_ambiguous_layouts_are_refused(shape, blocks):
    with pytest.raises(LayoutError, match="layer"):
        layout_groups({"layer": torch.zeros(shape)}, blocks, 4)


# ── Messages between the halves ──────────────────────────────────────────────────────────────────


def test_messages_come_over_as_they_were():
    changes = [
        TierChange(Tier.DISK, each)
        for each in (BlockStored(NAMES[0]), BlockRemoved(NAMES[1]), CacheCleared())
    ]
    report, looked = StepReport([Completion(7, {3: "late"})], ["r"]), [Looked(4, [0, 2])]
    reported = WorkerEvents(1, report, changes, looked, is_busy=True)
    assert worker_events(encoded(reported)) == reported
    said = Instructions(
        StepPlan(5, voided=[2]), [Lookup(1, (NAMES[2],), Rank(7, 1))], [GivenUp("r", (1, 2))]
    )
    assert instructions(encoded(said)) == said


def test_a_block_is_of_use_when_every_worker_has_it():
    inventory = Inventory(num_ranks=2)
    first, second = NAMES[:2]
    inventory.apply(0, [TierChange(Tier.HOST, BlockStored(each)) for each in (first, second)])
    inventory.apply(1, [TierChange(Tier.DISK, BlockStored(first))])
    found = {
        source.tier: len(source.pool.match([first.identity, second.identity]))
        for source in inventory.sources()
    }
    assert found == {Tier.HOST: 0, Tier.DISK: 1, Tier.REMOTE: 1}
    inventory.apply(1, [TierChange(Tier.DISK, BlockRemoved(first))])
    assert not inventory.has(first.identity, Tier.REMOTE)
    inventory.apply(0, [TierChange(Tier.HOST, CacheCleared())])
    assert len(inventory) == 0


def test_a_prompt_waits_for_every_worker_to_look_but_not_for_long():
    looks = RemoteLookups(num_ranks=2)
    assert looks.look_up("r", NAMES, 0.0)
    [look] = looks.take()
    assert look.names == tuple(NAMES)
    looks.answered(0, [Looked(look.number), Looked(99)])
    assert looks.look_up("r", NAMES, 0.1)
    looks.answered(0, [Looked(look.number)])
    assert looks.look_up("r", NAMES, 0.1)
    looks.answered(1, [Looked(look.number)])
    assert not looks.look_up("r", NAMES, 0.2)
    assert looks.take() == []
    looks.forget("r")
    assert looks.look_up("r", NAMES, 1.0)
    assert not looks.look_up("r", NAMES, 1.0 + LOOK_S)
    assert looks.late == 1


def test_a_block_is_at_peers_while_a_request_is_here_for_which_all_workers_found_it():
    looks = RemoteLookups(num_ranks=2)
    for key, found in (("a", ([0, 1, 9], [0, 2])), ("b", ([0], [0]))):
        assert looks.look_up(key, NAMES, 0.0, Rank(7, 0))
        [look] = looks.take()
        assert look.source == Rank(7, 0)
        for rank, places in enumerate(found):
            assert not looks.is_at_peers(NAMES[1].identity)
            looks.answered(rank, [Looked(look.number, places)])
    at_peers = [looks.is_at_peers(each.identity) for each in NAMES]
    assert at_peers == [True, False, False, False]
    looks.forget("a")
    assert looks.is_at_peers(NAMES[0].identity)
    looks.forget("b")
    looks.forget("b")
    assert not looks.is_at_peers(NAMES[0].identity)


# ── Both halves, over real tiers ─────────────────────────────────────────────────────────────────


def test_steps_name_the_tokens_that_are_new():
    request = Request("r", list(range(10)))
    prompt = prompt_of(request)
    assert prompt.for_leader(is_known=False).tokens == list(range(10))
    step = scheduled_step(
        step_output(new=[("r", [[1, 2, 3]], 0, 10), ("x", [[9]], 0, 4)]), {"r": prompt}
    )
    assert [each.key for each in step.new_requests] == ["r"]
    request.all_token_ids += [77]
    step = scheduled_step(step_output(cached=[("r", [], 10, 1)]), {"r": prompt})
    [again] = step.cached_requests
    assert (again.tokens, again.blocks, again.is_resumed) == ([77], [], False)
    step = scheduled_step(step_output(new=[("r", [[5, 6]], 0, 8)], preempted=["r"]), {"r": prompt})
    [resumed] = step.cached_requests
    assert (resumed.tokens, resumed.blocks, resumed.is_resumed) == ([], [[5, 6]], True)
    assert step.preempted == ["r"]


@pytest.mark.parametrize(
    "said",
    [{"mm_features": [1]}, {"prompt_embeds": 1}, {"resumable": True},
     {"skip_reading_prefix_cache": True}, {"prompt_token_ids": []}],
)  # fmt: skip
def test_requests_with_non_token_inputs_are_ignored(said):
    request = Request(**{"request_id": "r", "prompt_token_ids": [1], **said})
    if not request.prompt_token_ids:
        request.prompt_token_ids = None
    assert prompt_of(request) is None


@pytest.fixture
def halves():
    halves = Halves()
    halves.started()
    yield halves
    halves.worker.close()


@pytest.mark.parametrize("is_layered", [False, True])
def test_stored_blocks_are_loaded(is_layered):
    settings = {"host_cache_blocks": 32, "onboard_always": True, "layer_by_layer": is_layered}
    with closing(Halves(connector_settings(settings))) as halves:
        halves.started()
        stores_and_loads(halves)


def stores_and_loads(halves):
    stored = computed(halves)
    halves.scheduler.begin(Request("b", list(range(10))))
    matched = halves.scheduler.matched("b", 0, halves.now_s)
    assert (matched.tokens, matched.is_async) == (8, True)
    halves.scheduler.allocated("b", [[7, 9]], 8, halves.now_s)
    loaded = set()
    while not loaded:
        over, errors = halves.step()
        loaded |= over.loaded
        assert not errors
        halves.wait()
    for layer, before in zip(halves.caches.values(), stored, strict=True):
        assert torch.equal(layer[[7, 9]], before[:2])
    halves.scheduler.allocated("b", [[7, 9, 11]], 0, halves.now_s)
    halves.step(new=[("b", [[7, 9, 11]], 8, 2)])
    assert halves.scheduler.finished("b", halves.now_s)
    halves.step(finished=["b"])
    assert len(halves.scheduler.slots) == 0
    assert not halves.scheduler.leader.counters.refused


def test_undispatched_load_is_reported_as_failed(halves):
    computed(halves)
    halves.scheduler.begin(Request("b", list(range(10))))
    assert halves.scheduler.matched("b", 0, halves.now_s).tokens == 8
    halves.scheduler.allocated("b", [[7]], 4, halves.now_s)  # another number than was said
    halves.scheduler.allocated("stranger", [[8]], 4, halves.now_s)
    over, errors = halves.step()
    assert (over.loaded, errors) == ({"b", "stranger"}, {7, 8})


def test_blocks_of_another_model_are_not_found(halves):
    computed(halves)
    halves.scheduler.begin(Request("old", list(range(10))))
    halves.scheduler.rename("other weights")
    assert halves.scheduler.matched("old", 0, 0.0).tokens == 0
    halves.scheduler.begin(Request("new", list(range(10))))
    assert halves.scheduler.matched("new", 0, 0.0).tokens == 0


def test_blocks_of_another_model_are_not_credited(halves):
    """What was kept is forgotten in the next step, though no request needs one."""
    computed(halves)
    assert halves.worker.manager.stack.status()[0].held_blocks == 2
    assert not halves.scheduler.has_work(halves.now_s)
    halves.scheduler.rename("other weights")
    assert halves.scheduler.has_work(halves.now_s)
    halves.quiesce()
    assert halves.worker.manager.stack.status()[0].held_blocks == 0
    assert not halves.scheduler.has_work(halves.now_s)


def test_first_request_waits_for_tiers_of_a_former_life():
    halves = Halves()
    halves.scheduler.begin(Request("a", list(range(10))))
    assert halves.scheduler.matched("a", 0, 5.0) is None
    assert halves.scheduler.matched("a", 0, 5.0 + START_S).tokens == 0
    halves.scheduler.begin(Request("b", list(range(10))))
    halves.started()
    assert halves.scheduler.matched("b", 0, 5.0).tokens == 0
    halves.scheduler.finished("a", 0.0)
    halves.worker.close()


def test_a_request_is_freed_once(halves):
    """Where steps overlap, it is named as loaded after it was finished, and as stored later."""
    halves.scheduler._awaited = {"a", "b"}
    assert halves.scheduler.still_to_free({"a"}, {"b"}) == {"b"}
    assert halves.scheduler.still_to_free((), {"a"}) == set()


def test_steps_go_on_while_blocks_go_down_but_not_for_ever(halves):
    halves.scheduler.learn([encoded(WorkerEvents(0, StepReport(), is_busy=True))])
    assert halves.scheduler.has_work(1.0)
    assert not halves.scheduler.has_work(QUIET_S + 1.0)
    halves.scheduler.learn([encoded(WorkerEvents(0, StepReport()))])
    assert not halves.scheduler.has_work(1.0)


def test_counts_are_reported_once(halves):
    halves.scheduler.take_counted()
    halves.worker.take_counted()
    computed(halves)
    reported = halves.worker.take_counted()
    assert reported["stored_blocks"] == {"host": 2}
    assert reported["held_blocks"] == {"host": 2}
    again = halves.worker.take_counted()
    assert not again
    halves.scheduler.begin(Request("b", list(range(10))))
    assert halves.scheduler.matched("b", 0, halves.now_s).tokens == 8
    assert not halves.scheduler.take_counted()
    halves.scheduler.allocated("b", [[7]], 4, halves.now_s)  # another number than was said
    halves.step()
    assert halves.scheduler.take_counted()["leader_refused"] == {"": 1}
    assert halves.worker.take_counted()["given_up_loads"] == {"": 1}


def test_every_count_is_a_metric(halves):
    first = halves.worker
    of_leader = of_scheduler(halves.scheduler.leader.counters, 0, 0, 0)
    counted = of_leader | of_worker(
        first.worker.counters, 0, None, first.manager.stack.status(), NO_PEERS, is_first=True
    )
    assert set(counted) == {metric.name for metric in METRICS}
    for metric in METRICS:
        assert set(counted[metric.name]) == ({"host"} if metric.by_tier else {""})
    tiers = first.manager.stack.status()
    of_others = of_worker(first.worker.counters, 0, None, tiers, NO_PEERS, is_first=False)
    assert "held_blocks" not in of_others


def test_increases_add_up_and_gauges_do_not():
    first = {"stored_blocks": {"host": 2}, "held_blocks": {"host": 9}}
    second = {"stored_blocks": {"host": 3, "disk": 1}, "held_blocks": {"host": 7}}
    assert together(first, second) == {
        "stored_blocks": {"host": 5, "disk": 1}, "held_blocks": {"host": 7},
    }  # fmt: skip
    assert together({}, first) == first


SOURCE = {"worker_id": 7, "dp_rank": 1, "blocks": 3, "tier": "host_pinned"}


@pytest.mark.parametrize(
    ("params", "source"),
    [
        ({"source": SOURCE}, Rank(7, 1)),
        ({"source": SOURCE | {"worker_id": -1}}, None),
        ({"source": [7, 1]}, None),
        ({"source": None}, None),
        ("source", None),
        (None, None),
    ],
)
def test_the_source_of_a_request_is_that_of_a_decision_or_none(params, source):
    assert prompt_of(Request("r", [1], kv_transfer_params=params)).source == source


def test_blocks_of_all_groups_are_loaded_together():
    halves = Halves(facts=HYBRID)
    halves.started()
    stored = hybrid_computed(halves, "a", list(range(10)))
    assert halves.worker.manager.stack.status()[0].held_blocks == 4
    halves.scheduler.begin(Request("b", list(range(10))))
    assert halves.scheduler.matched("b", 0, halves.now_s).tokens == 8
    halves.scheduler.allocated("b", [[12, 13], [10, 11]], 8, halves.now_s)
    loaded = set()
    while not loaded:
        over, _ = halves.step()
        loaded |= over.loaded
        assert not over.failed
        halves.wait()
    for layer, before in zip(halves.caches.values(), stored, strict=True):
        assert torch.equal(layer[[12, 13, 10, 11]], before)
    halves.worker.close()


def test_without_a_block_of_a_window_the_whole_load_has_failed():
    halves = Halves(facts=HYBRID)
    halves.started()
    hybrid_computed(halves, "a", list(range(10)))
    halves.scheduler.begin(Request("b", list(range(10))))
    assert halves.scheduler.matched("b", 0, halves.now_s).tokens == 8
    halves.scheduler.allocated("b", [[0, 13], [10, 11]], 8, halves.now_s)  # 0: it has none
    over, errors = halves.step()
    assert (over.loaded, over.failed, errors) == ({"b"}, {"b"}, {13, 10, 11})
    assert halves.scheduler.matched("b", 0, halves.now_s).tokens == 0
    halves.worker.close()


async def test_tier_contents_are_published_to_the_agent():
    address = f"tcp://127.0.0.1:{free_port()}"
    reported = {"host_cache_blocks": 32, "onboard_always": True, "tier_events": address}
    halves = Halves(connector_settings(reported))
    halves.started()
    computed(halves)
    journal = EventJournal(Rank(7, 0), 1, Identity(SCHEME, BLOCK_SIZE))
    follower = TierFollower(address, JournalConsolidator(journal).source(), 0, lambda _: None)
    task = asyncio.create_task(follower.run())
    try:
        held = {each.routed.sequence_hash for each in sequence_of(range(8)).blocks}
        await eventually(lambda: set(journal.held(Tier.HOST).tolist()) == held)
    finally:
        task.cancel()
        halves.worker.close()
    assert len(held) == 2


def sequence_of(tokens):
    return TokenBlockSequence(list(tokens), BLOCK_SIZE, request_families())
