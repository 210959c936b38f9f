"""The root application of a process: what every HTTP request goes through, in this order.

    request ─▶ ids ─▶ admission ─▶ hot route? ─yes─▶ body, within limits ─▶ its handler ─▶ answer
                                            └─no──▶ the FastAPI application

Whatever is refused on the way is answered here, in the shape of `router/http/answers.py`.
"""

from msgspec import structs
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import KvRouterError
from router.http.answers import Answer, refusal, warned
from router.http.exchange import read_exchange, send_answer
from router.http.hot import HotRoute, HotRoutes
from router.http.ids import answering, ids_of
from router.metrics import RouterMetrics
from router.process.request_ids import ANSWERED
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
        route = None if self._hot is None else self._hot.find(scope["method"], scope["path"])
        try:
            caller = self._admit(scope)
            if route is None:
                scope.setdefault("state", {})["caller"] = caller
                await self._app(scope, receive, send)
                return
            answer = await self._handled(route, scope, receive, caller)
        except KvRouterError as error:
            self._metrics.refusals.labels("http", error.code).inc()
            answer = refusal(error)
        self._count(route, answer)
        await send_answer(answer, send)

    async def _handled(
        self, route: HotRoute, scope: Scope, receive: Receive, caller: Caller
    ) -> Answer:
        exchange = await read_exchange(scope, receive, route.request_id, self._config, caller)
        unknown = exchange.unknown
        later = route.handler(exchange)
        del exchange  # with a body that may be long, while its request waits
        answer = later if isinstance(later, Answer) else await later
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

    def _count(self, route: HotRoute | None, answer: Answer) -> None:
        path = "" if route is None else route.path
        self._metrics.requests.labels("http", path, str(answer.status)).inc()
