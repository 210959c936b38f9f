"""A choice as headers, for proxies that ask before they send a request on: Envoy's ext_authz,
NGINX's auth_request. They copy headers of an answer, and read no body.
"""

from collections.abc import Callable

from router.http.answers import Answer, answer
from router.protocol.replies import Decision

ASKED = b"answer=headers"

ENDPOINT_HEADER = b"x-gateway-destination-endpoint"
"""Host and port, as the gateway API's inference extension writes them."""

DP_RANK_HEADER = b"x-data-parallel-rank"
"""As vLLM's server reads it."""

WORKER_ID_HEADER = b"x-worker-id"
REQUEST_ID_HEADER = b"x-request-id"


def decision_answer(query_string: bytes) -> Callable[[Decision], Answer]:
    """How a query wants to be told a decision: `answer=headers`, or as JSON."""
    if query_string and ASKED in query_string.split(b"&"):
        return header_answer
    return answer


def header_answer(decision: Decision) -> Answer:
    """A decision without a body. Endpoints lose their scheme, and what is no header's."""
    endpoint = decision.endpoint.partition("://")[2] or decision.endpoint
    headers = [
        (ENDPOINT_HEADER, _printable(endpoint.partition("/")[0])),
        (DP_RANK_HEADER, b"%d" % decision.dp_rank),
        (WORKER_ID_HEADER, b"%d" % decision.worker_id),
    ]
    if decision.request_id is not None:
        headers.append((REQUEST_ID_HEADER, _printable(decision.request_id)))
    return Answer(b"", 200, tuple(headers))


def _printable(text: str) -> bytes:
    return "".join(each for each in text if "!" <= each <= "~").encode()
