"""Admission of requests: their number in flight, their callers, and the sizes of their bodies."""

from math import inf

from msgspec import Struct
from starlette.types import Scope

from router.errors import KvRouterError
from router.runtime.http_server.exchange import Exchange, RequestHead
from router.runtime.http_server.overload import Overload
from router.runtime.process.errors import BodyTooLargeError, UnsupportedMediaTypeError
from router.runtime.security.errors import TooManyRequestsError
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import (
    NO_ORIGINS,
    admit_head,
    admit_request,
    refuse_forms,
)


class TooMuchAtOnceError(KvRouterError):
    """The bodies of all requests in flight reach the limit."""

    code = "too_much_at_once"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limit_bytes: float) -> None:
        super().__init__(f"bodies: too much in flight (allowed: {limit_bytes} bytes in all)")
        self.limit_bytes = limit_bytes


class AdmissionLimits(Struct, frozen=True):
    """Limits of requests. `bodies_limit_bytes`: of all bodies in flight together."""

    max_requests: int
    body_limit_bytes: int
    body_timeout_s: float
    bodies_limit_bytes: float = inf


class Admission:
    """The requests in flight, and their limits, which may be replaced.

    `in_flight`: their number. `body_bytes`: bytes of the bodies of hot requests among them.
    `overload`: of the event loop that answers them. `origins`: of other sites whose pages may send
    requests.
    """

    __slots__ = ("_guard", "body_bytes", "in_flight", "limits", "origins", "overload")

    def __init__(
        self, guard: Guard, limits: AdmissionLimits, origins: frozenset[bytes] = NO_ORIGINS
    ) -> None:
        self._guard = guard
        self.origins = origins
        self.limits = limits
        self.in_flight = 0
        self.body_bytes = 0
        self.overload = Overload()

    def check(self, scope: Scope) -> None:
        """Admit a request of the application that is counted in `in_flight` already.

        Raises the error that refuses it. Probes are admitted under any load.
        """
        most = self.limits.max_requests
        if self.in_flight > most and not self._guard.is_open(scope["method"], scope["path"]):
            raise TooManyRequestsError(most)
        admit_request(self._guard, scope, self.origins)

    def admit(self, exchange: Exchange) -> None:
        """Check the head of a hot request, and what has come of its body.

        Raises the error that refuses it. The headers of a head are checked once, and again whenever
        the tokens are replaced. Probes are admitted under any load.
        """
        head, limits, size_bytes = exchange.head, self.limits, len(exchange.received)
        if self.overload.is_on or self.in_flight >= limits.max_requests:
            self._check_load(head)
        exchange.caller = admit_head(
            self._guard, head, head.method, head.route.path, head.pairs, self.origins
        )
        if max(size_bytes, exchange.length_bytes) > limits.body_limit_bytes:
            raise BodyTooLargeError(limits.body_limit_bytes)
        if self.body_bytes + size_bytes > limits.bodies_limit_bytes:
            raise TooMuchAtOnceError(limits.bodies_limit_bytes)
        if not head.is_checked:
            _check_type(head)

    def _check_load(self, head: RequestHead) -> None:
        """Raise TooManyRequestsError or OverloadedError if there is too much work for this request.

        Probes are admitted under any load.
        """
        most = self.limits.max_requests
        if self.in_flight >= most and not self._guard.is_open(head.method, head.route.path):
            raise TooManyRequestsError(most)
        if head.route.is_new_work:
            self.overload.check()

    def enter(self, exchange: Exchange) -> None:
        """Count an admitted request that waits, and what has come of its body, until it leaves.

        A request that is answered at once need not be counted.
        """
        self.in_flight += 1
        exchange.is_counted = True
        exchange.held_bytes = len(exchange.received)
        self.body_bytes += exchange.held_bytes

    def hold(self, exchange: Exchange) -> None:
        """Count the received bytes of a body until its request leaves.

        Raises BodyTooLargeError, TooMuchAtOnceError.
        """
        size_bytes, limits = len(exchange.received), self.limits
        self.body_bytes += size_bytes - exchange.held_bytes
        exchange.held_bytes = size_bytes
        if size_bytes > limits.body_limit_bytes:
            raise BodyTooLargeError(limits.body_limit_bytes)
        if self.body_bytes > limits.bodies_limit_bytes:
            raise TooMuchAtOnceError(limits.bodies_limit_bytes)

    def leave(self, exchange: Exchange) -> None:
        """Uncount a request that has ended."""
        self.in_flight -= 1
        self.body_bytes -= exchange.held_bytes
        exchange.is_counted = False


def _check_type(head: RequestHead) -> None:
    """Raise UnsupportedMediaTypeError if the route does not accept bodies of this type."""
    allowed = head.route.media_types
    if allowed and head.media_type not in allowed:
        raise UnsupportedMediaTypeError(head.header(b"content-type"), allowed)
    if not allowed and head.method != "GET":
        refuse_forms(head.pairs)
    head.is_checked = True
