"""Continuous batching over one block pool: admission of requests, and planning of steps.

A request is admitted, first come first served, when every block it may ever need fits; its cached
prefix is looked up then, without its last token, which is always computed. Each step computes one
token of every decoding request, and adds chunks of prefill up to the token budget. Blocks are
registered as soon as they are full and computed, during decoding too.
"""

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from router.sequence.hashing.tokens import TokenBlock, TokenBlockSequence, request_families
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.blocks.names import BlockName, Naming
from worker_agent.blocks.pool import BlockPool


class GenerationRequest(Struct, frozen=True):
    """A prompt to be continued by `max_tokens` tokens."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    cache_salt: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    source: PeerSource | None = None
    """Another worker that has leading blocks of the prompt."""
    priority: int = 0
    """Priority of its blocks in the tiers below: the highest are stored first and kept longest."""


class Running:
    """An admitted or waiting request.

    Tokens [0, computed) have their keys and values in `blocks`, the first `registered` of which are
    registered in the pool; `names` are the names of all full blocks. While `is_loading`, blocks
    behind the registered ones arrive from another tier, and nothing is computed.
    """

    __slots__ = (
        "_naming",
        "_root",
        "_sequence",
        "blocks",
        "cached_tokens",
        "computed",
        "is_loading",
        "names",
        "registered",
        "request",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, block_size: int, naming: Naming) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        families = request_families(cache_salt=request.cache_salt)
        self._sequence = TokenBlockSequence(self.tokens, block_size, families)
        self._naming = naming
        self._root = naming.root(None, request.cache_salt)
        self.names: list[BlockName] = []
        self._name(self._sequence.blocks)
        self.blocks: list[int] = []
        self.registered = 0
        self.computed = 0
        self.cached_tokens = 0
        self.is_loading = False

    def append(self, token: int) -> None:
        """Append a generated token."""
        self.tokens.append(token)
        filled = self._sequence.append(token)
        if filled is not None:
            self._name(self._sequence.blocks[filled:])

    def _name(self, blocks: Sequence[TokenBlock]) -> None:
        parent = self.names[-1] if self.names else None
        self.names += self._naming.named(blocks, self._root, parent)

    @property
    def is_decoding(self) -> bool:
        """True if its prompt is computed, so that a step adds one token."""
        return self.computed >= len(self.request.prompt)

    @property
    def remaining_tokens(self) -> int:
        """Tokens with keys and values still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def is_finished(self) -> bool:
        """True if it has generated all requested tokens."""
        return len(self.tokens) - len(self.request.prompt) >= self.request.max_tokens


def block_names(request: GenerationRequest, block_size: int, naming: Naming) -> list[BlockName]:
    """Return the names of a prompt's full blocks. O(tokens)."""
    return Running(request, block_size, naming).names


class Chunk(Struct, frozen=True):
    """Positions [start, stop) of a request, to be computed in one step."""

    running: Running
    start: int
    stop: int

    @property
    def is_prefill(self) -> bool:
        """True if it is a part of the prompt."""
        return not self.running.is_decoding

    @property
    def samples(self) -> bool:
        """True if its last row predicts a new token."""
        return self.stop == len(self.running.tokens)


class Batcher:
    """The waiting and running requests of one rank.

    Invariants: a running request's blocks suffice for its maximum length; its first `registered`
    blocks are registered, and are full and computed.
    """

    def __init__(
        self,
        pool: BlockPool,
        naming: Naming,
        block_size: int,
        max_batched_tokens: int,
        max_running: int,
    ) -> None:
        self._pool = pool
        self._naming = naming
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []

    @property
    def has_work(self) -> bool:
        """True if a step has tokens to compute, or possibly a request to admit."""
        if not self.running:
            return bool(self.waiting)
        return any(not running.is_loading for running in self.running)

    def waiting_uncached_tokens(self, loadable: Callable[[Sequence[bytes]], int]) -> int:
        """Return the prompt tokens of waiting requests that would be computed now.

        `loadable` returns the number of leading blocks that would be loaded from tiers below.
        """
        return sum(self._uncached_tokens(waiting, loadable) for waiting in self.waiting)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request for admission."""
        self.waiting.append(Running(request, self._block_size, self._naming))

    def abort(self, request_id: str) -> bool:
        """Drop a waiting or running request. Returns False if it is unknown."""
        for waiting in self.waiting:
            if waiting.request.request_id == request_id:
                self.waiting.remove(waiting)
                return True
        for running in self.running:
            if running.request.request_id == request_id:
                self._retire(running)
                return True
        return False

    def admit(self) -> list[Running]:
        """Admit waiting requests in order of arrival, while they fit. Returns the admitted ones."""
        admitted = []
        while self.waiting and len(self.running) < self._max_running:
            if not self._place(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def plan(self) -> list[Chunk]:
        """Return the next step: decodes first, then prefill, within the token budget."""
        budget = self._max_batched_tokens
        chunks = []
        for running in sorted(self.running, key=lambda r: not r.is_decoding):
            count = min(running.remaining_tokens, budget)
            if count and not running.is_loading:
                chunks.append(Chunk(running, running.computed, running.computed + count))
                budget -= count
        return chunks

    def computed(self, chunk: Chunk, sampled: int | None) -> None:
        """Record that a chunk was computed; `sampled`: the token it predicted, if any."""
        running = chunk.running
        running.computed = chunk.stop
        self._name_full_blocks(running)
        if sampled is not None:
            running.append(sampled)
        if running.is_finished:
            self._retire(running)

    def reusable(self, running: Running) -> list[BlockName]:
        """Return the names of the prompt's full blocks behind the registered ones.

        The block of the last prompt token is not included, because that token is always computed.
        """
        return running.names[running.registered : self._reusable_blocks(running)]

    def loaded(self, running: Running, blocks: int) -> None:
        """Record that `blocks` blocks behind the registered ones were loaded; compute the rest."""
        running.is_loading = False
        running.computed += blocks * self._block_size
        running.cached_tokens += blocks * self._block_size
        self._name_full_blocks(running)

    def _uncached_tokens(self, waiting: Running, loadable: Callable[[Sequence[bytes]], int]) -> int:
        wanted = self._reusable(waiting)
        here = self._pool.matching(wanted)
        cached_blocks = here + loadable(wanted[here:])
        return len(waiting.request.prompt) - cached_blocks * self._block_size

    def _place(self, waiting: Running) -> bool:
        request = waiting.request
        most_tokens = max(len(request.prompt) + request.max_tokens - 1, 1)
        needed = -(-most_tokens // self._block_size)
        matched = self._pool.match(self._reusable(waiting))
        fresh = self._pool.allocate(needed - len(matched))
        if fresh is None:
            self._pool.release(matched)
            return False
        waiting.blocks = matched + fresh
        waiting.registered = len(matched)
        waiting.computed = waiting.cached_tokens = len(matched) * self._block_size
        return True

    def _reusable(self, waiting: Running) -> list[bytes]:
        """Return the identities of the prompt's full blocks, without its last token."""
        return [name.identity for name in waiting.names[: self._reusable_blocks(waiting)]]

    def _reusable_blocks(self, running: Running) -> int:
        return (len(running.request.prompt) - 1) // self._block_size

    def _name_full_blocks(self, running: Running) -> None:
        new = slice(running.registered, running.computed // self._block_size)
        running.blocks[new] = self._pool.register(running.blocks[new], running.names[new])
        running.registered = new.stop

    def _retire(self, running: Running) -> None:
        self.running.remove(running)
        running.is_loading = False
        self._pool.release(running.blocks)
