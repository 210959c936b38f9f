"""Continuous batching over one block pool: who is admitted, what is computed in the next step.

A request is admitted, first come first served, when every block it may ever need fits; its cached
prefix is looked up then, short of its last token, which is always computed. Each step computes one
token of every decoding request and fills up with chunks of prefill. Blocks are named as soon as
they are full and computed, decode's too.
"""

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from router.sequence.block_families import request_families
from router.sequence.tokens import TokenBlock, TokenBlockSequence
from worker_agent.blocks.names import BlockName, Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.sources import PeerSource


class GenerationRequest(Struct, frozen=True):
    """A prompt to be continued by `max_tokens` tokens."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    cache_salt: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    source: PeerSource | None = None
    """Who else has leading blocks of the prompt."""
    priority: int = 0
    """Of its blocks in the tiers below: the highest are stored first and kept longest."""


class Running:
    """A request in the making. Tokens [0, computed) have their keys and values in `blocks`, the
    first `registered` of which are named in the pool; `names` are those of all full blocks. While
    it `is_loading`, the blocks behind those come from another tier, and nothing is computed.
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
        """It generated a token."""
        self.tokens.append(token)
        filled = self._sequence.append(token)
        if filled is not None:
            self._name(self._sequence.blocks[filled:])

    def _name(self, blocks: Sequence[TokenBlock]) -> None:
        parent = self.names[-1] if self.names else None
        self.names += self._naming.named(blocks, self._root, parent)

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed: a step adds one token."""
        return self.computed >= len(self.request.prompt)

    @property
    def remaining_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def is_finished(self) -> bool:
        """It has all the tokens it asked for."""
        return len(self.tokens) - len(self.request.prompt) >= self.request.max_tokens


class Chunk(Struct, frozen=True):
    """Positions [start, stop) of a request, to be computed in one step."""

    running: Running
    start: int
    stop: int

    @property
    def is_prefill(self) -> bool:
        """Part of the prompt."""
        return not self.running.is_decoding

    @property
    def samples(self) -> bool:
        """Its last row predicts a new token."""
        return self.stop == len(self.running.tokens)


class Batcher:
    """Requests of one rank, waiting and running.

    Invariants: a running request's blocks suffice for all it may become; its first `registered`
    blocks are named, and are full and computed.
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
        """Is there anything to compute, or anybody to admit for whom there is room?"""
        if not self.running:
            return bool(self.waiting)
        return any(not running.is_loading for running in self.running)

    def waiting_uncached_tokens(self, loadable: Callable[[Sequence[bytes]], int]) -> int:
        """Prompt tokens of waiting requests that would be computed now. `loadable`: how many
        leading blocks would come from tiers below.
        """
        return sum(self._uncached_tokens(waiting, loadable) for waiting in self.waiting)

    def add(self, request: GenerationRequest) -> None:
        """Let a request wait for admission."""
        self.waiting.append(Running(request, self._block_size, self._naming))

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it is; False if it is nowhere."""
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
        """Admit whoever is next and fits, in order of arrival; the ones admitted."""
        admitted = []
        while self.waiting and len(self.running) < self._max_running:
            if not self._place(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def plan(self) -> list[Chunk]:
        """What to compute next: decodes first, then prefill, within the token budget."""
        budget = self._max_batched_tokens
        chunks = []
        for running in sorted(self.running, key=lambda r: not r.is_decoding):
            count = min(running.remaining_tokens, budget)
            if count and not running.is_loading:
                chunks.append(Chunk(running, running.computed, running.computed + count))
                budget -= count
        return chunks

    def computed(self, chunk: Chunk, sampled: int | None) -> None:
        """A chunk was computed; `sampled` is the token it predicted, if it was to."""
        running = chunk.running
        running.computed = chunk.stop
        self._name_full_blocks(running)
        if sampled is not None:
            running.append(sampled)
        if running.is_finished:
            self._retire(running)

    def reusable(self, running: Running) -> list[BlockName]:
        """What the prompt's blocks behind the named ones are called, short of its last token."""
        return running.names[running.registered : self._reusable_blocks(running)]

    def loaded(self, running: Running, blocks: int) -> None:
        """So many blocks behind the named ones are filled, from another tier; the others are to be
        computed.
        """
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
        """What the prompt's blocks hold, short of its last token."""
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
