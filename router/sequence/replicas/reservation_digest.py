"""A set of reservations with a digest, which two routers can compare in a few bytes."""

from collections.abc import Iterator

from msgspec import msgpack
from xxhash import xxh3_64_intdigest

from router.protocol.replicas import SharedReservation


class ReservationDigest:
    """Reservations by id, and a digest that is updated in O(1) per change.

    Invariant: `digest` is the XOR of the members' fingerprints.
    """

    __slots__ = ("_by_id", "digest")

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[SharedReservation, int]] = {}
        self.digest = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[SharedReservation]:
        return (reservation for reservation, _ in self._by_id.values())

    def get(self, request_id: str) -> SharedReservation | None:
        """Return the reservation of this id, or None if there is none."""
        found = self._by_id.get(request_id)
        return None if found is None else found[0]

    def put(self, reservation: SharedReservation) -> SharedReservation | None:
        """Add a reservation; return the one that it replaces, if any. O(its bytes)."""
        request_id, fingerprint = reservation.request_id, _fingerprint(reservation)
        found = self._by_id.pop(request_id, None)
        self._by_id[request_id] = (reservation, fingerprint)
        if found is None:
            self.digest ^= fingerprint
            return None
        self.digest ^= fingerprint ^ found[1]
        return found[0]

    def pop(self, request_id: str) -> SharedReservation | None:
        """Remove and return a reservation. Returns None if there is none."""
        found = self._by_id.pop(request_id, None)
        if found is None:
            return None
        self.digest ^= found[1]
        return found[0]

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(everything)."""
        digest = 0
        for request_id, (reservation, fingerprint) in self._by_id.items():
            assert reservation.request_id == request_id
            assert fingerprint == _fingerprint(reservation)
            digest ^= fingerprint
        assert digest == self.digest


def _fingerprint(each: SharedReservation) -> int:
    """Return the hash of the fields that every version knows.

    Fields appended in later versions must not be included, or versions could not compare digests.
    """
    progress = each.progress
    known = (
        each.request_id,
        each.rank.worker_id,
        each.rank.dp_rank,
        each.sequence_hashes,
        each.own_blocks,
        each.isl_tokens,
        each.cached_tokens,
        each.block_size,
        progress.is_prefill_complete,
        progress.output_blocks,
        progress.decay_fraction,
    )
    return xxh3_64_intdigest(msgpack.encode(known))
