"""What one rank is busy with: the requests booked on it, and the blocks they hold.

A block of a prompt is counted once however many requests share it; a trailing incomplete block and
every output block belong to one request alone. A block that a single request holds may be weighed
by a fraction, as its output nears the expected length. Source: Dynamo's `ActiveSequences` (1.0.2).

    active_blocks = round(shared + Σ own − Σ (1 − fraction) over fractional blocks)

Prompts are computed in the order in which they were booked: the oldest that is not complete is the
head, and since when it is the head tells how far it may have come. A prompt that should be complete
by now may be taken to be: it is `active` until somebody says so, but not `queued` any more, and its
request counts among those that decode.
"""

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from router.protocol.replicas import Progress
from router.sequence.footprint import Footprint
from router.sequence.prompt_trie import MICRO, Node, PromptTrie
from router.sequence.recent_ends import RECENT_S, Ends, shared_blocks

ForeignId: TypeAlias = tuple[int, str]
"""A request of another router's: that router's id, and the request's."""

BookingId: TypeAlias = str | ForeignId
"""A request of ours by its id, or another router's."""


class Prediction(Struct, frozen=True, eq=False):
    """What was booked, as far as an engine can prove it wrong. When it was (`booked_s`), others of
    the rank were busy with `in_flight_blocks` of its beginning; and those of `ends` had been.
    """

    footprint: Footprint
    in_flight_blocks: int
    ends: Ends
    booked_s: float

    @property
    def busy_blocks(self) -> int:
        """Leading blocks that others were, or had just been, busy with. O(blocks of all)."""
        hashes, since_s = self.footprint.sequence_hashes, self.booked_s - RECENT_S
        return max(self.in_flight_blocks, shared_blocks(self.ends, hashes, since_s))


class _Request(Struct):
    footprint: Footprint
    end: Node
    own_blocks: int
    kv_tokens: int
    prefill_tokens: int
    prefill_contexts: float
    booked_s: float
    own_discount_micro: int = 0
    decay_fraction: float | None = None
    in_flight_blocks: int = 0
    ends: Ends = ()
    is_compared: bool = False

    @property
    def output_blocks(self) -> int:
        """By which it grew."""
        return self.own_blocks - self.footprint.own_blocks

    @property
    def expected_fraction(self) -> float | None:
        """max(0, 1 − generated / expected), in tokens; None where nobody said what is expected."""
        expected_tokens = self.footprint.expected_output_tokens
        if not expected_tokens:
            return None
        return max(0.0, 1 - self.output_blocks * self.footprint.block_size / expected_tokens)


