"""A vLLM engine with the connector in this process, stepped by hand, whose every part can be seen.

Runs under vLLM's own Python (see `vllm_runs.py`): vLLM is imported where it is used.
"""

import os
from hashlib import blake2b
from pathlib import Path

from router.protocol.values import Tier

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
BLOCK_SIZE = 32


def transfer_config(extra):
    """As `--kv-transfer-config` has it."""
    return {
        "kv_connector": "KvRouterConnector",
        "kv_connector_module_path": "worker_agent.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"onboard_always": True, **extra},
    }


class SteppedEngine:
    """`extra`: None for an engine without the connector."""

    def __init__(self, model: Path, extra, num_blocks=80, max_model_len=2048, **options):
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        transfer = {} if extra is None else {"kv_transfer_config": transfer_config(extra)}
        weights = "auto" if any(model.glob("*.safetensors")) else "dummy"
        self._llm = LLM(
            model=str(model),
            load_format=weights,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=True,
            disable_log_stats=False,
            **transfer,
            **options,
        )
        self.core = self._llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.outputs, self.cached_tokens = {}, {}
        self.preemptions = 0
        self._keys = 0
        if extra is None:
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.leader_side = self.scheduler.connector.scheduler_side
        self.worker_side = get_kv_transfer_group().worker_side
        self.worker = self.worker_side.worker
        self.manager = self.worker_side.manager

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────

    def add(self, tokens, max_tokens=8, key=None, **sampling):
        from vllm import SamplingParams, TokensPrompt

        self._keys += 1
        key = key or f"request-{self._keys}"
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        self._llm.llm_engine.add_request(key, prompt, SamplingParams(**options))
        return key

    def abort(self, key):
        self._llm.llm_engine.abort_request([key])

    def step(self):
        for output in self._llm.llm_engine.step():
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
            self.cached_tokens[output.request_id] = output.num_cached_tokens
        running = [*self.scheduler.requests.values()]
        self.preemptions = max(self.preemptions, sum(each.num_preemptions for each in running))

    def settle(self, max_steps=20_000):
        """Until every request is done, and every block is where it is to go."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"requests are left: {[*self.scheduler.requests]}")

    def ask(self, tokens, max_tokens=8):
        """What it answers, and how much of the prompt it did not compute."""
        key = self.add(tokens, max_tokens)
        self.settle()
        return self.outputs.pop(key), self.cached_tokens.pop(key)

    # ── Blocks ───────────────────────────────────────────────────────────────────────────────────

    def evict(self):
        """The engine's own memory holds nothing any more."""
        self.settle()
        assert self._llm.reset_prefix_cache(), "blocks are in use"

    def empty(self, *tiers):
        """These tiers hold nothing any more."""
        for tier in tiers:
            self.manager.stack.call(tier, lambda store: store.clear()).result(60)
        self.settle()
        self.poll()

    def poll(self):
        """A step that computes nothing: the leader gets what changed."""
        key = self.add([3] * 20, 1)
        self.settle()
        self.outputs.pop(key)

    def contents(self, tier=Tier.HOST):
        """{identity: digest of its bytes} of all blocks in a tier."""
        import torch

        identities = [each for each in self._named() if self._holds(each, tier)]
        rows = torch.empty((len(identities), self.manager.block_bytes), dtype=torch.uint8)

        def load(store):
            return [
                store.load([identity], rows[place : place + 1])
                for place, identity in enumerate(identities)
            ]

        outcomes = self.manager.stack.call(tier, load).result(60)
        assert all(str(outcome) == "done" for [outcome] in outcomes), outcomes
        digests = [blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows]
        return {each.hex(): digest for each, digest in zip(identities, digests, strict=True)}

    def _named(self):
        [ranks] = self.leader_side.inventory._ranks
        return [*ranks._held]

    def _holds(self, identity, tier):
        [ranks] = self.leader_side.inventory._ranks
        return bool(ranks.tiers(identity) >> tier & 1)

    def held(self):
        """How many blocks each tier holds, as the leader knows it."""
        return {
            tier.name: sum(self._holds(each, tier) for each in self._named())
            for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)
        }

    def check(self):
        """Nothing is under way, and every block is back."""
        self.settle()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "of which one is vLLM's null"
        if self.scheduler.connector is None:
            return
        assert not len(self.leader_side.slots)
        assert not self.leader_side.leader.quarantined_blocks
        assert not self.leader_side._awaited | set(self.leader_side._prompts)
        assert not self.worker.under_way
        self.manager.stack.check_invariants()
        for level, blocks in self.manager.pools().items():
            blocks.check_invariants()
            assert not blocks.used_blocks, level

    def counts(self):
        """Of both halves."""
        from msgspec.structs import asdict

        leader, worker = self.leader_side.leader.counters, self.worker.counters
        return {**asdict(worker), **asdict(leader)}
