"""Headers of a request that is sent on, and of its answer: what belongs to one connection stays.

What is to be sent on is decided here alone; lengths and hosts are said anew by who sends.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from router.body_errors import BodyTooLargeError, UnsupportedMediaTypeError
from router.protocol.replies import Decision

Pairs = Sequence[tuple[bytes, bytes]]

WORKER_ID = b"x-worker-id"
WORKER_INSTANCE_ID = b"x-worker-instance-id"
PREFILL_INSTANCE_ID = b"x-prefill-instance-id"
DP_RANK = b"x-data-parallel-rank"
SESSION_ID = b"x-session-id"
DYNAMO_SESSION_ID = b"x-dynamo-session-id"
REQUEST_ID = b"x-request-id"
PREFILL_WORKER_ID = b"x-prefill-worker-id"
PREFILL_PREDICTED_TOKENS = b"x-prefill-predicted-cached-tokens"
PREFILL_CACHED_TOKENS = b"x-prefill-cached-tokens"
CACHED_TOKENS = b"x-predicted-cached-tokens"
ATTEMPTS = b"x-forward-attempts"

JSON = b"application/json"

_OF_ONE_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_SAID_ANEW_TO_ENGINES = frozenset(
    (
        b"host",
        b"content-length",
        b"content-encoding",
        b"expect",
        b"accept-encoding",  # streams are read on their way
        WORKER_ID,
        WORKER_INSTANCE_ID,
        PREFILL_INSTANCE_ID,
        DP_RANK,
        REQUEST_ID,
    )
)
_SAID_ANEW_TO_CLIENTS = frozenset(
    (
        b"content-length",
        b"server",
        b"date",
        WORKER_ID,
        DP_RANK,
        CACHED_TOKENS,
        REQUEST_ID,
        PREFILL_WORKER_ID,
        PREFILL_PREDICTED_TOKENS,
        PREFILL_CACHED_TOKENS,
    )
)


def header(pairs: Pairs, name: bytes) -> str | None:
    """A header's value, the first of them; its name in lower case."""
    for each, value in pairs:
        if each == name:
            return value.decode("latin-1")
    return None


def check_body(pairs: Pairs, limit_bytes: int) -> None:
    """What a head says of the body that follows. Raises BodyTooLargeError, and
    UnsupportedMediaTypeError: what is no JSON, any page that a browser shows may send.
    """
    kind, length = b"", b""
    for name, value in pairs:
        if name == b"content-type":
            kind = value
        elif name == b"content-length":
            length = value
    if int(length or b"0") > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    if kind != JSON and kind.partition(b";")[0].strip().lower() != JSON:
        raise UnsupportedMediaTypeError(kind.decode("latin-1") or None)


def to_engine(
    pairs: Pairs, decision: Decision, request_id: str, authorization: bytes | None
) -> tuple[tuple[bytes, bytes], ...]:
    """Headers for an engine. `authorization`: ours; None: the client's own goes on."""
    sent = [*_passed_on(tuple(pairs), _SAID_ANEW_TO_ENGINES)]
    if authorization is not None:
        sent = [pair for pair in sent if pair[0] != b"authorization"]
    if authorization:
        sent.append((b"authorization", authorization))
    sent.append((DP_RANK, b"%d" % decision.dp_rank))
    sent.append((REQUEST_ID, request_id.encode("ascii")))
    return tuple(sent)


def to_client(pairs: Pairs, decision: Decision, attempts: int) -> list[tuple[bytes, bytes]]:
    """Headers of an answer: the engine's, and by what was decided. The id of the request is said
    by who answers.
    """
    cached_tokens = decision.predicted_cached_blocks * decision.block_size
    return [
        *_passed_on(tuple(pairs), _SAID_ANEW_TO_CLIENTS),
        (WORKER_ID, b"%d" % decision.worker_id),
        (DP_RANK, b"%d" % decision.dp_rank),
        (CACHED_TOKENS, b"%d" % cached_tokens),
        (ATTEMPTS, b"%d" % attempts),
    ]


@lru_cache(maxsize=256)
def _passed_on(
    pairs: tuple[tuple[bytes, bytes], ...], said_anew: frozenset[bytes]
) -> tuple[tuple[bytes, bytes], ...]:
    """Without what is of one connection, also by its own word (RFC 9110, 7.6.1)."""
    named = _named_by_connection(value for name, value in pairs if name == b"connection")
    stays = _OF_ONE_CONNECTION | said_anew
    return tuple(pair for pair in pairs if pair[0] not in stays and pair[0] not in named)


def _named_by_connection(values: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for value in values for word in value.split(b","))
