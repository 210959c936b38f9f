"""The root application of a process: what every HTTP request goes through, in this order.

    request ─▶ ids ─▶ admission ─▶ hot route? ─yes─▶ body, within limits ─▶ its handler ─▶ answer
                                            └─no──▶ the FastAPI application

A hot request that came whole is answered below ASGI (`hot_protocol.py`), in the same order.
Whatever is refused on the way is answered here, in the shape of `router/http/answers.py`.
"""

from msgspec import structs
from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import BodyTooLargeError, KvRouterError
from router.http.answers import Answer, refusal, warned
from router.http.exchange import read_exchange, send_answer, whole_exchange
from router.http.hot import HotRoute, HotRoutes, Later
from router.http.ids import answering, ids_of, with_ids
from router.metrics import RouterMetrics
from router.process.request_ids import ANSWERED, RequestIds
from router.security.caller import Caller
from router.security.errors import TooManyRequestsError
from router.security.guard import Guard
from router.security.guarded import admit
from router.service_config import ServiceConfig


class Front:
    """`app` answers what is none of the hot routes; None: there are none."""

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
        self._in_flight = 0
        self._counters: dict[tuple[str, int], Counter] = {}

    def reconfigure(self, config: ServiceConfig) -> None:
        """Go on with other limits."""
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ids = ids_of(scope["headers"])
        ANSWERED.set(ids)
        self._in_flight += 1
        try:
            await self._answer(scope, receive, answering(ids, send))
        finally:
            self._in_flight -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.hot_route(scope)
        try:
            caller = self._admit(scope)
            if route is None:
                scope.setdefault("state", {})["caller"] = caller
                await self._app(scope, receive, send)
                return
            answer = await self._handled(route, scope, receive, caller)
        except KvRouterError as error:
            answer = self._refused(error)
        await send_answer(self._counted(route, answer), send)

    def hot_route(self, scope: Scope) -> HotRoute | None:
        """The hot route that answers this; None: none of those."""
        return None if self._hot is None else self._hot.find(scope["method"], scope["path"])

    def answer_now(
        self, route: HotRoute, scope: Scope, body: bytes, receive: Receive
    ) -> Answer | Later:
        """Answer a request whose body is here, all of it, as `__call__` would."""
        ids = ids_of(scope["headers"])
        token = ANSWERED.set(ids)
        try:
            answer, unknown = self._begun(route, scope, body, receive)
            if isinstance(answer, Answer):
                return with_ids(ids, self._counted(route, self._warned(route, answer, unknown)))
            return self._finished(route, ids, answer, unknown)
        finally:
            ANSWERED.reset(token)

    def _begun(
        self, route: HotRoute, scope: Scope, body: bytes, receive: Receive
    ) -> tuple[Answer | Later, list[str]]:
        try:
            caller = self._admit(scope)
            if len(body) > self._config.body_limit_bytes:
                raise BodyTooLargeError(self._config.body_limit_bytes)
            exchange = whole_exchange(scope, receive, route.request_id, body, caller)
            return route.handler(exchange), exchange.unknown
        except KvRouterError as error:
            return self._refused(error), []

    async def _finished(
        self, route: HotRoute, ids: RequestIds, later: Later, unknown: list[str]
    ) -> Answer:
        ANSWERED.set(ids)
        self._in_flight += 1
        try:
            answer = self._warned(route, await later, unknown)
        except KvRouterError as error:
            answer = self._refused(error)
        finally:
            self._in_flight -= 1
        return with_ids(ids, self._counted(route, answer))

    async def _handled(
        self, route: HotRoute, scope: Scope, receive: Receive, caller: Caller
    ) -> Answer:
        exchange = await read_exchange(scope, receive, route.request_id, self._config, caller)
        unknown = exchange.unknown
        later = route.handler(exchange)
        del exchange  # with a body that may be long, while its request waits
        answer = later if isinstance(later, Answer) else await later
        return self._warned(route, answer, unknown)

    def _warned(self, route: HotRoute, answer: Answer, unknown: list[str]) -> Answer:
        if not unknown:
            return answer
        self._metrics.unknown_fields.labels("http", route.path).inc(len(unknown))
        return structs.replace(answer, body=warned(answer.body, unknown))

    def _admit(self, scope: Scope) -> Caller:
        """Who asks: what every request has before anybody reads it. May raise any KvRouterError."""
        if self._in_flight > self._config.max_requests and not self._is_open(scope):
            raise TooManyRequestsError(self._config.max_requests)
        return admit(self._guard, scope)

    def _is_open(self, scope: Scope) -> bool:
        """Probes are answered however much there is to do."""
        return self._guard.is_open(scope["method"], scope["path"])

    def _refused(self, error: KvRouterError) -> Answer:
        self._metrics.refusals.labels("http", error.code).inc()
        return refusal(error)

    def _counted(self, route: HotRoute | None, answer: Answer) -> Answer:
        path = "" if route is None else route.path
        counter = self._counters.get((path, answer.status))
        if counter is None:
            counter = self._metrics.requests.labels("http", path, str(answer.status))
            self._counters[path, answer.status] = counter
        counter.inc()
        return answer
