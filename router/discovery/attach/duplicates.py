"""Several URLs of one engine: it is counted once."""

from collections.abc import Mapping

from router.discovery.attach import sentences
from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.followed_engine import Duplicate, FollowedEngine
from router.discovery.attach.proof import RankProof
from router.protocol.workers import WorkerRegistration

SAME_SOCKETS = "same event sockets"
SAME_PROCESS = "same process, same counters"
SAME_REQUEST = "one request was seen on both"


def is_duplicate(
    followed: FollowedEngine,
    seen: ObservedServer,
    registration: WorkerRegistration,
    others: Mapping[int, FollowedEngine],
) -> bool:
    """Return whether an engine is another one too: was found to be, or has its sockets or process.

    Of two URLs, the one that was registered first counts.
    """
    if followed.duplicate is not None:
        original = others.get(followed.duplicate.worker_id)
        if original is not None and _counts(original):
            return True
        followed.duplicate, followed.proofs = None, {}
    for worker_id, other in others.items():
        evidence = _evidence(seen, registration, other)
        if other is not followed and evidence is not None:
            followed.duplicate = Duplicate(worker_id, other.engine.url, evidence)
            return True
    return False


def _counts(other: FollowedEngine) -> bool:
    return other.is_up and other.duplicate is None


def _evidence(
    seen: ObservedServer, registration: WorkerRegistration, other: FollowedEngine
) -> str | None:
    known, other_seen = other.known, other.seen
    if known is None or other_seen is None or not _counts(other):
        return None
    if _sockets(registration) & _sockets(known.registration):
        return SAME_SOCKETS
    is_process = seen.started_s is not None and seen.started_s == other_seen.started_s
    has_served = bool(seen.served_tokens) and seen.served_tokens == other_seen.served_tokens
    return SAME_PROCESS if is_process and has_served else None


def _sockets(registration: WorkerRegistration) -> set[str]:
    return set((registration.kv_events_endpoints or {}).values())


def is_seen_elsewhere(
    followed: FollowedEngine,
    proofs: Mapping[int, RankProof],
    others: Mapping[int, FollowedEngine],
) -> bool:
    """Return whether the sockets of an engine that was named before published its requests.

    One that was named later is then the duplicate.
    """
    mine, places = followed.engine.worker_id, list(others)
    found = {rank.worker_id for proof in proofs.values() for rank in proof.holders} - {mine}
    for worker_id in sorted(found & others.keys(), key=places.index):
        other = others[worker_id]
        if places.index(mine) < places.index(worker_id):
            other.duplicate = Duplicate(mine, followed.engine.url, SAME_REQUEST)
        elif other.duplicate is None:
            followed.duplicate = Duplicate(worker_id, other.engine.url, SAME_REQUEST)
            return True
    return False


def difference(followed: FollowedEngine, others: Mapping[int, FollowedEngine]) -> str | None:
    """Return how an engine differs from the first one; None if it does not."""
    first = next((each for each in others.values() if _counts(each)), None)
    if first is None or first is followed or first.known is None or followed.known is None:
        return None
    if not followed.is_up:
        return None
    mine, its = followed.known.registration, first.known.registration
    return sentences.beside(mine, its, first.engine.url)
