"""The root application of a process: what every HTTP request goes through, in this order.

    request ─▶ ids ─▶ admission ─▶ hot route? ─yes─▶ body, within limits ─▶ its handler ─▶ answer
                                            └─no──▶ the FastAPI application

A hot request that came whole is answered below ASGI (`hot_protocol.py`), in the same order.
Whatever is refused on the way is answered here, in the shape of `router/http/answers.py`.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from router.body_errors import BodyTooLargeError
from router.errors import KvRouterError
from router.http.answers import Answer, refusal, warned
from router.http.exchange import ID_HEADER, Exchange, Head, read_whole_body, send_answer
from router.http.hot import HotRoute, HotRoutes, Later
from router.http.ids import answering, ids_of, with_ids
from router.http.known_requests import KnownRequests
from router.http.turns import Turn
from router.metrics import RouterMetrics
from router.process.request_ids import ANSWERED, RequestIds
from router.security.caller import ANYBODY, Caller
from router.security.errors import TooManyRequestsError
from router.security.guard import Guard
from router.security.guarded import admit
from router.service_config import ServiceConfig


class _InFlight:
    """How many requests are being answered."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Place:
    """One of them, from when it is admitted on; also one whose answer nobody ever waits for leaves
    again.
    """

    __slots__ = ("_in_flight",)

    def __init__(self, in_flight: _InFlight) -> None:
        self._in_flight: _InFlight | None = in_flight
        in_flight.count += 1

    def leave(self) -> None:
        """It is answered."""
        if self._in_flight is not None:
            self._in_flight.count -= 1
            self._in_flight = None

    __del__ = leave


class Front:
    """`app` answers what is none of the hot routes; `hot` is None where there are none."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServiceConfig,
        metrics: RouterMetrics,
        guard: Guard,
        hot: HotRoutes | None = None,
    ) -> None:
        self._app = app
        self._hot = hot
        self._config = config
        self._metrics = metrics
        self._guard = guard
        self._in_flight = _InFlight()
        self._requests = metrics.requests
        self.known_heads = KnownRequests()
        self.turn = Turn()

    def reconfigure(self, config: ServiceConfig) -> None:
        """Go on with other limits."""
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = Head.of_scope(scope)
        ids = ids_of(head.pairs)
        ANSWERED.set(ids)
        place = _Place(self._in_flight)
        try:
            await self._answer(head, scope, receive, answering(ids, send))
        finally:
            place.leave()

    async def _answer(self, head: Head, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.hot_route(head.method, head.path)
        try:
            caller = self._admit(head, self._in_flight.count - 1)
            if route is None:
                scope.setdefault("state", {})["caller"] = caller
                await self._app(scope, receive, send)
                return
            answer = await self._handled(route, head, receive, caller)
        except KvRouterError as error:
            answer = self._refused(error)
        self._requests.count("http", "" if route is None else route.path, answer.status)
        await send_answer(answer, send)

    def hot_route(self, method: str, path: str) -> HotRoute | None:
        """The hot route that answers this; None: none of those."""
        return None if self._hot is None else self._hot.find(method, path)

    def answer_now(
        self, route: HotRoute, head: Head, body: bytes, receive: Receive
    ) -> Answer | Later:
        """Answer a request whose body is here, all of it, as `__call__` would."""
        plainly = self._answer_plain(route, head, body)
        if plainly is not None:
            return plainly
        ids = RequestIds(head.plain_id) if head.is_plain else ids_of(head.pairs)
        unknown: list[str] = []
        token = ANSWERED.set(ids)
        try:
            caller = self._admit(head, self._in_flight.count)
            if len(body) > self._config.body_limit_bytes:
                raise BodyTooLargeError(self._config.body_limit_bytes)
            exchange = Exchange(head, route.request_id, body, receive, caller, unknown)
            answer = route.handler(exchange)
        except KvRouterError as error:
            answer, unknown = self._refused(error), []
        finally:
            ANSWERED.reset(token)
        if not isinstance(answer, Answer):
            return self._finished(route, ids, answer, unknown, _Place(self._in_flight))
        self._requests.count("http", route.path, answer.status)
        answer = self._warned(route, answer, unknown) if unknown else answer
        if not head.is_plain:
            return with_ids(ids, answer)
        return answer if head.plain_id is None else answer.with_header(ID_HEADER, head.plain_id)

    def _answer_plain(self, route: HotRoute, head: Head, body: bytes) -> Answer | None:
        """Answer what need not be looked at; None: it has to be, and nothing has changed.

        For 512 tokens all that `answer_now` does else would take as long again.
        """
        if route.plain is None or not head.is_plain or not self._guard.is_idle:
            return None
        config = self._config
        if self._in_flight.count >= config.max_requests or len(body) > config.body_limit_bytes:
            return None
        answer = route.plain(head, head.plain_id, body)
        if answer is None:
            return None
        self._requests.count("http", route.path, answer.status)
        return answer if head.plain_id is None else answer.with_header(ID_HEADER, head.plain_id)

    async def _finished(
        self, route: HotRoute, ids: RequestIds, later: Later, unknown: list[str], place: "_Place"
    ) -> Answer:
        ANSWERED.set(ids)
        try:
            answer = self._warned(route, await later, unknown)
        except KvRouterError as error:
            answer = self._refused(error)
        finally:
            place.leave()
        self._requests.count("http", route.path, answer.status)
        return with_ids(ids, answer)

    async def _handled(
        self, route: HotRoute, head: Head, receive: Receive, caller: Caller
    ) -> Answer:
        unknown: list[str] = []
        body = await read_whole_body(head, receive, self._config)
        exchange = Exchange(head, route.request_id, body, receive, caller, unknown)
        del body
        later = route.handler(exchange)
        del exchange  # with a body that may be long, while its request waits
        answer = later if isinstance(later, Answer) else await later
        return self._warned(route, answer, unknown)

    def _warned(self, route: HotRoute, answer: Answer, unknown: list[str]) -> Answer:
        if not unknown:
            return answer
        self._metrics.unknown_fields.labels("http", route.path).inc(len(unknown))
        return Answer(warned(answer.body, unknown), answer.status, answer.headers)

    def _admit(self, head: Head, others: int) -> Caller:
        """Who asks, beside so many others: what every request has before anybody reads it. May
        raise any KvRouterError.
        """
        if others >= self._config.max_requests and not self._is_open(head):
            raise TooManyRequestsError(self._config.max_requests)
        if head.is_plain and self._guard.is_idle:
            return ANYBODY
        return admit(self._guard, head.method, head.path, head.pairs)

    def _is_open(self, head: Head) -> bool:
        """Probes are answered however much there is to do."""
        return self._guard.is_open(head.method, head.path)

    def _refused(self, error: KvRouterError) -> Answer:
        self._metrics.refusals.labels("http", error.code).inc()
        return refusal(error)
