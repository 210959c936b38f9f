"""What bodies look like: `/docs` shows these, and a test asks them."""

from types import MappingProxyType
from typing import Any

_PROMPT = {"token_ids": list(range(32)), "model_name": "default"}
_STEPS = [
    {"request_id": "r1", "step": "prefill_complete"},
    {"request_id": "r1", "step": "output_block"},
    {"request_id": "r1", "step": "free", "usage": {"prompt_tokens": 32, "cached_tokens": 16}},
]

EXAMPLES: MappingProxyType[str, Any] = MappingProxyType(
    {
        "select": {**_PROMPT, "session_id": "conversation 7", "explain": True},
        "select_and_reserve": {**_PROMPT, "request_id": "r1", "expected_output_tokens": 200},
        "reserve": {**_PROMPT, "request_id": "r2", "worker_id": 1, "dp_rank": 0},
        "prefill_complete": {"usage": {"prompt_tokens": 32, "cached_tokens": 16}},
        "output_block": {"decay_fraction": 0.9},
        "free": {"usage": {"prompt_tokens": 32, "cached_tokens": 16}},
        "select_batch": {"requests": [_PROMPT, {**_PROMPT, "cache_salt": "acme"}]},
        "reservation_batch": {"steps": _STEPS},
        "register_worker": {
            "worker_id": 7,
            "endpoint": "http://10.0.0.7:8000",
            "block_size": 16,
            "kv_events_endpoints": {"0": "tcp://10.0.0.7:5557"},
            "replay_endpoints": {"0": "tcp://10.0.0.7:5558"},
        },
        "patch_worker": {"lifecycle": "schedulable"},
        "change_replica_peers": {"endpoint": "tcp://10.0.0.8:9000"},
        "change_busy_thresholds": {"model": "default", "active_decode_blocks_threshold": 0.9},
        "potential_loads": _PROMPT,
        "overlap_scores": _PROMPT,
        "query": _PROMPT,
        "query_by_hash": {"block_hashes": [-4611686018427387904, 7], "model_name": "default"},
        "register": {"instance_id": 1, "endpoint": "nats", "model_name": "m", "block_size": 16},
        "unregister": {"instance_id": 1, "model_name": "m"},
        "register_peer": {"url": "http://10.0.0.9:8090"},
        "deregister_peer": {"url": "http://10.0.0.9:8090"},
    }
)
"""By the name of the handler."""
