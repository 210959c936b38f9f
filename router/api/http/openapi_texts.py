"""Descriptions of the fields of bodies and responses, one per field name.

The sentences of a struct's docstring that name a field take precedence over the description here.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, inspect

WORDS = {
    "active_decode_blocks": "blocks held by booked requests on the rank",
    "active_decode_blocks_threshold": "a rank with more of its blocks in use is busy, 0 to 1",
    "active_prefill_tokens": "tokens of booked prompts still to be computed on the rank",
    "active_prefill_tokens_threshold": "a rank with more tokens to compute is busy",
    "active_prefill_tokens_threshold_frac": "the same, as a multiple of max_num_batched_tokens",
    "active_requests": "requests booked on the rank",
    "additional_salt": "older name of cache_salt",
    "address": "URL of the router",
    "age_s": "age, in seconds",
    "agreed": "decisions in which both chose the same rank",
    "alignment_tokens": "prompts are resumed at multiples of it",
    "allowed_worker_ids": "only these workers",
    "assume_kv_reuse": "whether requests share the blocks of their common prefix",
    "at_once": "steps are reported as they happen, not in intervals",
    "block_addresses": "places where ranks give blocks to other workers, by rank: tcp://host:port, "
    "unix:///path, or vllm-p2p://host:port of vLLM's own P2P tier",
    "block_hash": "sequence hash of the block",
    "block_hashes": "local hashes of the prompt's full blocks, the keys of the index",
    "block_mm_infos": "multimodal objects of each block, or null",
    "block_size": "tokens in a block",
    "block_tokens": "tokens in a block of these layers",
    "blocks": "the blocks, or their number",
    "booked_s": "predicted seconds of all booked work",
    "books": "the bookings that count as load",
    "busy": "ranks that receive no further requests for now",
    "cache_salt": "part of every block hash: prompts with different salts share no blocks",
    "cached_tokens": "tokens of the prompt that the engine had cached",
    "caches_prefixes": "false: its engine reuses no blocks",
    "candidates": "every candidate's terms, cheapest first, if the request sets explain",
    "classes": "the layers beside full attention, by kind and shape",
    "code": "error code, for programs",
    "compared": "decisions compared",
    "compared_for_s": "time since comparison began, in seconds",
    "confidence": "measured, learning or unknown",
    "count": "number of ranks",
    "cpu": "cached prefix on device or in host memory, in tokens",
    "data": "content of the event",
    "data_parallel_size": "ranks of the worker",
    "data_parallel_start_rank": "number of its first rank",
    "decay_fraction": "weight of blocks that only this request holds, 0 to 1",
    "decision": "the response, as from the route of a single item",
    "decode_request_s": "seconds that each decoding request adds to a step",
    "device_blocks": "leading blocks of the prompt on the device",
    "differences": "the latest decisions in which the two differ",
    "disk": "cached prefix on device, in host memory or on disk, in tokens",
    "disk_blocks": "leading blocks of the prompt on device, in host memory or on disk",
    "disk_extension_blocks": "blocks that the disk adds to the prefix before it",
    "dp_rank": "the data-parallel rank of the worker",
    "effective_prefill_tokens": "tokens that the engine has to compute",
    "enabled": "whether there is a shared cache",
    "endpoint": "URL where requests are sent",
    "endpoints": "where each rank publishes",
    "engine": "state of an engine that the router subscribes to",
    "error": "error message",
    "event": "a change of the blocks of a rank",
    "event_id": "the last event of the rank included here",
    "events": "received events, or events that describe the held blocks",
    "excluded_worker_ids": "none of these workers",
    "expected_output_tokens": "expected length of the response, in tokens, if known",
    "explain": "whether the response contains every candidate's terms",
    "explanation": "settings and removed ranks, if the request sets explain",
    "filter": "name of the filter",
    "frequencies": "recent number of requests for each leading block",
    "full_block_tokens": "tokens in a block of full attention, 0 without any",
    "gpu": "cached prefix on the device, in tokens",
    "headroom_requests_per_s": "the same, as requests of the recent mean size",
    "headroom_s_per_s": "supply that is not in demand, in seconds of a rank per second",
    "held_blocks": "blocks that the rank has cached",
    "holders": "ranks that hold the block",
    "host_pinned_blocks": "leading blocks of the prompt on device or in host memory",
    "host_pinned_extension_blocks": "blocks that host memory adds to the prefix before it",
    "hybrid": "layout of a hybrid model that no event contains; null: none was registered",
    "incarnation": "incarnation of the process, different after each start",
    "instance_id": "the worker",
    "instances": "cached prefix by worker",
    "is_adapter": "it names an adapter; otherwise it is an alias of the model",
    "is_eagle": "whether EAGLE changes its block hashes; of layers, whether it shortens hits",
    "is_full_eagle": "whether the last block of full attention is dropped from a hit",
    "is_schedulable": "whether the rank may get requests",
    "isl_tokens": "length of the prompt, in tokens",
    "kind": "window, state, chunk, or tail: places inside blocks",
    "kv_booked_blocks": "blocks of all booked requests, shared ones counted once",
    "kv_capacity_blocks": "blocks that fit into the ranks' caches",
    "kv_events_endpoint": "ZMQ socket where rank 0 publishes events",
    "kv_events_endpoints": "ZMQ sockets where ranks publish events, by rank",
    "kv_token_s": "seconds that each token in the cache of a decoding request adds to a step",
    "kv_transfer_domain": "taint of the workers near enough to receive a prompt's blocks from it",
    "kv_transfer_enforcement": "whether decoding in this domain is required or preferred",
    "kv_transfer_preferred_weight": "weight of that preference",
    "kv_used_blocks": "blocks that its engine has in use",
    "last_heard_s": "time since the last message, in seconds",
    "layout": "layers of a hybrid model as events describe them; null for others",
    "lifecycle": "schedulable, cordoned (no new requests), draining, or a reason",
    "listeners": "sockets that are read, by rank",
    "load_endpoints": "ZMQ sockets where ranks publish their load, by rank",
    "loads": "load of each rank",
    "longest_matched": "cached prefix in the tier that has most, in tokens",
    "lora_name": "adapter of the prompt; part of every block hash",
    "lora_names": "adapters that it can serve; null: any",
    "max_gpu_lora_count": "adapters that it has on the device at once",
    "max_model_len": "tokens of prompt and response together, at most",
    "max_num_batched_tokens": "tokens that its engine computes in a step at most",
    "mean_request": "the mean request of the window, null without any",
    "mm_extra_info": "null: the index does not store it",
    "mm_hash": "hash of the object",
    "mm_objects": "objects that touch the block",
    "model": "name of the model",
    "model_aliases": "further names of its model",
    "model_name": "name of the model; candidates are the ranks of one model and routing group",
    "name": "name of the process",
    "not_schedulable_reasons": "reasons why it receives no requests; empty if it does",
    "num_blocks": "full blocks of the prompt",
    "offsets": "position of the object in the prompt; not hashed",
    "ours": "this router's choice",
    "overlap": "cached prefix by tier, in tokens",
    "overlap_blocks": "leading blocks of the prompt that the rank holds on its device",
    "parent_hash": "sequence hash of the block before the first one; null: none",
    "pending_count": "requests in the router's queue",
    "pending_isl_tokens": "tokens of their prompts",
    "phase": "the part of the work to place: aggregated (all), prefill or decode",
    "pinned_worker": "this worker, or this rank of it, and no other",
    "policy": "policy of the selection",
    "potential_decode_blocks": "blocks in use on the rank if the request were placed there",
    "potential_prefill_tokens": "tokens to compute on the rank if the request were placed there",
    "predicted": "prediction for a placement on the rank",
    "predicted_cached_blocks": "blocks the engine reuses from any tier, at most all but one token",
    "predicted_cached_tokens": "the same in tokens, summed",
    "predicted_ttft_s": "predicted times to the first token, summed; 0 where a speed is unknown",
    "preferred_taints": "taints that a worker should have, by weight; a negative weight avoids",
    "prefill_token_capacity": "tokens that its engine computes in a step, at most",
    "problem": "what is wrong; empty or null: nothing",
    "projected_prefill_tokens": "tokens to compute on the selected ranks, summed",
    "prompt_token_context_s": "seconds per pair of a prompt token and a preceding token",
    "prompt_token_s": "seconds per prompt token",
    "prompt_tokens": "length of the prompt, in tokens",
    "ranges": "null: the shared cache is not queried",
    "ranks": "the ranks",
    "rates": "learned rates of its engine",
    "ready": "whether it accepts requests",
    "reason": "reason, in a sentence",
    "reasons": "why figures are null or uncertain",
    "refused": "the error response, as from the route of a single item",
    "remote": "cached prefix in any tier, in tokens",
    "remote_blocks": "leading blocks of the prompt in any tier",
    "remote_host": "host of the P2P tier's side channel",
    "remote_kv_source": "if both ranks share blocks by vLLM's own P2P tier: what the engine gets "
    "as kv_transfer_params.remote_kv_source, together with a kv_request_id of its own",
    "remote_port": "its port",
    "removed": "ranks that were no candidates, by filter",
    "replay": "whether missed events can be replayed",
    "replay_endpoint": "ZMQ socket to request missed events of rank 0",
    "replay_endpoints": "ZMQ sockets to request missed events, by rank",
    "report_mode": "whether its engine may report blocks again that it holds",
    "reported": "last report of its engine",
    "request_id": "id of the request, and of its booking",
    "requests": "items, each as in POST /select",
    "required_taints": "taints that a worker must have",
    "residency_domain": "owner of the cache",
    "results": "result of each item, in order",
    "role": "aggregated, prefill or decode",
    "router_config_override": "settings of this request alone",
    "router_id": "the router",
    "router_temperature": "above 0 the rank is sampled, cheaper ranks with higher probability",
    "routing_constraints": "taints that workers must or should have",
    "routing_group": "the routing group; candidates are the ranks of one model and routing group",
    "running_requests": "requests running in its engine",
    "schedulable_ranks": "ranks that may get requests",
    "schedulable_workers": "workers that accept requests",
    "scopes": "the same by model and routing group",
    "selection_id": "id of the selection, and of its booking",
    "sequence_hash": "hash of a block and all blocks before it",
    "settings": "settings of the policy, including those of the request",
    "shared_beyond_device_blocks": "blocks in a shared cache after those on the device",
    "shared_cache": "overlap that a shared cache would add",
    "shared_cache_multiplier": "weight of a block in a shared cache",
    "source": "origin of the information",
    "span_tokens": "tokens of a window or chunk, else 0",
    "stable_routing_id": "null: worker ids are stable",
    "start_position": "index of the first block in its sequence; null: unknown",
    "state": "exact, lagging, degraded, approximate, blind or unreachable",
    "status": "ok, or an HTTP status",
    "step": "prefill_complete, output_block or free",
    "step_s": "seconds of a step",
    "steps": "events of reservations, in order",
    "storage_tier": "device, host_pinned, disk or external",
    "stored": "blocks that are held, in sequence order",
    "taints": "labels that requests may require, prefer or avoid",
    "target_saturation": "saturation up to which workers are counted",
    "theirs": "the other router's choice",
    "thresholds": "by model",
    "tiers": "blocks by tier",
    "time_to_first_token_s": "seconds from now to the first token",
    "token_ids": "the prompt's tokens",
    "tokens_hash": "null: the index stores no local hashes",
    "topic": "ZMQ topic of its events",
    "topology_domains": "its location, by topology level",
    "total_hit_blocks": "blocks found in a shared cache",
    "total_kv_blocks": "blocks of capacity per rank; null or 0: unknown",
    "track_prefill_tokens": "whether the prompt counts as load of the booked rank",
    "trust": "trust in the index of the rank",
    "trust_weight": "weight of a block of overlap, by trust",
    "url": "URL of another indexer",
    "usage": "the engine's usage report for the prompt",
    "value": "the setting's value",
    "waiting_isl_tokens": "prompt tokens of the requests in the router's queue",
    "waiting_requests": "requests waiting in its engine",
    "waiting_uncached_tokens": "uncached tokens of the waiting requests",
    "window_s": "window of averages, in seconds",
    "worker_id": "the worker",
    "worker_ids": "the workers that serve it",
    "workers": "each rank, or each worker",
}
"""In alphabetical order. The suffix of a name is its unit: `_s` are seconds."""

_SENTENCE = re.compile(r"(?<=[.?:])\s+(?=[A-Z`])|\n\s*\n")


def describe(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Add a description to each field in the schemas of these types' structs."""
    for name, struct in structs_in(types).items():
        properties = components.get(name, {}).get("properties", {})
        for field in struct.__struct_fields__:
            wire = struct.__struct_encode_fields__[struct.__struct_fields__.index(field)]
            text = meaning(struct, field)
            if wire in properties and text:
                properties[wire].setdefault("description", text)


def meaning(struct: type[Struct], field: str) -> str:
    """Return the description of a struct's field, or an empty text."""
    for kind in struct.__mro__:
        if issubclass(kind, Struct) and f"`{field}`" in (kind.__doc__ or ""):
            sentences = _SENTENCE.split(kind.__doc__ or "")
            named = [each for each in sentences if f"`{field}`" in each]
            return " ".join(" ".join(named).split())
    return WORDS.get(field, "")


def structs_in(types: Iterable[Any]) -> Mapping[str, type[Struct]]:
    """Return every struct that values of these types may contain, by name."""
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
