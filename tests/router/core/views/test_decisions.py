"""The source of further blocks that a decision names."""

import pytest

from router.api.rpc.verbs import new_reply
from router.core.commands import Apply, OrderWorker, RemoveWorker, Reserve, Select
from router.core.views.decisions import explain
from router.core.views.workers import overlap_scores, workers
from router.dashboard.board.hit_window import HitWindow
from router.dashboard.board.table import rank_row
from router.indexer.approximate import ApproximateLimits
from router.indexer.predictions import EstimateLimits
from router.protocol.events import Checkpoint, ClassBlocks, TierBlocks
from router.protocol.hybrid import HybridState, LayerClass, Layout
from router.protocol.replies import BlockSource, RemoteKvSource, TrustState
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import HeldState, Tier, pack_hashes
from router.protocol.workers import ClassView, LayoutView
from router.scheduler.terms import NEW_BLOCKS
from router.sequence.active.prompt import prepare
from router.sequence.hashing._digest import digest
from router.sequence.rank_table import HYBRID, QUEUED_TOKENS
from support.values.builders import BLOCK_SIZE, World, rank

PROMPT = list(range(40))
BLOCKS = len(PROMPT) // BLOCK_SIZE
SHARED = {0: ["tcp://h:1"]}
P2P = [f"vllm-p2p://h{number}:5710" for number in range(4)]


@pytest.fixture
def world():
    world = World()
    for worker_id in (1, 2, 3):
        world.worker(worker_id, block_addresses=SHARED)
    return world


def cache(world, worker_id, blocks, tier=Tier.DEVICE):
    prompt = prepare(SelectRequest(token_ids=PROMPT), (), naming=world.core.naming)
    journal = world.journals[rank(worker_id)]
    hashes = prompt.hashed(journal.identity).sequence_hashes[:blocks]
    journal.stored(tier, hashes.tolist(), None)
    world.deliver(rank(worker_id))


def decided(world, now_s=0.0, *, of=1, **fields):
    allowed = None if of is None else [of]
    request = SelectRequest(token_ids=PROMPT, allowed_worker_ids=allowed, request_id="x", **fields)
    placement = world.core.handle(Select(request, prepare(request, ())), now_s)[0]
    return explain(world.core, request, placement, now_s)


def test_source_is_a_rank_with_more_blocks_than_the_chosen_one(world):
    cache(world, 1, 2)
    cache(world, 2, 5)
    cache(world, 3, 7)
    decision = decided(world)
    assert (decision.worker_id, decision.overlap_blocks) == (1, 2)
    assert decision.source == BlockSource(3, 0, 7, "device")
    assert new_reply(decision).source == decision.source
    assert decided(world, of=3).source is None


def test_host_memory_may_be_the_source(world):
    cache(world, 2, 4)
    cache(world, 2, BLOCKS, Tier.HOST)
    cache(world, 3, 6)
    assert decided(world).source == BlockSource(2, 0, BLOCKS, "host_pinned")


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REMOTE])
def test_blocks_of_the_chosen_rank_need_no_source(world, tier):
    cache(world, 1, BLOCKS, tier)
    cache(world, 2, BLOCKS)
    assert decided(world).source is None


def test_disks_are_not_shared(world):
    cache(world, 2, BLOCKS, Tier.DISK)
    assert decided(world).source is None


def test_source_prefers_device_then_least_load(world):
    cache(world, 2, 6, Tier.HOST)
    cache(world, 3, 6)
    assert decided(world).source == BlockSource(3, 0, 6, "device")
    cache(world, 2, 6)
    assert decided(world).source.worker_id == 2
    busy = list(range(1000, 1400))
    world.book("busy", busy, allowed_worker_ids=[2])
    assert decided(world).source.worker_id == 3


def test_unschedulable_rank_may_be_the_source(world):
    cache(world, 2, 6)
    world.core.handle(OrderWorker(2, "draining"), 0.0)
    assert decided(world).source == BlockSource(2, 0, 6, "device")


def test_silent_and_removed_ranks_are_no_source(world):
    cache(world, 2, 6)
    now_s = 10.0
    for worker_id in (1, 3):
        world.report_load(rank(worker_id), now_s)
    assert decided(world, now_s).source is None
    world.report_load(rank(2), now_s)
    assert decided(world, now_s).source is not None
    world.core.handle(RemoveWorker(2, "left"), 0.0)
    assert decided(world, now_s).source is None


@pytest.mark.parametrize("keeps", [1, 2])
def test_source_requires_sharing_on_both_sides(keeps):
    world = World()
    for worker_id in (1, 2):
        world.worker(worker_id, block_addresses={} if worker_id == keeps else SHARED)
    cache(world, 2, 6)
    assert decided(world).source is None


