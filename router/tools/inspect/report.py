"""Responses of a router, as tables."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import UnsetType

from router.protocol.dumps import TIER_NAMES, DumpedRank
from router.protocol.replies import OverlapScoresReply, RankOverlap, SplitChoice, SplitKey, Trust
from router.protocol.values import Tier
from router.protocol.workers import BlockHolder, BlockHolders, EngineView, RankView, WorkerView
from router.runtime.process.tables import TIER_WORDS, table


def workers_report(workers: Sequence[WorkerView]) -> str:
    """Return a table with a row per rank, and one for each worker without ranks."""
    if not workers:
        return "no workers"
    heads = ("worker", "dp", "name", "model", "group", "lifecycle")
    rows = [_rank_row(worker, rank) for worker in workers for rank in worker.ranks or (None,)]
    return table((*heads, *TIER_WORDS.values(), "running", "trust"), rows)


def worker_report(worker: WorkerView, ranks: Sequence[RankView]) -> str:
    """Return all details of some ranks of a worker."""
    blocks = [
        f"blocks of {_shown(worker.block_size)} tokens{', eagle' if worker.is_eagle else ''}",
        f"{_shown(worker.total_kv_blocks)} on each device",
    ]
    if worker.last_heard_s is not None:
        blocks.append(f"seen {worker.last_heard_s:.1f} s ago, incarnation {worker.incarnation}")
    lines = [
        f"{_named(worker)}: {worker.lifecycle}",
        *(f"not chosen: {reason}" for reason in worker.not_schedulable_reasons),
        f"serves {worker.model_name}, group {worker.routing_group}, at {_shown(worker.endpoint)}",
        "; ".join(blocks),
    ]
    return "\n\n".join(["\n  ".join(lines), *(_rank_report(worker, rank) for rank in ranks)])


def prompt_report(scores: OverlapScoresReply, isl_tokens: int) -> str:
    """Return the blocks of a prompt that each rank holds, the most first."""
    ranks = sorted(scores.workers, key=lambda rank: (-rank.remote_blocks, -rank.device_blocks))
    heads = ("worker", "dp", "blocks", *TIER_WORDS.values(), "predicted", "trust")
    rows = [_overlap_row(rank, isl_tokens) for rank in ranks]
    text = table((*heads, "where it breaks"), rows)
    split = "" if isinstance(scores.split, UnsetType) else f"{_split(scores.split)}\n"
    return (
        f"{split}{isl_tokens} tokens; leading blocks held, each tier with the faster ones before "
        f"it; predicted: blocks that the engine will reuse\n\n{text}"
    )


_SPLIT_BY: Mapping[SplitKey, str] = MappingProxyType(
    {
        "session": "its session",
        "prompt": "the beginning of the prompt",
        "worker": "the worker or selection that it names",
    }
)


def _split(choice: SplitChoice) -> str:
    """Return which group of a split a prompt goes to, and why."""
    skipped = f"; no worker for it: {', '.join(choice.skipped)}" if choice.skipped else ""
    return (
        f"requests of group {choice.asked_group} are split: this one goes to "
        f"{choice.routing_group}, whose share is {choice.share:.3g}, by "
        f"{_SPLIT_BY[choice.by]}{skipped}"
    )


def block_report(block: BlockHolders) -> str:
    """Return the ranks that hold a block."""
    head = f"block {block.sequence_hash} (0x{block.sequence_hash:016x})"
    if not block.holders:
        return f"{head}: no rank holds it"
    rows = [_holder_row(holder) for holder in block.holders]
    heads = ("worker", "dp", "model", "group", "fastest tier", "trust")
    return f"{head}\n\n{table(heads, rows)}"


def blocks_report(held: DumpedRank | None) -> str:
    """Return all blocks of a rank, each with its tiers."""
    if held is None:
        return "no blocks"
    tiers: dict[int, list[str]] = {}
    for tier, hashes in held.blocks.items():
        for sequence_hash in hashes.tolist():
            tiers.setdefault(sequence_hash, []).append(TIER_WORDS[TIER_NAMES[tier]])
    return "\n".join(f"{name:016x}  {' '.join(where)}" for name, where in sorted(tiers.items()))


def blocks_value(held: DumpedRank | None) -> dict[str, list[int]]:
    """Return the same for programs: hashes by tier."""
    blocks = {} if held is None else held.blocks
    return {TIER_NAMES[t]: sorted(blocks[t].tolist()) for t in Tier if t in blocks}


def _holder_row(holder: BlockHolder) -> tuple[object, ...]:
    scope = (holder.model_name, holder.routing_group)
    tier, trust = TIER_WORDS[holder.fastest_tier], _trust(holder.trust)
    return (holder.worker_id, holder.dp_rank, *scope, tier, trust)


def _trust(trust: Trust) -> str:
    age = "never confirmed" if trust.age_s is None else f"{trust.age_s:.1f} s old"
    reason = "" if trust.reason is None else trust.reason.removeprefix(f"{trust.state}: ")
    return f"{trust.state}{': ' if reason else ''}{reason} ({age})"


def _rank_row(worker: WorkerView, rank: RankView | None) -> tuple[object, ...]:
    who = (worker.name, worker.model_name, worker.routing_group, worker.lifecycle)
    if rank is None:
        why = "; ".join(worker.not_schedulable_reasons)
        return (worker.worker_id, "-", *who, *("-" for _ in TIER_WORDS), "-", why)
    running = "-" if rank.reported is None else rank.reported.running_requests
    held = (rank.tiers[name].blocks for name in TIER_NAMES)
    reasons = [each for each in worker.not_schedulable_reasons if each != rank.trust.reason]
    why = f"; not chosen: {'; '.join(reasons)}" if reasons else ""
    return (worker.worker_id, rank.dp_rank, *who, *held, running, _trust(rank.trust) + why)


def _rank_report(worker: WorkerView, rank: RankView) -> str:
    tiers = ((word, rank.tiers[name]) for name, word in TIER_WORDS.items())
    held = [(word, tier.blocks, tier.holes, tier.digest) for word, tier in tiers]
    lines = [
        f"rank {rank.dp_rank}: {_trust(rank.trust)}, as of event {rank.trust.event_id}",
        *([] if rank.engine is None else [_engine(rank.engine)]),
        _reported(worker, rank),
        f"booked: {rank.active_requests} requests, {rank.active_prefill_tokens} tokens to "
        f"prefill, {rank.active_decode_blocks} blocks",
        *table(("tier", "blocks", "holes", "digest"), held).splitlines(),
    ]
    return "\n  ".join(lines)


def _engine(engine: EngineView) -> str:
    silent = "no message yet" if engine.silent_s is None else f"seen {engine.silent_s:.1f} s ago"
    replay = "no replay" if engine.replay is None else f"replay {engine.replay}"
    problem = "" if engine.problem is None else f"; {engine.problem}"
    return f"engine: {engine.condition}, {engine.events} ({replay}), {silent}{problem}"


def _reported(worker: WorkerView, rank: RankView) -> str:
    load = rank.reported
    if load is None:
        return "no load report"
    return (
        f"reported: {load.running_requests} running, {load.waiting_requests} waiting, "
        f"{load.kv_used_blocks} of {_shown(worker.total_kv_blocks)} blocks in use"
    )


def _named(worker: WorkerView) -> str:
    """Return the worker's name; registered workers have only their id."""
    by_id = f"worker {worker.worker_id}"
    return by_id if worker.name == by_id else f"{by_id} ({worker.name})"


def _shown(value: object) -> str:
    return "?" if value is None else str(value)


def _overlap_row(rank: RankOverlap, isl_tokens: int) -> tuple[object, ...]:
    held = (rank.device_blocks, rank.host_pinned_blocks, rank.disk_blocks, rank.remote_blocks)
    return (
        rank.worker_id,
        rank.dp_rank,
        f"{rank.num_blocks} x {rank.block_size}",
        *held,
        rank.predicted_cached_blocks,
        _trust(rank.trust),
        _break(rank, isl_tokens),
    )


def _break(rank: RankOverlap, isl_tokens: int) -> str:
    """Return the first block that is missing, with its tokens."""
    if not rank.num_blocks:
        return f"no full block in {isl_tokens} tokens"
    if rank.remote_blocks >= rank.num_blocks:
        return "holds every full block"
    first = rank.remote_blocks * rank.block_size
    return f"at block {rank.remote_blocks}: tokens {first} to {first + rank.block_size - 1}"
