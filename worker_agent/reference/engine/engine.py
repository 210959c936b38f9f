"""The reference engine: one rank that really computes, over one pool of real blocks.

`step` exchanges messages only: it takes the input since the last step, and returns its results. It
may therefore run on any thread, one call at a time.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from worker_agent.blocks.changes import Change
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.reference.engine.batching import Batcher, Chunk, GenerationRequest, Running
from worker_agent.reference.engine.cache import CacheLayout, CacheShape, PagedCache
from worker_agent.reference.engine.model import Model, ModelConfig, PagedContext, TileInput
from worker_agent.reference.engine.tiering import EngineTiers, RankMemory
from worker_agent.reference.engine.tiles import TILE, Segment, Tile, pack
from worker_agent.tiers.stack import TierChange


class EngineConfig(Struct, frozen=True):
    """The size of a rank, and its cache layout."""

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_running_requests: int
    layout: CacheLayout = CacheLayout()
    load_timeout_s: float = 5.0
    """Time limit for blocks from other tiers; blocks that are missing after it are computed."""


def cache_shape(model: ModelConfig, num_blocks: int, block_size: int) -> CacheShape:
    """Return the shape of a cache of `num_blocks` blocks of a model."""
    return CacheShape(num_blocks, model.num_layers, block_size, model.num_kv_heads, model.head_dim)


def _cache(model: Model, config: EngineConfig, memory: RankMemory | None) -> PagedCache:
    shape = cache_shape(model.config, config.num_blocks, config.block_size)
    if memory is None:
        return PagedCache.allocated(shape, config.layout, model.device)
    return PagedCache(shape, config.layout, memory.physical.regions)


class StepInput(Struct):
    """The input since the last step."""

    added: list[GenerationRequest] = []
    aborted: list[str] = []
    clear_cache: bool = False


class Generated(Struct, frozen=True):
    """A new token of a request, its prompt's cached tokens, and whether it was the last."""

    request_id: str
    token: int
    cached_tokens: int
    is_last: bool


class StepOutput(Struct, frozen=True):
    """The results of a step.

    `changes`: changes of block names in order, on the device and in the tiers below; the latter are
    older. `wait_s`: longest time until the next step if there is no work; None: until input arrives
    or `on_change` is called.
    """

    generated: list[Generated]
    changes: list[Change]
    tier_changes: list[TierChange]
    counters: LoadCounters
    gauges: LoadGauges
    has_work: bool
    wait_s: float | None