def of_addresses(*addresses):
    """A world of workers 1, 2, … that share their blocks there; 2 holds seven, 3 holds six."""
    world = World()
    for worker_id, here in enumerate(addresses, 1):
        world.worker(worker_id, block_addresses={0: [*here]})
    cache(world, 2, 7)
    if len(addresses) > 2:
        cache(world, 3, 6)
    return world


def test_source_of_vllms_own_tier_names_its_side_channel():
    decision = decided(of_addresses([P2P[1]], [P2P[2]]))
    remote = RemoteKvSource("h2", 5710)
    assert decision.source == BlockSource(2, 0, 7, "device", remote)
    assert new_reply(decision).source == decision.source


@pytest.mark.parametrize(
    ("reads", "offers"),
    [
        (["tcp://a:1"], [P2P[2]]),
        ([P2P[1]], ["tcp://a:1"]),
        ([P2P[1]], ["unix:///run/kv"]),
        ([P2P[1]], [P2P[1]]),
        ([P2P[1]], ["vllm-p2p://h2"]),
        ([P2P[1]], ["vllm-p2p://h2:65536"]),
        (["vllm-p2p://h1"], [P2P[2]]),
        (["other://a:1"], ["other://b:1"]),
        ([P2P[1]], []),
    ],
)
def test_no_source_is_named_that_the_chosen_rank_cannot_read(reads, offers):
    assert decided(of_addresses(reads, offers)).source is None


def test_in_a_mixed_fleet_the_source_speaks_the_chosen_ranks_protocol():
    of_vllm = BlockSource(3, 0, 6, "device", RemoteKvSource("h3", 5710))
    assert decided(of_addresses([P2P[1]], ["tcp://b:1"], [P2P[3]])).source == of_vllm
    ours = BlockSource(3, 0, 6, "device")
    assert decided(of_addresses(["unix:///a"], [P2P[2]], ["tcp://c:1"])).source == ours


def test_a_rank_with_both_protocols_reads_either():
    both = ["tcp://a:1", P2P[1]]
    assert decided(of_addresses(both, [P2P[2]])).source.remote_kv_source.remote_host == "h2"
    assert decided(of_addresses(both, ["tcp://b:1"])).source == BlockSource(2, 0, 7, "device")
    assert decided(of_addresses(both, ["tcp://b:1", P2P[2]])).source.remote_kv_source is None


def test_estimated_blocks_may_be_the_source():
    world = World(estimates=EstimateLimits(ApproximateLimits()))
    for worker_id in (1, 2):
        world.worker(worker_id, block_addresses=SHARED)
    world.book("x", PROMPT, allowed_worker_ids=[2])
    assert decided(world).source == BlockSource(2, 0, BLOCKS, "device")


def cache_hybrid(world, worker_id, blocks, held):
    """Let a rank hold leading blocks of full attention, and some of a window of two blocks."""
    journal = world.journals[rank(worker_id)]
    prompt = prepare(SelectRequest(token_ids=PROMPT), (), naming=world.core.naming)
    hashes = prompt.hashed(journal.identity).sequence_hashes
    full, of_window = hashes[:blocks], hashes[held]
    window = LayerClass("window", BLOCK_SIZE, 2 * BLOCK_SIZE + 1)
    layout = Layout(BLOCK_SIZE, BLOCK_SIZE, (window,))
    checkpoint = Checkpoint(
        worker_id,
        0,
        journal.incarnation,
        journal.identity,
        journal.last_event_id + 1,
        0,
        1,
        (TierBlocks(Tier.DEVICE, pack_hashes(full)),),
        HeldState(counts=(len(full), 0, 0, 0), digests=(digest(full), 0, 0, 0)),
        HybridState(layout, (len(of_window),), (digest(of_window),)),
        (ClassBlocks(0, pack_hashes(of_window)),),
    )
    world.core.handle(Apply(checkpoint), 0.0)


def test_decision_counts_what_hybrid_ranks_can_resume(world):
    cache_hybrid(world, 1, 9, slice(2, 4))
    cache_hybrid(world, 2, 8, slice(5, 7))
    cache(world, 3, 6)
    decision = decided(world, of=None, explain=True)
    assert (decision.worker_id, decision.overlap_blocks) == (2, 7)
    assert decision.predicted_cached_blocks == 7
    assert decision.overlap.longest_matched == 7 * BLOCK_SIZE
    assert [each.device_blocks for each in decision.candidates] == [4, 7, 6]
    assert [each.resumption for each in decision.candidates] == [
        "full attention 36 tokens, resumable 16: the last checkpoint of its window",
        "full attention 32 tokens, resumable 28: the last checkpoint of its window",
        None,
    ]
    assert all(each.trust.state is not TrustState.DEGRADED for each in decision.candidates)


