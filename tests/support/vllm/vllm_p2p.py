"""The tiers of one vLLM without its engine: its own manager of host memory with its own P2P tier,
on the scheduler's side, where nothing needs a GPU. Run under vLLM's Python:

    python vllm_p2p.py hold PORT          keeps blocks, and gives them, until its input ends
    python vllm_p2p.py read PORT PARAMS   looks blocks up for a request with these
                                          `kv_transfer_params`; the answer is JSON
"""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.p2p.manager import P2PSourceInfo
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BLOCK_BYTES, BLOCK_TOKENS = 8192, 16
HELD, UNKNOWN = 6, 2
WITHIN_S = 60.0
STEP_S = 0.01


def key_of(number):
    """The name of a block: vLLM's, of 32 bytes and the group."""
    return make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0)


def content(number):
    """The bytes of a block."""
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


class Tiers:
    """vLLM's own manager; `step` is a step of its scheduler."""

    def __init__(self, port):
        self.name = f"test-p2p-{port}"
        tier = {"type": "p2p", "host": "127.0.0.1", "port": port, "num_threads": 1}
        extra = {"cpu_bytes_to_use": 16 * BLOCK_BYTES, "secondary_tiers": [tier]}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("layer",), 0),),
            worker_kv_bytes_per_block=BLOCK_BYTES,
            enable_kv_cache_events=True,
            extra_config=extra,
            engine_id=self.name,
            model=OffloadingModelConfig("tiny", "bfloat16"),
            cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        view = self.manager.primary_tier.get_kv_memoryview()
        self.memory = np.asarray(view).view(np.uint8).reshape(view.shape[0], -1)

    def step(self, *new):
        self.manager.on_schedule_end(ScheduleEndContext(list(new), []))
        time.sleep(STEP_S)

    def store(self, count):
        request = ReqContext("stored")
        self.manager.on_new_request(request)
        keys = [key_of(number) for number in range(count)]
        stored = self.manager.prepare_store(keys, request)
        for number, chunk in enumerate(stored.store_spec.chunk_ids):
            self.memory[chunk] = content(number)
        self.manager.complete_store(keys, request)
        self.manager.on_request_finished(request)

    def read(self, params, count):
        """Return which of the first blocks are found, and whether each has its bytes."""
        request = ReqContext("read", kv_transfer_params=params)
        self.manager.on_new_request(request)
        source = request.get_state(P2PSourceInfo)
        results, end_s = {}, time.monotonic() + WITHIN_S
        while len(results) < count and time.monotonic() < end_s:
            for number in {*range(count)} - results.keys():
                found = self.manager.lookup(key_of(number), request)
                if found in (LookupResult.HIT, LookupResult.MISS):
                    results[number] = found is LookupResult.HIT
            self.step("read")
        hits = [number for number, is_hit in sorted(results.items()) if is_hit]
        chunks = self.manager.prepare_load([*map(key_of, hits)], request).chunk_ids if hits else []
        same = [
            bool(np.array_equal(self.memory[chunk], content(number)))
            for number, chunk in zip(hits, chunks, strict=True)
        ]
        self.manager.on_request_finished(request)
        self.step()
        assert source is not None
        return {
            "peer": source.peer_id,
            "id": source.kv_request_id,
            "probes": source.do_probe,
            "results": len(results),
            "hits": hits,
            "same": same,
        }

    def end(self):
        """End the process; vLLM 0.32's own shutdown may wait forever for a peer."""
        Path(f"/dev/shm/vllm_offload_{self.name}.mmap").unlink(missing_ok=True)
        os._exit(0)


def hold(port):
    tiers, is_over = Tiers(port), threading.Event()
    tiers.store(HELD)

    def until_closed():
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=until_closed, daemon=True).start()
    print("holds", flush=True)  # noqa: T201 the test waits for it
    while not is_over.is_set():
        tiers.step()
    tiers.end()


def read(port, params):
    tiers = Tiers(port)
    print(json.dumps(tiers.read(params, HELD + UNKNOWN)), flush=True)  # noqa: T201 it is what the test reads
    tiers.end()


if __name__ == "__main__":
    run, port, *rest = sys.argv[1:]
    if run == "hold":
        hold(int(port))
    else:
        read(int(port), json.loads(rest[0]))
