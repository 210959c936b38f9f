"""What one rank is busy with: the requests booked on it, and the blocks they hold.

A block of a prompt is counted once however many requests share it; a trailing incomplete block and
every output block belong to one request alone. A block that a single request holds may be weighed
by a fraction, as its output nears the expected length. Source: Dynamo's `ActiveSequences` (1.0.2).

    active_blocks = round(|shared| + Σ own − Σ (1 − fraction) over fractional blocks)

Prompts are held as whole prefixes, so the held hashes are closed under prefixes: how many blocks of
a new prompt are already here is how far its prefix goes.
"""

from collections.abc import Sequence

from msgspec import Struct

_MICRO = 1_000_000
"""Fractions are kept in millionths: sums stay exact however often they change."""


class _Request(Struct):
    sequence_hashes: Sequence[int]
    own_blocks: int
    prefill_tokens: int
    own_discount_micro: int = 0


class ActiveSequences:
    """Requests of one rank.

    Invariants: `_holders[h]` is the number of requests whose prompt contains h, never 0;
    `_weights_micro` names only blocks with one holder; the running sums equal the sums they
    stand for.
    """

    __slots__ = (
        "_discount_micro",
        "_holders",
        "_own_blocks",
        "_requests",
        "_weights_micro",
        "active_prefill_tokens",
    )

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._holders: dict[int, int] = {}
        self._weights_micro: dict[int, int] = {}
        self._own_blocks = 0
        self._discount_micro = 0
        self.active_prefill_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def request_ids(self) -> list[str]:
        """Requests booked here, oldest first."""
        return list(self._requests)

    @property
    def active_requests(self) -> int:
        """How many."""
        return len(self._requests)

    @property
    def active_blocks(self) -> int:
        """Blocks they hold, halves rounded up as the source does."""
        blocks = (len(self._holders) + self._own_blocks) * _MICRO - self._discount_micro
        return (blocks + _MICRO // 2) // _MICRO

    def new_blocks(self, sequence_hashes: Sequence[int], own_blocks: int) -> int:
        """How many blocks a prompt would add. O(its blocks already here)."""
        for position, sequence_hash in enumerate(sequence_hashes):
            if sequence_hash not in self._holders:
                return len(sequence_hashes) - position + own_blocks
        return own_blocks

    def add(
        self, request_id: str, sequence_hashes: Sequence[int], own_blocks: int, prefill_tokens: int
    ) -> None:
        """Book a request; its id must be new here. O(blocks)."""
        assert request_id not in self._requests
        self._requests[request_id] = _Request(sequence_hashes, own_blocks, prefill_tokens)
        for sequence_hash in sequence_hashes:
            self._holders[sequence_hash] = self._holders.get(sequence_hash, 0) + 1
            self._weigh_shared(sequence_hash, _MICRO)
        self._own_blocks += own_blocks
        self.active_prefill_tokens += prefill_tokens

    def prefill_complete(self, request_id: str) -> None:
        """Its prompt is computed. Idempotent."""
        request = self._requests[request_id]
        self.active_prefill_tokens -= request.prefill_tokens
        request.prefill_tokens = 0

    def add_output_block(self, request_id: str, decay_fraction: float | None = None) -> None:
        """It grew by a block; `decay_fraction` is the new weight of every block only it holds."""
        request = self._requests[request_id]
        request.own_blocks += 1
        self._own_blocks += 1
        if decay_fraction is not None:
            self._decay(request, round(decay_fraction * _MICRO))

    def free(self, request_id: str) -> None:
        """It ended, whether or not its prefill was marked complete. O(blocks)."""
        self.prefill_complete(request_id)
        request = self._requests.pop(request_id)
        for sequence_hash in request.sequence_hashes:
            self._holders[sequence_hash] -= 1
            if not self._holders[sequence_hash]:
                self._weigh_shared(sequence_hash, _MICRO)
                del self._holders[sequence_hash]
        self._own_blocks -= request.own_blocks
        self._discount_micro -= request.own_discount_micro

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        counted: dict[int, int] = {}
        for request in self._requests.values():
            for sequence_hash in request.sequence_hashes:
                counted[sequence_hash] = counted.get(sequence_hash, 0) + 1
        assert counted == self._holders
        assert all(self._holders[h] == 1 for h in self._weights_micro)
        requests = self._requests.values()
        assert self._own_blocks == sum(r.own_blocks for r in requests)
        assert self.active_prefill_tokens == sum(r.prefill_tokens for r in requests)
        own = sum(r.own_discount_micro for r in requests)
        shared = sum(_MICRO - weight for weight in self._weights_micro.values())
        assert self._discount_micro == own + shared

    def _decay(self, request: _Request, weight_micro: int) -> None:
        self._discount_micro -= request.own_discount_micro
        request.own_discount_micro = request.own_blocks * (_MICRO - weight_micro)
        self._discount_micro += request.own_discount_micro
        for sequence_hash in request.sequence_hashes:
            if self._holders[sequence_hash] == 1:
                self._weigh_shared(sequence_hash, weight_micro)

    def _weigh_shared(self, sequence_hash: int, weight_micro: int) -> None:
        self._discount_micro -= _MICRO - self._weights_micro.pop(sequence_hash, _MICRO)
        if weight_micro != _MICRO:
            self._weights_micro[sequence_hash] = weight_micro
            self._discount_micro += _MICRO - weight_micro
