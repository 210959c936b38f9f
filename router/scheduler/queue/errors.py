"""Errors of requests that would have to wait; part of the tree in `errors`.

KvRouterError
├── QueueFullError               the queue is at its limit: the fleet is overloaded
├── TenantQueueFullError         the queue is full, and this tenant has its share of it
├── QueueTimeoutError            no rank was free within the time that a request may wait
└── WithdrawnError               the request was freed while it waited
"""

from router.errors import KvRouterError


class QueueFullError(KvRouterError):
    """The queue is at its limit: the fleet is overloaded, for any caller.

    `limit_kind`: the limited quantity: requests, isl_tokens or cached_tokens. `retry_after_s`: the
    estimated time until the present queue is served, at the recent rate.
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
    """The queue is full, and this tenant already has its share of it."""

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
    """No rank was free within the time that a request may wait."""

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
