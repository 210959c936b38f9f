"""A real vLLM with each connector, and what it keeps on disk."""

import os
import time
from pathlib import Path
from random import Random
from typing import Any

from timing import Bounded

from support.engines.tiny_llama import WORDS, LlamaSize
from support.processes.servers import eventually
from support.vllm.vllm_engines import BLOCK_SIZE, Completion, VllmEngine
from support.vllm.vllm_stepped import transfer_config

BLOCK_TOKENS = BLOCK_SIZE
SIZE = LlamaSize(layers=8, hidden=512, heads=16, kv_heads=8)
KV_BYTES_PER_TOKEN = SIZE.layers * 2 * SIZE.kv_heads * 32 * 2
STORED_S = 30.0
LOOKS, LOOK_S = 4, 0.25


class Count(Bounded, frozen=True):
    """A figure that may be 0 beside."""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.peer else 0.0


class Side:
    """An engine. `stored`: its metric of stored blocks. `store`: the folder of what it keeps."""

    def __init__(
        self, name: str, engine: VllmEngine, stored: str | None = None, store: Path | None = None
    ) -> None:
        self.name = name
        self.engine = engine
        self.stored = stored
        self.store = store

    @staticmethod
    def prompt(seed: int, tokens: int) -> list[int]:
        """The same for every side; no two begin alike."""
        return Random(seed).choices(WORDS, k=tokens)

    async def timed(self, prompt: list[int], max_tokens: int) -> tuple[float, Completion]:
        """Seconds until the whole answer, and the answer."""
        start_s = time.perf_counter()
        answer = await self.engine.complete(prompt, max_tokens)
        return time.perf_counter() - start_s, answer

    async def settle(self) -> None:
        """Wait until nothing more is stored, of sides that store after their answers."""
        if self.stored is None:
            return
        name, counts = self.stored, [-1.0] * LOOKS

        async def is_still() -> bool:
            counts.append(await self.engine.metric(name))
            return len(set(counts[-LOOKS:])) == 1

        await eventually(is_still, STORED_S, poll_s=LOOK_S)


def restored_tokens(prompt_tokens: int) -> int:
    """Tokens of a prompt that can be restored: whole blocks, but for its last token."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def sides(folder: Path) -> list[Side]:
    """All sides, none of which is started."""
    found = [
        Side("no connector", _engine(folder, "none", None)),
        ours(folder, "ours", {"host_cache_blocks": 2048}),
        ours(folder, "ours, by layer", {"host_cache_blocks": 2048, "layer_by_layer": True}),
        ours_on_disk(folder),
        example(folder),
        Side("OffloadingConnector", _engine(folder, "offloading", {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29, "block_size": 32},
        })),
        Side("SimpleCPUOffloadConnector", _engine(folder, "simple", {
            "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29},
        })),
    ]  # fmt: skip
    return found + ([lmcache(folder)] if "LMCACHE_PYTHON" in os.environ else [])


def ours(folder: Path, name: str, extra: dict[str, Any]) -> Side:
    """Our connector, with these tiers."""
    label = "".join(each for each in name if each.isalpha())
    return Side(
        name,
        _engine(folder, label, transfer_config({"offload_bytes_per_s": 1e11, **extra})),
        "vllm:kv_router_stored_blocks_total",
    )


def ours_on_disk(folder: Path, blocks: int = 2048) -> Side:
    """Our connector, with a file."""
    store = folder / "ours-on-disk"
    store.mkdir(exist_ok=True)
    side = ours(
        folder, "ours, on disk", {"disk_cache_blocks": blocks, "disk_cache_dir": f"{store}"}
    )
    side.store = store
    return side


def example(folder: Path) -> Side:
    """The connector of vLLM that starts on the CPU: a folder of files for each prompt."""
    store = folder / "example"
    store.mkdir(exist_ok=True)
    transfer = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": f"{store}"},
    }  # fmt: skip
    return Side("ExampleConnector", _engine(folder, "example", transfer), None, store)


def lmcache(folder: Path) -> Side:
    """LMCache in an environment of its own, with blocks of the same size."""
    os.environ |= {
        "LMCACHE_CHUNK_SIZE": f"{BLOCK_TOKENS}", "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "1", "LMCACHE_TRACK_USAGE": "false",
    }  # fmt: skip
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    python = os.environ["LMCACHE_PYTHON"]
    return Side("LMCache, in memory", _engine(folder, "lmcache", transfer, python))


def _engine(
    folder: Path, name: str, transfer: dict[str, Any] | None, python: str | None = None
) -> VllmEngine:
    python = python or os.environ["VLLM_PYTHON"]
    return VllmEngine(python, folder / "model", folder, name, transfer=transfer, has_events=False)
