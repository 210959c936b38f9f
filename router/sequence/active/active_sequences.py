"""The load of one rank: the requests booked on it, and the blocks they hold.

A block of a prompt is counted once for all requests that share it. A trailing incomplete block and
every output block belong to one request alone. A block that only one request holds may be weighted
by a fraction, as its output nears the expected length. Source: Dynamo's `ActiveSequences` (1.0.2).

    active_blocks = round(shared + Σ own − Σ (1 − fraction) over fractional blocks)

Prompts are computed in the order in which they were booked. The oldest incomplete prompt is the
head; the time since it became the head bounds its progress. After its predicted duration a prompt
may be assumed complete: it stays `active` until its completion is reported, but it is no longer
`queued`, and its request counts as decoding.
"""

import struct
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.replicas import Progress
from router.sequence.active.footprint import Footprint
from router.sequence.active.prompt_trie import MICRO, Node, PromptTrie
from router.sequence.active.recent_completions import RECENT_S, Ends, shared_blocks
from router.sequence.rank_table import DECODING_KV_TOKENS, PREFILL_TOKENS, RANK_COLUMNS

ForeignId: TypeAlias = tuple[int, str]
"""A request of another router: the router's id and the request's id."""

BookingId: TypeAlias = str | ForeignId
"""The id of a request of this router, or of another router."""


_COLUMNS = struct.Struct(f"={DECODING_KV_TOKENS + 1 - PREFILL_TOKENS}d")
_ROW_BYTES, _FIRST_BYTE = 8 * RANK_COLUMNS, 8 * PREFILL_TOKENS


class Prediction(Struct, frozen=True, eq=False):
    """The prediction for a booked request, as far as its engine's usage can be compared with it.

    At the time of booking (`booked_s`), other requests on the rank held `in_flight_blocks` leading
    blocks of it; `ends`: the requests that had recently ended there.
    """

    footprint: Footprint
    in_flight_blocks: int
    ends: Ends
    booked_s: float

    @property
    def busy_blocks(self) -> int:
        """Leading blocks that other requests held then, or had just held. O(blocks of all)."""
        hashes, since_s = self.footprint.sequence_hashes, self.booked_s - RECENT_S
        return max(self.in_flight_blocks, shared_blocks(self.ends, hashes, since_s))


class _Request(Struct, gc=False):
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
        """Blocks by which the request has grown."""
        return self.own_blocks - self.footprint.own_blocks

    @property
    def expected_fraction(self) -> float | None:
        """max(0, 1 − generated / expected), in tokens; None without an expected output length."""
        expected_tokens = self.footprint.expected_output_tokens
        if not expected_tokens:
            return None
        return max(0.0, 1 - self.output_blocks * self.footprint.block_size / expected_tokens)