class ReferenceEngine:
    """One rank: a block pool, its keys and values, and the requests on it."""

    def __init__(
        self, model: Model, config: EngineConfig, naming: Naming, memory: RankMemory | None = None
    ) -> None:
        """Set up a rank.

        `memory`: the memory of its blocks, and the tiers below, which are not to be called from
        outside during a step. By default it is newly allocated, without other tiers.
        """
        self._model = model
        self._config = config
        self._pool = memory.pool if memory else BlockPool(config.num_blocks, LruEviction())
        self._batcher = Batcher(
            self._pool,
            naming,
            config.block_size,
            config.max_num_batched_tokens,
            config.max_running_requests,
        )
        self._cache = _cache(model, config, memory)
        self._tiers: EngineTiers | None = None
        if memory:
            timeout_s = config.load_timeout_s
            self._tiers = EngineTiers(memory, self._batcher, config.layout, timeout_s)
        self._counters = LoadCounters()
        self._samplers: dict[str, torch.Generator] = {}

    @property
    def constants(self) -> LoadConstants:
        """The constants of load reports."""
        return LoadConstants(
            self._config.max_num_batched_tokens,
            self._config.max_running_requests,
            self._config.num_blocks,
        )

    def step(self, arrived: StepInput) -> StepOutput:
        """Take the input, and compute one step if there is work."""
        started_s = time.monotonic()
        tier_changes = self._tiers.poll(started_s) if self._tiers else []
        aborted = self._take_in(arrived)
        admitted = self._batcher.admit()
        if self._tiers:
            self._tiers.begin(admitted, started_s)
        chunks = self._batcher.plan()
        prefilled_tokens = self._counters.prefill_tokens
        self._count(len(arrived.added), aborted, admitted, chunks)
        generated = self._compute(chunks) if chunks else []
        if chunks:
            prefill_tokens = self._counters.prefill_tokens - prefilled_tokens
            self._count_busy(time.monotonic() - started_s, prefill_tokens, generated)
        changes = self._pool.take_changes()
        return StepOutput(
            generated,
            changes,
            tier_changes,
            self._counters,
            self._gauges(),
            self._batcher.has_work,
            self._tend_tiers(changes, chunks),
        )

    def on_change(self, wake: Callable[[], None]) -> None:
        """Set a callback for any thread, called when the tiers have results for a step."""
        if self._tiers:
            self._tiers.stack.on_change = wake

    def close(self) -> None:
        """Store queued blocks for tiers that outlive this process. Blocking; no step may follow."""
        if self._tiers:
            self._tiers.drain()

    def _tend_tiers(self, changes: Sequence[Change], chunks: Sequence[Chunk]) -> float | None:
        """Store what is due. Returns the longest time until the next step."""
        if self._tiers is None:
            return None
        now_s = time.monotonic()
        self._tiers.store(changes, (chunk.running for chunk in chunks), now_s)
        return self._tiers.wait_s(now_s)

    def _take_in(self, arrived: StepInput) -> int:
        """Take the input. Returns the number of aborted requests that were known."""
        if arrived.clear_cache:
            self._pool.clear()
            if self._tiers:
                self._tiers.clear()
        for request in arrived.added:
            self._batcher.add(request)
        for request_id in arrived.aborted:
            self._samplers.pop(request_id, None)
        return sum(self._batcher.abort(request_id) for request_id in arrived.aborted)

    @torch.inference_mode()
    def _compute(self, chunks: list[Chunk]) -> list[Generated]:
        last_rows: dict[int, Tensor] = {}
        for tile in pack((i, chunk.start, chunk.stop) for i, chunk in enumerate(chunks)):
            logits = self._model.forward(self._tile_input(tile, chunks), self._cache.layers)
            for segment in tile.segments:
                last_rows[segment.request] = logits[segment.rows[-1]]
        return [
            generated
            for index, chunk in enumerate(chunks)
            for generated in self._finish(chunk, last_rows[index])
        ]

    def _finish(self, chunk: Chunk, logits: Tensor) -> list[Generated]:
        if not chunk.samples:
            self._batcher.computed(chunk, None)
            return []
        running = chunk.running
        token = self._sample(running.request, logits)
        self._batcher.computed(chunk, token)
        request_id = running.request.request_id
        if running.is_finished:
            self._samplers.pop(request_id, None)
        return [Generated(request_id, token, running.cached_tokens, running.is_finished)]

    def _sample(self, request: GenerationRequest, logits: Tensor) -> int:
        if request.temperature == 0:
            return int(logits.argmax())
        sampler = self._samplers.get(request.request_id)
        if sampler is None:
            sampler = torch.Generator()
            sampler.seed() if request.seed is None else sampler.manual_seed(request.seed)
            self._samplers[request.request_id] = sampler
        probabilities = torch.softmax(logits.double() / request.temperature, dim=-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=sampler))

    def _tile_input(self, tile: Tile, chunks: Sequence[Chunk]) -> TileInput:
        tokens, positions = [0] * TILE, [0] * TILE
        rows, blocks, offsets = [], [], []
        for segment in tile.segments:
            running = chunks[segment.request].running
            for row, position in zip(segment.rows, range(segment.start, segment.stop), strict=True):
                index, offset = divmod(position, self._config.block_size)
                tokens[row], positions[row] = running.tokens[position], position
                rows.append(row)
                blocks.append(running.blocks[index])
                offsets.append(offset)
        return TileInput(
            self._indices(tokens),
            self._indices(positions),
            self._indices(rows),
            self._indices(blocks),
            self._indices(offsets),
            [self._context(segment, chunks[segment.request].running) for segment in tile.segments],
        )

    def _context(self, segment: Segment, running: Running) -> PagedContext:
        needed = -(-segment.stop // self._config.block_size)
        return PagedContext(
            self._indices(running.blocks[:needed]),
            self._indices(list(segment.rows)),
            segment.stop - 1,
        )

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _gauges(self) -> LoadGauges:
        return LoadGauges(
            running_requests=len(self._batcher.running),
            waiting_requests=len(self._batcher.waiting),
            waiting_uncached_tokens=self._batcher.waiting_uncached_tokens(self._loadable),
            kv_used_blocks=self._pool.used_blocks,
        )

    def _loadable(self, identities: Sequence[bytes]) -> int:
        return self._tiers.loadable(identities) if self._tiers else 0

    def _count(
        self, added: int, aborted: int, admitted: list[Running], chunks: list[Chunk]
    ) -> None:
        before = self._counters
        prefill = [chunk for chunk in chunks if chunk.is_prefill]
        decode = [chunk for chunk in chunks if not chunk.is_prefill]
        sizes = [chunk.stop - chunk.start for chunk in prefill]
        loaded = self._tiers.take_loaded_tokens() if self._tiers else 0
        self._counters = msgspec.structs.replace(
            before,
            steps=before.steps + bool(chunks),
            prefill_tokens=before.prefill_tokens + sum(sizes),
            prefill_token_contexts=before.prefill_token_contexts
            + sum(n * (c.start + n / 2) for c, n in zip(prefill, sizes, strict=True)),
            decode_requests=before.decode_requests + len(decode),
            resident_kv_tokens=before.resident_kv_tokens + sum(c.stop for c in decode),
            requests_received=before.requests_received + added,
            requests_finished=before.requests_finished + aborted,
            cached_tokens=before.cached_tokens + sum(r.cached_tokens for r in admitted) + loaded,
        )

    def _count_busy(self, busy_s: float, prefill_tokens: int, generated: list[Generated]) -> None:
        if self._tiers:
            self._tiers.note_prefill(prefill_tokens, busy_s)
        self._counters = msgspec.structs.replace(
            self._counters,
            busy_s=self._counters.busy_s + busy_s,
            requests_finished=self._counters.requests_finished + sum(g.is_last for g in generated),
        )