def test_bookings_expect_what_can_be_resumed(world):
    cache_hybrid(world, 1, 9, slice(2, 4))
    world.book("x", PROMPT, allowed_worker_ids=[1])
    load = world.core.tracker.active(rank(1))
    assert load.active_prefill_tokens == len(PROMPT) - 4 * BLOCK_SIZE
    request = ReserveRequest(worker_id=1, dp_rank=0, token_ids=PROMPT, request_id="y")
    world.core.handle(Reserve(request, prepare(request, ())), 0.0)
    load = world.core.tracker.active(rank(1))
    assert load.active_prefill_tokens == 2 * (len(PROMPT) - 4 * BLOCK_SIZE)


def new_blocks(world, worker_id, prompt):
    request = SelectRequest(token_ids=prompt, allowed_worker_ids=[worker_id])
    placement = world.core.handle(Select(request, prepare(request, ())), 0.0)[0]
    return placement.choice.table.column(NEW_BLOCKS).tolist()


def test_a_prompt_in_flight_on_a_hybrid_rank_promises_its_end_alone(world):
    """Its engine leaves a checkpoint there; full attention and the index have four blocks."""
    cache_hybrid(world, 1, 9, slice(2, 4))
    cache(world, 2, 4)
    for worker_id in (1, 2):
        for request_id in ("x", "y"):
            world.book(f"{request_id}{worker_id}", PROMPT, allowed_worker_ids=[worker_id])
    left_tokens = len(PROMPT) - 4 * BLOCK_SIZE + BLOCK_SIZE
    queued = [world.core.ranks.row(rank(each))[QUEUED_TOKENS] for each in (1, 2)]
    assert queued == [left_tokens, left_tokens]
    other_end = [*PROMPT[:-BLOCK_SIZE], *[99] * BLOCK_SIZE]
    assert [new_blocks(world, each, PROMPT) for each in (1, 2)] == [[0], [0]]
    assert [new_blocks(world, each, other_end) for each in (1, 2)] == [[BLOCKS - 4], [1]]


def test_a_prompt_on_a_hybrid_rank_goes_on_where_a_shorter_one_in_flight_ends(world):
    cache_hybrid(world, 1, 9, slice(2, 4))
    world.book("x", PROMPT[: 8 * BLOCK_SIZE], allowed_worker_ids=[1])
    world.book("z", [*PROMPT[: 9 * BLOCK_SIZE], *[99] * BLOCK_SIZE], allowed_worker_ids=[1])
    assert new_blocks(world, 1, PROMPT) == [BLOCKS - 8]


def test_a_rank_is_hybrid_from_its_first_batch_on(world):
    journal = world.journals[rank(1)]
    journal.set_layout(Layout(BLOCK_SIZE, BLOCK_SIZE, (LayerClass("state", BLOCK_SIZE),)))
    world.deliver(rank(1))
    assert world.core.ranks.row(rank(1))[HYBRID] == 1.0
    assert world.core.ranks.row(rank(2))[HYBRID] == 0.0


def test_layout_and_classes_of_a_hybrid_rank_are_shown(world):
    cache_hybrid(world, 1, 9, slice(2, 4))
    shown = {each.worker_id: each.ranks[0].layout for each in workers(world.core, 0.0)}
    window = ClassView("window", BLOCK_SIZE, 2 * BLOCK_SIZE + 1, is_eagle=False, blocks=2)
    assert shown[1] == LayoutView(BLOCK_SIZE, BLOCK_SIZE, False, "", [window])
    assert shown[2] is None
    worker = world.core.fleet.get(1)
    row = rank_row(world.core, worker, rank(1), HitWindow(0.0), 0.0)
    assert row.classes == "resumed at every 4 tokens; window of 9: 2"


def test_overlap_scores_show_full_attention_and_what_can_be_resumed(world):
    cache_hybrid(world, 1, 9, slice(2, 4))
    cache(world, 3, 6)
    request = SelectRequest(token_ids=PROMPT)
    reply = overlap_scores(world.core, request, prepare(request, ()), 0.0)
    shown = [
        (each.device_blocks, each.predicted_cached_blocks, each.resumable_tokens)
        for each in reply.workers
    ]
    assert shown == [(9, 4, 16), (0, 0, None), (6, 6, None)]