class ActiveSequences:
    """The requests of one rank, which is one slot of the trie of all ranks' prompts.

    `active_prefill_tokens` are those of prompts not reported complete; `queued_*` those of the
    prompts among them that are not assumed complete either.

    Invariants: every request is either among the prefills, which are in booking order, or decoding;
    only a decoding request may be unreported (`_unreported`); the running sums equal the sums that
    they stand for.
    """

    __slots__ = (
        "_discount_micro",
        "_own_blocks",
        "_prefills",
        "_requests",
        "_shared_blocks",
        "_trie",
        "_unreported",
        "active_prefill_tokens",
        "decoding_kv_tokens",
        "head_since_s",
        "queued_contexts",
        "queued_tokens",
        "slot",
    )

    def __init__(self, trie: PromptTrie, slot: int) -> None:
        self._trie = trie
        self.slot = slot
        self._requests: dict[BookingId, _Request] = {}
        self._prefills: dict[BookingId, _Request] = {}
        self._unreported: dict[BookingId, _Request] = {}
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
        """Ids of the requests booked here, oldest first."""
        return list(self._requests)

    @property
    def active_requests(self) -> int:
        """The number of booked requests."""
        return len(self._requests)

    @property
    def decoding_requests(self) -> int:
        """The number of requests with a prompt that is reported or assumed complete."""
        return len(self._requests) - len(self._prefills)

    @property
    def head(self) -> tuple[int, float, float]:
        """Tokens and contexts of the head prompt, and the time since when it is the head.

        All are zero if no prompt is incomplete.
        """
        for request in self._prefills.values():
            return request.prefill_tokens, request.prefill_contexts, self.head_since_s
        return 0, 0.0, 0.0

    def write(self, table: npt.NDArray[np.float64]) -> None:
        """Write the rank's columns of the rank table, PREFILL_TOKENS to DECODING_KV_TOKENS."""
        requests = len(self._requests)
        _COLUMNS.pack_into(
            table.data,
            _ROW_BYTES * self.slot + _FIRST_BYTE,
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
        """Blocks held by all requests; halves are rounded up, as the source does."""
        blocks = (self._shared_blocks + self._own_blocks) * MICRO - self._discount_micro
        return (blocks + MICRO // 2) // MICRO

    def prefill_left(
        self, now_s: float, seconds: Callable[[Footprint], float]
    ) -> tuple[float, float, float, float]:
        """Return the predicted tokens and contexts left of all prompts, and of the current one.

        `seconds` returns the predicted duration of a prompt, which starts when it is booked and the
        prompt before it is complete.
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
        """Assume complete the prompts with a predicted duration that has passed.

        `seconds`: see `prefill_left`. O(such prompts).
        """
        while self._prefills:
            request_id, prompt = next(iter(self._prefills.items()))
            ended_s = self.head_since_s + seconds(prompt.footprint)
            if ended_s > now_s:
                return
            self._begin_decoding(request_id, ended_s)
            self._unreported[request_id] = prompt

    def add(
        self, request_id: BookingId, footprint: Footprint, now_s: float, ends: Ends = ()
    ) -> None:
        """Book a request. Its id must be new here.

        `ends`: recently ended requests of the rank. O(nodes on its path).
        """
        assert request_id not in self._requests
        end, change = self._trie.add(self.slot, footprint.sequence_hashes)
        prefill_tokens, prefill_contexts = footprint.prefill_work
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
        """Mark a request's prompt as reported complete. Idempotent."""
        if request_id in self._prefills:
            self._begin_decoding(request_id, now_s)
            self.active_prefill_tokens -= self._requests[request_id].prefill_tokens
        elif (unreported := self._unreported.pop(request_id, None)) is not None:
            self.active_prefill_tokens -= unreported.prefill_tokens

    def add_output_blocks(
        self, request_id: BookingId, blocks: int, decay_fraction: float | None = None
    ) -> None:
        """Add output blocks to a request.

        `decay_fraction` is the new weight of every block that only this request holds. If None, it
        is the remaining part of the expected output, if a length is expected.
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
        """Return whether a request is booked and its prompt is reported or assumed complete."""
        return request_id in self._requests and request_id not in self._prefills

    def footprint(self, request_id: BookingId) -> Footprint:
        """Return the footprint with which a request was booked."""
        return self._requests[request_id].footprint

    def take_prediction(self, request_id: BookingId) -> Prediction | None:
        """Return the prediction for a request. Returns None after the first call."""
        request = self._requests[request_id]
        is_first, request.is_compared = not request.is_compared, True
        if not is_first:
            return None
        return Prediction(
            request.footprint, request.in_flight_blocks, request.ends, request.booked_s
        )

    def progress(self, request_id: BookingId) -> Progress:
        """Return the reported progress of a request."""
        request = self._requests[request_id]
        is_complete = self.is_reported_complete(request_id)
        return Progress(is_complete, request.output_blocks, request.decay_fraction)

    def is_reported_complete(self, request_id: BookingId) -> bool:
        """Return whether a request's prompt was reported complete."""
        return not (request_id in self._prefills or request_id in self._unreported)

    def free(self, request_id: BookingId, now_s: float) -> None:
        """End a request, whether or not its prefill was reported complete. O(nodes on its path)."""
        request = self._requests[request_id]
        self.prefill_complete(request_id, now_s)
        del self._requests[request_id]
        self.decoding_kv_tokens -= request.kv_tokens
        change = self._trie.remove(self.slot, request.end)
        self._shared_blocks -= change.blocks
        self._own_blocks -= request.own_blocks
        self._discount_micro -= change.discount_micro + request.own_discount_micro

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        requests = self._requests.values()
        names = [{int(each) for each in request.footprint.sequence_hashes} for request in requests]
        assert self._shared_blocks == len(set().union(*names))
        assert self._own_blocks == sum(r.own_blocks for r in requests)
        queued, unreported = self._prefills.values(), self._unreported.values()
        assert self.queued_tokens == sum(p.prefill_tokens for p in queued)
        assert self.queued_contexts == sum(p.prefill_contexts for p in queued)
        unreported_tokens = sum(p.prefill_tokens for p in unreported)
        assert self.active_prefill_tokens == self.queued_tokens + unreported_tokens
        assert not self._prefills.keys() & self._unreported.keys()
        assert self._unreported.keys() <= self._requests.keys()
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
        self._discount_micro += self._trie.weigh(self.slot, request.end, weight_micro)
