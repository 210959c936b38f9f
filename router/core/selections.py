"""Selections that may become reservations: chosen, not reserved, and kept for a while.

A select with an id stores what its reservation needs; a later reserve with that id reserves exactly
that rank, without sending the prompt again.
"""

from collections import OrderedDict
from typing import TypeAlias

from msgspec import Struct, structs

from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import HashArray, Rank, Scope
from router.sequence.active.prompt import CallerHashes

_ENTRY_BYTES = 2_048
"""Approximate memory of a selection without its hashes, in bytes."""

Key: TypeAlias = tuple[Scope, str]


class SelectionLimits(Struct, frozen=True):
    """Lifetime and limits of selections; beyond a limit the oldest are dropped first."""

    ttl_s: float = 120.0
    max_entries: int = 4_096
    max_bytes: int = 256 * 1024 * 1024


class Selection(Struct, frozen=True, eq=False):
    """A selection: its reservation request, and the hashes of its prompt.

    `block_hashes`: None if `sequence_hashes` also name the blocks in caches. `session`: the request
    without its prompt, if it belongs to a session.
    """

    booking: ReserveRequest
    sequence_hashes: HashArray
    block_hashes: HashArray | None
    session: SelectRequest | None

    @classmethod
    def of(
        cls, request: SelectRequest, rank: Rank, public_hashes: HashArray, sent: CallerHashes | None
    ) -> "Selection":
        """Return the selection of `rank`. O(1).

        `public_hashes`: those of its prompt for that rank; `sent`: those of its caller, if any.
        """
        booking = ReserveRequest(
            model_name=request.model_name,
            routing_group=request.routing_group,
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
            isl_tokens=request.isl_tokens,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            phase=request.phase,
            request_id=request.selection_id,
            expected_output_tokens=request.expected_output_tokens,
            router_config_override=request.router_config_override,
            slo_ttft_ms=request.slo_ttft_ms,
            slo_tpot_ms=request.slo_tpot_ms,
        )
        session = _session(request)
        if sent is not None:
            return cls(booking, sent.sequence_hashes, sent.block_hashes, session)
        isl_tokens = 0 if request.token_ids is None else len(request.token_ids)
        return cls(structs.replace(booking, isl_tokens=isl_tokens), public_hashes, None, session)

    @property
    def request(self) -> ReserveRequest:
        """The request that reserves it. O(hashes)."""
        blocks = None if self.block_hashes is None else self.block_hashes.tolist()
        hashes = self.sequence_hashes.tolist()
        return structs.replace(self.booking, sequence_hashes=hashes, block_hashes=blocks)

    @property
    def size_bytes(self) -> int:
        """The approximate memory it takes, in bytes."""
        arrays = (self.sequence_hashes, self.block_hashes)
        return _ENTRY_BYTES + sum(each.nbytes for each in arrays if each is not None)


def _session(request: SelectRequest) -> SelectRequest | None:
    if request.session_id is None:
        return None
    return SelectRequest(
        model_name=request.model_name,
        routing_group=request.routing_group,
        session_id=request.session_id,
        session_is_hint=request.session_is_hint,
        session_is_final=request.session_is_final,
        affinity_target=request.affinity_target,
    )


class Selections:
    """Pending selections, oldest first; `counts`: outcomes of the others."""

    __slots__ = ("_bytes", "_limits", "_pending", "counts")

    def __init__(self, limits: SelectionLimits) -> None:
        self._limits = limits
        self._pending: OrderedDict[Key, tuple[float, Selection]] = OrderedDict()
        self._bytes = 0
        self.counts = {"reserved": 0, "replaced": 0, "expired": 0, "evicted": 0}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of all selections, in bytes."""
        return self._bytes

    def keep(self, key: Key, selection: Selection, now_s: float) -> None:
        """Keep a selection, and drop an older one with the same key. O(1), amortised."""
        self.expire(now_s)
        if key in self._pending:
            self._drop(key, "replaced")
        self._pending[key] = (now_s + self._limits.ttl_s, selection)
        self._bytes += selection.size_bytes
        while len(self) > self._limits.max_entries or self._bytes > self._limits.max_bytes:
            self._drop(next(iter(self._pending)), "evicted")

    def find(self, key: Key, now_s: float) -> Selection | None:
        """Return a pending selection, or None if it is expired, reserved already or unknown."""
        self.expire(now_s)
        found = self._pending.get(key)
        return None if found is None else found[1]

    def reserved(self, key: Key) -> None:
        """Remove a selection that became a reservation."""
        if key in self._pending:
            self._drop(key, "reserved")

    def expire(self, now_s: float) -> None:
        """Remove the selections that are too old."""
        while self._pending:
            key, (expires_s, _) = next(iter(self._pending.items()))
            if expires_s > now_s:
                return
            self._drop(key, "expired")

    def check_invariants(self) -> None:
        """Raise AssertionError if the counters differ from the contents."""
        kept = [selection for _, selection in self._pending.values()]
        assert self._bytes == sum(each.size_bytes for each in kept)
        assert self._bytes <= self._limits.max_bytes
        assert len(self) <= self._limits.max_entries
        times_s = [expires_s for expires_s, _ in self._pending.values()]
        assert times_s == sorted(times_s)

    def _drop(self, key: Key, why: str) -> None:
        _, selection = self._pending.pop(key)
        self._bytes -= selection.size_bytes
        self.counts[why] += 1