class ActiveSequences:
    """Requests of one rank, whose slot in the trie of all ranks' prompts this is.

    `active_prefill_tokens` are those of prompts that nobody said are complete, `queued_*` of those
    among them that do not seem to be.

    Invariants: every request is either among the prefills, which are in booking order, or decoding;
    only of the latter may it be unsaid; the running sums equal the sums they stand for.
    """

    __slots__ = (
        "_discount_micro",
        "_own_blocks",
        "_prefills",
        "_requests",
        "_shared_blocks",
        "_slot",
        "_trie",
        "_unsaid",
        "active_prefill_tokens",
        "decoding_kv_tokens",
        "head_since_s",
        "queued_contexts",
        "queued_tokens",
    )

    def __init__(self, trie: PromptTrie, slot: int) -> None:
        self._trie = trie
        self._slot = slot
        self._requests: dict[BookingId, _Request] = {}
        self._prefills: dict[BookingId, _Request] = {}
        self._unsaid: dict[BookingId, _Request] = {}
        self._shared_blocks = 0
        self._own_blocks = 0
        self._discount_micro = 0
        self.active_prefill_tokens = 0
        self.queued_tokens = 0
        self.queued_contexts = 0.0
        self.decoding_kv_tokens = 0
        self.head_since_s = 0.0

    def __contains__(self, request_id: BookingId) -> bool:
        return request_id in self._requests

    @property
    def request_ids(self) -> list[BookingId]:
        """Requests booked here, oldest first."""
        return list(self._requests)

    @property
    def active_requests(self) -> int:
        """How many."""
        return len(self._requests)

    @property
    def decoding_requests(self) -> int:
        """Those whose prompt seems to be complete."""
        return len(self._requests) - len(self._prefills)

    @property
    def head(self) -> tuple[int, float, float]:
        """Of the oldest prompt that does not seem to be complete: its tokens and contexts, and
        since when it is that; zeros where there is none.
        """
        for request in self._prefills.values():
            return request.prefill_tokens, request.prefill_contexts, self.head_since_s
        return 0, 0.0, 0.0

    @property
    def columns(self) -> tuple[float, ...]:
        """All of these numbers, as the table has them, PREFILL_TOKENS to DECODING_KV_TOKENS."""
        requests = len(self._requests)
        return (
            self.active_prefill_tokens,
            self.queued_tokens,
            self.queued_contexts,
            *self.head,
            self.active_blocks,
            requests,
            requests - len(self._prefills),
            self.decoding_kv_tokens,
        )

    @property
    def active_blocks(self) -> int:
        """Blocks they hold, halves rounded up as the source does."""
        blocks = (self._shared_blocks + self._own_blocks) * MICRO - self._discount_micro
        return (blocks + MICRO // 2) // MICRO

    def prefill_left(
        self, now_s: float, seconds: Callable[[Footprint], float]
    ) -> tuple[float, float, float, float]:
        """Tokens and attention work that should be left of the prompts being computed, and of the
        one that should be now; `seconds`: what a prompt takes, from when it is booked and the one
        before it is done.
        """
        tokens, contexts = float(self.queued_tokens), self.queued_contexts
        begun_s = self.head_since_s
        for prompt in self._prefills.values():
            begun_s = max(begun_s, prompt.booked_s)
            took_s = seconds(prompt.footprint)
            if now_s < begun_s + took_s:
                done = max(now_s - begun_s, 0.0) / took_s
                head_tokens, head_contexts = prompt.prefill_tokens, prompt.prefill_contexts
                tokens -= done * head_tokens
                contexts -= done * head_contexts
                return tokens, contexts, (1 - done) * head_tokens, (1 - done) * head_contexts
            begun_s += took_s
            tokens -= prompt.prefill_tokens
            contexts -= prompt.prefill_contexts
        return 0.0, 0.0, 0.0, 0.0

    def end_overdue(self, now_s: float, seconds: Callable[[Footprint], float]) -> None:
        """Take those prompts for complete that should be by now; `seconds`: see `prefill_left`.

        O(those).
        """
        while self._prefills:
            request_id, prompt = next(iter(self._prefills.items()))
            ended_s = self.head_since_s + seconds(prompt.footprint)
            if ended_s > now_s:
                return
            self._begin_decoding(request_id, ended_s)
            self._unsaid[request_id] = prompt

    def new_blocks(self, footprint: Footprint) -> int:
        """How many blocks a request would add. O(nodes on its way)."""
        hashes = footprint.sequence_hashes
        return len(hashes) - self._trie.depth(self._slot, hashes) + footprint.own_blocks

    def add(
        self, request_id: BookingId, footprint: Footprint, now_s: float, ends: Ends = ()
    ) -> None:
        """Book a request; its id must be new here. `ends`: of others here. O(nodes on its way)."""
        assert request_id not in self._requests
        end, change = self._trie.add(self._slot, footprint.sequence_hashes)
        prefill_tokens, prefill_contexts = footprint.prefill_tokens, footprint.prefill_contexts
        request = self._requests[request_id] = _Request(
            footprint,
            end,
            footprint.own_blocks,
            footprint.isl_tokens,
            prefill_tokens,
            prefill_contexts,
            now_s,
            in_flight_blocks=len(footprint.sequence_hashes) - change.blocks,
            ends=ends,
        )
        if not self._prefills:
            self.head_since_s = now_s
        self._prefills[request_id] = request
        self._shared_blocks += change.blocks
        self._own_blocks += footprint.own_blocks
        self._discount_micro -= change.discount_micro
        self.active_prefill_tokens += prefill_tokens
        self.queued_tokens += prefill_tokens
        self.queued_contexts += prefill_contexts

    def prefill_complete(self, request_id: BookingId, now_s: float) -> None:
        """Its prompt is computed, as somebody says. Idempotent."""
        if request_id in self._prefills:
            self._begin_decoding(request_id, now_s)
            self.active_prefill_tokens -= self._requests[request_id].prefill_tokens
        elif (unsaid := self._unsaid.pop(request_id, None)) is not None:
            self.active_prefill_tokens -= unsaid.prefill_tokens

    def add_output_blocks(
        self, request_id: BookingId, blocks: int, decay_fraction: float | None = None
    ) -> None:
        """It grew; `decay_fraction` is the new weight of every block that only it holds. If none is
        said, it is the part still to come of the expected output, if one is expected.
        """
        request = self._requests[request_id]
        request.own_blocks += blocks
        if decay_fraction is None:
            decay_fraction = request.expected_fraction
        self._own_blocks += blocks
        request.kv_tokens += blocks * request.footprint.block_size
        if request_id not in self._prefills:
            self.decoding_kv_tokens += blocks * request.footprint.block_size
        if decay_fraction is not None:
            request.decay_fraction = decay_fraction
            self._decay(request, round(decay_fraction * MICRO))

    def is_decoding(self, request_id: BookingId) -> bool:
        """Whether its prompt seems to be complete."""
        return request_id in self._requests and request_id not in self._prefills

    def footprint(self, request_id: BookingId) -> Footprint:
        """What a request was booked as."""
        return self._requests[request_id].footprint

    def take_prediction(self, request_id: BookingId) -> Prediction | None:
        """What was expected of a request, the first time that somebody wants to compare it."""
        request = self._requests[request_id]
        is_first, request.is_compared = not request.is_compared, True
        if not is_first:
            return None
        return Prediction(
            request.footprint, request.in_flight_blocks, request.ends, request.booked_s
        )

    def progress(self, request_id: BookingId) -> Progress:
        """How far a request has come."""
        request = self._requests[request_id]
        is_complete = self.is_told_complete(request_id)
        return Progress(is_complete, request.output_blocks, request.decay_fraction)

    def is_told_complete(self, request_id: BookingId) -> bool:
        """Whether somebody said that its prompt is computed."""
        return not (request_id in self._prefills or request_id in self._unsaid)

    def free(self, request_id: BookingId, now_s: float) -> None:
        """It ended, whether or not its prefill was marked complete. O(nodes on its way)."""
        request = self._requests[request_id]
        self.prefill_complete(request_id, now_s)
        del self._requests[request_id]
        self.decoding_kv_tokens -= request.kv_tokens
        change = self._trie.remove(self._slot, request.end)
        self._shared_blocks -= change.blocks
        self._own_blocks -= request.own_blocks
        self._discount_micro -= change.discount_micro + request.own_discount_micro

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        requests = self._requests.values()
        names = [{int(each) for each in request.footprint.sequence_hashes} for request in requests]
        assert self._shared_blocks == len(set().union(*names))
        assert self._own_blocks == sum(r.own_blocks for r in requests)
        queued, unsaid = self._prefills.values(), self._unsaid.values()
        assert self.queued_tokens == sum(p.prefill_tokens for p in queued)
        assert self.queued_contexts == sum(p.prefill_contexts for p in queued)
        unsaid_tokens = sum(p.prefill_tokens for p in unsaid)
        assert self.active_prefill_tokens == self.queued_tokens + unsaid_tokens
        assert not self._prefills.keys() & self._unsaid.keys()
        assert self._unsaid.keys() <= self._requests.keys()
        assert [i for i in self._requests if i in self._prefills] == list(self._prefills)
        decoding = [r for i, r in self._requests.items() if i not in self._prefills]
        assert self.decoding_requests == len(decoding)
        assert self.decoding_kv_tokens == sum(r.kv_tokens for r in decoding)
        assert self._discount_micro >= sum(r.own_discount_micro for r in requests)

    def _begin_decoding(self, request_id: BookingId, now_s: float) -> None:
        is_head = next(iter(self._prefills)) == request_id
        prompt = self._prefills.pop(request_id)
        self.queued_tokens -= prompt.prefill_tokens
        self.queued_contexts -= prompt.prefill_contexts
        self.decoding_kv_tokens += prompt.kv_tokens
        if is_head and self._prefills:
            self.head_since_s = max(now_s, next(iter(self._prefills.values())).booked_s)

    def _decay(self, request: _Request, weight_micro: int) -> None:
        self._discount_micro -= request.own_discount_micro
        request.own_discount_micro = request.own_blocks * (MICRO - weight_micro)
        self._discount_micro += request.own_discount_micro
        self._discount_micro += self._trie.weigh(self._slot, request.end, weight_micro)
