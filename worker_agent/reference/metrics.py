"""Metrics of an agent with its own engine, and of the blocks that it exchanges."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from router.runtime.process.metrics import Rows, counter, expose, expose_each, gauge
from worker_agent.manager.control import TierControl
from worker_agent.operations.messages import LevelReport, StatusQuery
from worker_agent.operations.metrics import BLOCKSETS, IMPORTED_TEXT, expose_tiers
from worker_agent.process.http import BUS_METRICS, RANK_LABELS
from worker_agent.reference.runner import RankRunner
from worker_agent.reference.sharing import AgentSharing

_SHARING: Rows = {
    "pulled_blocks": counter("Blocks read from other workers", "pulled.blocks"),
    "pulled_bytes": counter("Bytes read from other workers", "pulled.bytes"),
    "pull_seconds": counter("Time spent reading from other workers", "pulled.seconds"),
    "pull_failures": counter(
        "Reads of expected blocks from other workers that failed", "pulled.failed"
    ),
    "given_blocks": counter("Blocks sent to other workers", "counters.sent_blocks"),
    "mapped_blocks": counter("Of those, read in place", "counters."),
    "nixl_given_blocks": counter("Of those, read from memory through NIXL", "counters.read_blocks"),
    "nixl_pulled_blocks": counter(
        "Blocks read from memory of other workers through NIXL", "nixl_counters.read_blocks"
    ),
    "nixl_failed_reads": counter(
        "Requests that NIXL could not read, and the socket did", "nixl_counters.failed_reads"
    ),
    "taken_blocks": counter("Blocks written by other workers", "counters.received_blocks"),
    "corrupt_blocks": counter("Blocks received damaged", "counters."),
    "refused": counter("Requests and connections of others that were refused", "counters."),
    "broken": counter("Connections of others that ended in the middle", "counters."),
    "not_accepted": counter("Connections that failed before they were served", "counters."),
    "connections": gauge("Other workers connected"),
    "strangers": gauge("Connections that have not proven yet to be another worker's"),
    "connections_max": gauge("Limit of connected workers", "max_connections"),
    "leases": gauge("Leases of blocks to other workers"),
    "leased_blocks": gauge("Blocks of those leases, together"),
    "leases_granted": counter("Leases granted", "lease_counters.granted"),
    "leases_refused": counter("Leases not granted beyond the limit", "lease_counters.refused"),
    "leases_ended": counter("Leases ended because their blocks were read", "lease_counters.ended"),
    "leases_expired": counter("Leases that expired", "lease_counters.expired"),
    "leased_gets": counter("Requests for leased blocks served", "counters."),
    "puts": counter("Requests to write leased blocks served", "counters."),
    "push_leases": gauge("Leases to other workers that push blocks", lambda s: s.pushes[0]),
    "push_leased_blocks": gauge("Blocks of those leases", lambda s: s.pushes[1]),
    "push_leases_abandoned": counter(
        "Leases of pushes that were given up or lost", "lease_counters.abandoned"
    ),
    "blocksets_imported": gauge(IMPORTED_TEXT, lambda s: len(s.imported)),
}
_PUSHES: Rows = {
    "pushes": counter("Prompts begun to be pushed to other workers", "counters.begun"),
    "pushes_failed": counter("Of those, not pushed as a whole", "counters.failed"),
    "pushed_blocks": counter("Blocks pushed, which other workers have named", "counters.blocks"),
}
_RECEIVER: Rows = {
    "push_leased_blocks_max": gauge("Limit of those blocks", "max_blocks"),
    "push_leased_blocks_peer_max": gauge("Limit of those blocks of one worker", "max_peer_blocks"),
    "push_leases_peer_max": gauge("Limit of leases of one worker that pushes", "max_pushes"),
    "pushes_refused": counter("Pushes of other workers that were refused", "counters.refused"),
    "pushes_cut": counter("Pushes with room for a part of their blocks only", "counters.cut"),
    "push_named_blocks": counter("Blocks of other workers' pushes named", "counters.named_blocks"),
}
_ENGINE: Rows = {
    "num_requests_running": gauge("Requests running", "gauges.running_requests"),
    "num_requests_waiting": gauge("Requests waiting", "gauges.waiting_requests"),
    "kv_cache_usage_perc": gauge(
        "Blocks in use; 1 is all",
        lambda runner: runner.gauges.kv_used_blocks / runner.constants.num_blocks,
    ),
    "prompt_tokens": counter("Prompt tokens computed", "counters.prefill_tokens"),
    "prefix_cache_hits": counter("Prompt tokens that were cached", "counters.cached_tokens"),
}
_AGENT: Rows = {"busy_seconds": counter("Time spent computing", "counters.busy_s"), **BUS_METRICS}


def agent_metrics(
    model_name: str,
    block_size: int,
    runners: Sequence[RankRunner],
    tiers: TierControl,
    sharing: AgentSharing | None = None,
) -> CollectorRegistry:
    """Return the metrics of all ranks, and the size of the cache."""
    registry = CollectorRegistry()
    ranks = [((model_name, runner.rank.dp_rank), runner) for runner in runners]
    expose_each(registry, "vllm:", _ENGINE, RANK_LABELS, lambda: ranks)
    expose_each(registry, "kv_agent_", _AGENT, RANK_LABELS, lambda: ranks)
    num_blocks = sum(runner.constants.num_blocks for runner in runners)  # vLLM reports the sum
    labels, size = ("block_size", "num_gpu_blocks"), (block_size, num_blocks)
    info = gauge("Size of all ranks' caches", lambda size: {size: 1}, *labels)
    expose(registry, "vllm:", {"cache_config_info": info}, size)

    def prompt_tokens() -> dict[int, int]:
        return {
            runner.rank.dp_rank: runner.counters.prefill_tokens + runner.counters.cached_tokens
            for runner in runners
        }

    def reports() -> Sequence[LevelReport]:
        return tiers.status(StatusQuery()).tiers

    expose_tiers(registry, model_name, block_size, reports, prompt_tokens)
    if sharing is not None:
        shared = [((model_name, rank.dp_rank), each) for rank, each in sharing.ranks.items()]
        expose_each(registry, "kv_agent_share_", _SHARING, RANK_LABELS, lambda: shared)
        pushes = [((model_name, rank.dp_rank), each) for rank, each in sharing.pushes.items()]
        expose_each(registry, "kv_agent_share_", _PUSHES, RANK_LABELS, lambda: pushes)
        receivers = [(labels, each.receiver) for labels, each in shared if each.receiver]
        expose_each(registry, "kv_agent_share_", _RECEIVER, RANK_LABELS, lambda: receivers)
        imports = [((model_name,), sharing.peers.imports)]
        expose_each(registry, "kv_agent_share_", BLOCKSETS, ("model_name",), lambda: imports)
    return registry
