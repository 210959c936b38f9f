"""What the fields of bodies and answers mean: each word once, wherever it is used.

What a struct's docstring says of a field, in the sentences that name it, comes before what is said
of the word here.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, inspect

WORDS = {
    "active_decode_blocks": "blocks that booked requests hold there",
    "active_decode_blocks_threshold": "a rank with more of its blocks in use is busy, 0 to 1",
    "active_prefill_tokens": "tokens of booked prompts that are still to be computed there",
    "active_prefill_tokens_threshold": "a rank with more tokens to compute is busy",
    "active_prefill_tokens_threshold_frac": "the same, as a multiple of max_num_batched_tokens",
    "active_requests": "requests booked there",
    "additional_salt": "older name of cache_salt",
    "age_s": "how long ago, in seconds",
    "agreed": "decisions in which both chose the same rank",
    "allowed_worker_ids": "only these workers",
    "assume_kv_reuse": "whether requests share the blocks of their common prefix",
    "at_once": "steps are reported as they happen, not in intervals",
    "block_hash": "sequence hash of the block",
    "block_hashes": "local hashes of the prompt's full blocks, by which caches are searched",
    "block_mm_infos": "multimodal objects of each block, or null",
    "block_size": "tokens in a block",
    "blocks": "the blocks, or how many",
    "books": "whose bookings count as load",
    "busy": "ranks that get nothing more for now",
    "cache_salt": "part of every block's name: prompts under different salts share nothing",
    "cached_tokens": "tokens of the prompt that the engine had cached",
    "candidates": "every candidate's terms, cheapest first, if the request has explain",
    "code": "what is wrong, for programs",
    "compared": "decisions compared",
    "compared_for_s": "since when decisions are compared, in seconds",
    "count": "how many ranks",
    "cpu": "cached prefix on device or in host memory, in tokens",
    "data": "what happened",
    "data_parallel_size": "ranks of the worker",
    "data_parallel_start_rank": "number of its first rank",
    "decay_fraction": "weight of blocks that only this request holds, 0 to 1",
    "decision": "the answer, as the route of one item gives it",
    "decode_request_s": "seconds that each decoding request adds to a step",
    "device_blocks": "leading blocks of the prompt on the device",
    "differences": "the latest decisions in which the two differ",
    "disk": "cached prefix on device, in host memory or on disk, in tokens",
    "disk_blocks": "leading blocks of the prompt on device, in host memory or on disk",
    "disk_extension_blocks": "blocks that the disk adds to the prefix before it",
    "dp_rank": "the data-parallel rank of the worker",
    "effective_prefill_tokens": "tokens that the engine will have to compute",
    "enabled": "whether there is a shared cache",
    "endpoint": "URL where requests are sent",
    "endpoints": "where each rank publishes",
    "engine": "what is known of an engine that the router follows itself",
    "error": "what is wrong, in a sentence",
    "event": "what a rank stores",
    "event_id": "the last event of the rank that is in this",
    "events": "events that came, or that say what is held",
    "excluded_worker_ids": "none of these workers",
    "expected_output_tokens": "expected length of the answer, in tokens, if known",
    "explain": "whether the answer shows every candidate's terms",
    "explanation": "settings and removed ranks, if the request has explain",
    "filter": "name of the filter",
    "frequencies": "how often each leading block was asked for of late",
    "gpu": "cached prefix on the device, in tokens",
    "held_blocks": "blocks that the rank has cached",
    "holders": "ranks that hold the block",
    "host_pinned_blocks": "leading blocks of the prompt on device or in host memory",
    "host_pinned_extension_blocks": "blocks that host memory adds to the prefix before it",
    "incarnation": "which life of the process this is",
    "instance_id": "the worker",
    "instances": "cached prefix by worker",
    "is_eagle": "whether it speculates with EAGLE, and names blocks accordingly",
    "isl_tokens": "length of the prompt, in tokens",
    "kv_events_endpoint": "ZMQ socket where rank 0 publishes events",
    "kv_events_endpoints": "ZMQ sockets where ranks publish events, by rank",
    "kv_token_s": "seconds that each token in the cache of a decoding request adds to a step",
    "kv_transfer_domain": "taint of those near enough to get a prompt's blocks from it",
    "kv_transfer_enforcement": "whether decoding has to be that near, or only should",
    "kv_transfer_preferred_weight": "how much it should",
    "kv_used_blocks": "blocks that its engine has in use",
    "last_heard_s": "time since the last sign of life, in seconds",
    "lifecycle": "schedulable, cordoned (nothing new), draining, or why not",
    "listeners": "sockets that are read, by rank",
    "load_endpoints": "ZMQ sockets where ranks publish their load, by rank",
    "loads": "load of each rank",
    "longest_matched": "cached prefix in the tier that has most, in tokens",
    "lora_name": "adapter that the prompt is for; part of every block's name",
    "lora_names": "adapters that it can serve; null: any",
    "max_gpu_lora_count": "adapters that it has on the device at once",
    "max_num_batched_tokens": "tokens that its engine computes in a step, at most",
    "mm_extra_info": "null: the index keeps none",
    "mm_hash": "hash of the object",
    "mm_objects": "objects that touch the block",
    "model": "name of the model",
    "model_name": "the model; ranks of one model and one routing group are chosen among",
    "name": "what the process calls itself",
    "not_schedulable_reasons": "why nothing is sent to it; empty where it is",
    "num_blocks": "full blocks of the prompt",
    "offsets": "where the object lies in the prompt; carried, not hashed",
    "ours": "what this router would have chosen",
    "overlap": "cached prefix by tier, in tokens",
    "overlap_blocks": "leading blocks of the prompt that the rank holds on its device",
    "parent_hash": "sequence hash of the block before the first one; null: none",
    "pending_count": "requests that wait in the router's queue",
    "pending_isl_tokens": "tokens of their prompts",
    "phase": "which part of the work is placed: aggregated (all), prefill or decode",
    "pinned_worker": "this worker, or this rank of it, and no other",
    "policy": "by which policy it is, or was, chosen",
    "potential_decode_blocks": "blocks in use there, were the request there",
    "potential_prefill_tokens": "tokens to compute there, were the request there",
    "predicted": "what a placement there is predicted to take",
    "predicted_cached_blocks": "blocks the engine reuses from any tier, short of a token at least",
    "predicted_cached_tokens": "the same in tokens, summed",
    "preferred_taints": "taints that a worker should have, by weight; below 0 it should not",
    "prefill_token_capacity": "tokens that its engine computes in a step, at most",
    "projected_prefill_tokens": "tokens to compute where they were sent, summed",
    "prompt_token_context_s": "seconds for a prompt token and a token before it",
    "prompt_token_s": "seconds for a prompt token",
    "prompt_tokens": "length of the prompt, in tokens",
    "ranges": "null: a shared cache is not asked",
    "ranks": "the ranks",
    "rates": "what was learned of its engine",
    "ready": "whether requests may come",
    "reason": "why, in words",
    "refused": "the refusal, as the route of one item gives it",
    "remote": "cached prefix in any tier, in tokens",
    "remote_blocks": "leading blocks of the prompt in any tier",
    "removed": "ranks that were no candidates, by filter",
    "replay": "whether missed events can be asked for again",
    "replay_endpoint": "ZMQ socket where missed events of rank 0 are asked for",
    "replay_endpoints": "ZMQ sockets where missed events are asked for, by rank",
    "report_mode": "how its load is known",
    "reported": "what its engine reported last",
    "request_id": "id of the request, and of its booking",
    "requests": "items, each as POST /select takes it",
    "required_taints": "taints that a worker must have",
    "residency_domain": "whose cache it is",
    "results": "how each item went, in order",
    "role": "aggregated, prefill or decode",
    "router_config_override": "settings of this request alone",
    "router_id": "the router",
    "router_temperature": "above 0 the rank is drawn, the cheaper the likelier",
    "routing_constraints": "taints that workers must or should have",
    "routing_group": "the group; ranks of one model and one routing group are chosen among",
    "running_requests": "requests that its engine works on",
    "schedulable_workers": "workers that requests may be sent to",
    "scopes": "the same by model and routing group",
    "selection_id": "id of the selection, and of its booking",
    "sequence_hash": "name of a block in its context",
    "settings": "settings of the policy, the request's own among them",
    "shared_beyond_device_blocks": "blocks in a shared cache behind those on the device",
    "shared_cache": "what a cache shared by all would add",
    "shared_cache_multiplier": "what a block in a shared cache counts for",
    "source": "where it comes from",
    "stable_routing_id": "null: worker ids are stable",
    "start_position": "which block of its path the first one is; null: not known",
    "state": "exact, lagging, degraded or blind",
    "status": "ok, or as a status of HTTP",
    "step": "prefill_complete, output_block or free",
    "step_s": "seconds of a step",
    "steps": "what became of reservations, in order",
    "storage_tier": "device, host_pinned, disk or external",
    "stored": "blocks that are held, in order of their path",
    "taints": "labels that requests may want or avoid",
    "theirs": "what the other router chose",
    "thresholds": "by model",
    "tiers": "blocks by tier",
    "time_to_first_token_s": "seconds from now to the first token",
    "token_ids": "the prompt's tokens",
    "tokens_hash": "null: the index keeps no local hashes",
    "topic": "ZMQ topic of its events",
    "topology_domains": "where it is, by kind of place",
    "total_hit_blocks": "blocks that a shared cache has",
    "total_kv_blocks": "blocks that a rank of it has room for; null or 0: not known",
    "track_prefill_tokens": "whether the prompt counts as work where it is booked",
    "trust": "how far the index of the rank can be trusted",
    "trust_weight": "what a block of overlap counts for, by the trust in it",
    "url": "of another indexer",
    "usage": "the engine's usage report for the prompt",
    "value": "the setting's value",
    "waiting_requests": "requests that wait in its engine",
    "waiting_uncached_tokens": "tokens of those that are not cached",
    "worker_id": "the worker",
    "workers": "each rank, or each worker",
}
"""In order of the alphabet. Units end names: `_s` are seconds."""

_SENTENCE = re.compile(r"(?<=[.?:])\s+(?=[A-Z`])|\n\s*\n")


def describe(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Say in the schemas of these types' structs what each field means."""
    for name, struct in structs_in(types).items():
        properties = components.get(name, {}).get("properties", {})
        for field in struct.__struct_fields__:
            wire = struct.__struct_encode_fields__[struct.__struct_fields__.index(field)]
            text = meaning(struct, field)
            if wire in properties and text:
                properties[wire].setdefault("description", text)


def meaning(struct: type[Struct], field: str) -> str:
    """What a field of a struct means; empty where nobody says."""
    for kind in struct.__mro__:
        if issubclass(kind, Struct) and f"`{field}`" in (kind.__doc__ or ""):
            sentences = _SENTENCE.split(kind.__doc__ or "")
            said = [each for each in sentences if f"`{field}`" in each]
            return " ".join(" ".join(said).split())
    return WORDS.get(field, "")


def structs_in(types: Iterable[Any]) -> Mapping[str, type[Struct]]:
    """Every struct that values of these types may have in them, by name."""
    found: dict[str, type[Struct]] = {}
    for each in inspect.multi_type_info(types):
        _collect(each, found)
    return found


def _collect(kind: Any, found: dict[str, type[Struct]]) -> None:
    if isinstance(kind, inspect.StructType):
        if kind.cls.__name__ in found:
            return
        found[kind.cls.__name__] = kind.cls
        for field in kind.fields:
            _collect(field.type, found)
    for name in ("types", "item_types"):
        for each in getattr(kind, name, ()):
            _collect(each, found)
    for name in ("item_type", "key_type", "value_type", "type"):
        each = getattr(kind, name, None)
        if isinstance(each, inspect.Type):
            _collect(each, found)
