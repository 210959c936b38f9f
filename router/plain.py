"""Requests that ask for a rank and nothing else, in the same words again and again.

    words ─▶ PlainRequest, once ─┐
    tokens ──────────────────────┴─▶ PlainPlacement: the chosen candidate alone

Whoever asks for more gets a `Placement`, by the general way or by the short cut.
"""

from msgspec import Struct, structs

from router.indexer.base import OverlapScores
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.requests import SelectRequest
from router.protocol.values import Rank, Scope
from router.sequence.hashing import hash_seed


class PlainRequest(Struct, frozen=True, eq=False):
    """Such a request without its tokens. `seed`: of their local hashes."""

    scope: Scope
    seed: int
    expected_output_tokens: int | None
    request_id: str | None


class PlainPlacement(Struct, frozen=True, eq=False):
    """Where it goes. `row`: the candidate's terms, as a `TermTable` has them. `overlaps`: of all
    ranks; None where nothing that callers are told depends on them.
    """

    worker: WorkerAnnouncement
    rank: Rank
    row: list[float]
    isl_tokens: int
    policy: str
    overlaps: OverlapScores | None


def plain_request(request: SelectRequest) -> PlainRequest | None:
    """What is asked beside the tokens; None: more than for a rank."""
    plain = SelectRequest(
        model_name=request.model_name,
        routing_group=request.routing_group,
        cache_salt=request.cache_salt,
        expected_output_tokens=request.expected_output_tokens,
        request_id=request.request_id,
    )
    if structs.replace(request, token_ids=None) != plain:
        return None
    seed = hash_seed(None, request.cache_salt)
    return PlainRequest(request.scope, seed, request.expected_output_tokens, request.request_id)
