"""Headers of forwarded requests and of their responses, without hop-by-hop headers.

Only this module decides which headers are forwarded; senders set lengths and hosts anew.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from router.protocol.replies import Decision
from router.runtime.http_server.exchange import encoded_headers

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
DROPPED_FIELDS = b"x-dropped-fields"
API_KEY = b"x-api-key"
"""The header in which Anthropic's clients send their token; engines read `authorization` alone."""

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
        b"accept-encoding",  # event streams are parsed here, so they must not be compressed
        WORKER_ID,
        WORKER_INSTANCE_ID,
        PREFILL_INSTANCE_ID,
        DP_RANK,
        REQUEST_ID,
        API_KEY,
        b"origin",  # pages are allowed here; engines allow all of them
        b"access-control-request-method",
        b"access-control-request-headers",
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
        DROPPED_FIELDS,
        REQUEST_ID,
        PREFILL_WORKER_ID,
        PREFILL_PREDICTED_TOKENS,
        PREFILL_CACHED_TOKENS,
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"access-control-max-age",
    )
)


def header(pairs: Pairs, name: bytes) -> str | None:
    """Return the first value of a header, or None; `name` in lower case."""
    for each, value in pairs:
        if each == name:
            return value.decode("latin-1")
    return None


@lru_cache(maxsize=256)
def to_engine(
    pairs: tuple[tuple[bytes, bytes], ...], dp_rank: int, authorization: bytes | None
) -> tuple[tuple[bytes, bytes], ...]:
    """Return headers for a rank of an engine, without the request id.

    `authorization`: this process's credentials; None: the client's own header is forwarded.
    """
    sent = [*_passed_on(pairs, _SAID_ANEW_TO_ENGINES)]
    if authorization is None and header(pairs, b"authorization") is None:
        authorization = client_key(pairs)
    elif authorization is not None:
        sent = [pair for pair in sent if pair[0] != b"authorization"]
    if authorization:
        sent.append((b"authorization", authorization))
    sent.append((DP_RANK, b"%d" % dp_rank))
    return tuple(sent)


def own_headers(request_id: str) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a single request to an engine."""
    return ((REQUEST_ID, request_id.encode("ascii")),)


def client_key(pairs: Pairs) -> bytes | None:
    """Return the client's `authorization`, or its `x-api-key` as such a header; None without."""
    given = dict(reversed(pairs))
    key = given.get(API_KEY)
    return given.get(b"authorization") or (None if key is None else b"Bearer " + key)


def to_client(
    pairs: Pairs, decision: Decision, attempts: int, *, is_rank_known: bool = True
) -> bytes:
    """Return the lines of a response's headers: the engine's, and those of the decision.

    `is_rank_known`: the engine computed it on the rank of the decision; otherwise neither the rank
    nor its cached tokens are known. The request id is added by the call.
    """
    of_engine = _lines_of_engine(tuple(pairs))
    if not is_rank_known:
        return _OF_WORKER % (of_engine, decision.worker_id, attempts)
    cached_tokens = decision.predicted_cached_blocks * decision.block_size
    return _OF_DECISION % (of_engine, decision.worker_id, decision.dp_rank, cached_tokens, attempts)


_OF_WORKER = b"%%b%b: %%d\r\n%b: %%d\r\n" % (WORKER_ID, ATTEMPTS)

_OF_DECISION = b"%%b%b: %%d\r\n%b: %%d\r\n%b: %%d\r\n%b: %%d\r\n" % (
    WORKER_ID,
    DP_RANK,
    CACHED_TOKENS,
    ATTEMPTS,
)


@lru_cache(maxsize=256)
def _lines_of_engine(pairs: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return encoded_headers(_passed_on(pairs, _SAID_ANEW_TO_CLIENTS))


@lru_cache(maxsize=256)
def _passed_on(
    pairs: tuple[tuple[bytes, bytes], ...], replaced: frozenset[bytes]
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers without those of one connection, also named ones (RFC 9110, 7.6.1)."""
    named = _named_by_connection(value for name, value in pairs if name == b"connection")
    stays = _OF_ONE_CONNECTION | replaced
    return tuple(pair for pair in pairs if pair[0] not in stays and pair[0] not in named)


def _named_by_connection(values: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for value in values for word in value.split(b","))
