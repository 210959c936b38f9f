"""What is refused of requests that would have to wait; part of the tree in `errors`.

KvRouterError
├── QueueFullError               as much waits as may: the fleet is overloaded
├── TenantQueueFullError         as much of this tenant's waits as its share of the queue
├── QueueTimeoutError            nobody was free within the time that a request may wait
├── WithdrawnError               it was freed while it waited
└── DrainingError                the router is about to end
"""

from router.errors import KvRouterError


class QueueFullError(KvRouterError):
    """As much waits as may: the fleet is overloaded, whoever asks.

    `limit_kind`: what is limited: requests, isl_tokens or cached_tokens. `retry_after_s`: when what
    waits now should be through, at the rate of late.
    """

    code = "queue_full"
    http_status = 529

    def __init__(
        self, policy_class: str, limit_kind: str, current: int, limit: int, retry_after_s: float
    ) -> None:
        super().__init__(
            f"queue {policy_class}: {current} {limit_kind} wait (allowed: at most {limit})"
        )
        self.policy_class = policy_class
        self.limit_kind = limit_kind
        self.current = current
        self.limit = limit
        self.retry_after_s = retry_after_s


class TenantQueueFullError(KvRouterError):
    """The queue is full, and this tenant has its share of it: it asks for too much."""

    code = "tenant_queue_full"
    http_status = 429

    def __init__(
        self,
        tenant: str,
        policy_class: str,
        limit_kind: str,
        current: int,
        share: float,
        retry_after_s: float,
    ) -> None:
        super().__init__(
            f"queue {policy_class}: {current} {limit_kind} of tenant {tenant!r} wait, and it is "
            f"full (allowed: at most {share:g}, an equal share of it)"
        )
        self.tenant = tenant
        self.policy_class = policy_class
        self.limit_kind = limit_kind
        self.current = current
        self.share = share
        self.retry_after_s = retry_after_s


class QueueTimeoutError(KvRouterError):
    """Nobody was free within the time that a request may wait."""

    code = "queue_timeout"
    http_status = 529

    def __init__(self, policy_class: str, waited_s: float, retry_after_s: float) -> None:
        super().__init__(f"queue {policy_class}: no rank was free within {waited_s:.3g} s")
        self.policy_class = policy_class
        self.waited_s = waited_s
        self.retry_after_s = retry_after_s


class WithdrawnError(KvRouterError):
    """The request was freed while it waited."""

    code = "withdrawn"
    http_status = 409

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} was freed while it waited")
        self.request_id = request_id


class DrainingError(KvRouterError):
    """The router is about to end, and nobody can wait in it."""

    code = "draining"
    http_status = 503

    def __init__(self) -> None:
        super().__init__("this router is about to end (allowed: asking another one)")
        self.retry_after_s = 1.0
