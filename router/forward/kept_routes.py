"""Requests about responses that an engine keeps: they go to that engine."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from router.forward.apis.api import APIS, RESPONSES
from router.forward.apis.kept_responses import KeptResponses
from router.forward.errors import ResponseNotFoundError
from router.forward.metrics import Ended
from router.forward.placement import PromptTokens, RequestPlacement, with_tokens
from router.forward.preparation import ForwardRequest
from router.forward.push import Forwarder
from router.forward.request_body import CompletionRequest, read_completion_request
from router.forward.resilience.worker_list import WorkerList
from router.protocol.requests import SelectRequest
from router.runtime.http_server.exchange import Exchange, HotRoute
from router.scheduler.errors import NoEndpointsError

BEFORE_ID = f"{RESPONSES}/"
_ONE, _CANCEL = f"{BEFORE_ID}{{request_id}}", f"{BEFORE_ID}{{request_id}}/cancel"
KEPT_ROUTES = (f"GET {_ONE}", f"DELETE {_ONE}", f"POST {_CANCEL}")

_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}").fullmatch
_NOTHING = PromptTokens([0], are_certain=False)


def kept_routes(answer: Callable[[Exchange], Any]) -> Mapping[tuple[str, str], HotRoute]:
    """Return the routes, by method and what follows the id."""
    errors = APIS[RESPONSES].errors

    def route(path: str) -> HotRoute:
        return HotRoute(path, answer, ends_with_client=True, errors=errors)

    one = route(_ONE)
    return {("GET", ""): one, ("DELETE", ""): one, ("POST", "cancel"): route(_CANCEL)}


class KeptRoutes:
    """Finds the engine of a response, and asks it."""

    __slots__ = ("_kept", "_placing", "_push", "_roster")

    def __init__(
        self,
        kept: KeptResponses,
        placing: RequestPlacement,
        push: Forwarder,
        roster: WorkerList,
    ) -> None:
        self._kept = kept
        self._placing = placing
        self._push = push
        self._roster = roster

    def pinned(self, asked: CompletionRequest, request: SelectRequest) -> SelectRequest:
        """Return a request that continues a response at the engine that keeps that one.

        A worker that the client names takes precedence. Raises ResponseNotFoundError.
        """
        previous_id = asked.read.previous_response_id
        if previous_id is None or request.pinned_worker is not None:
            return request
        kept = self._kept.find(request.tenant, previous_id, time.monotonic())
        if kept is None:
            raise ResponseNotFoundError(previous_id)
        return structs.replace(request, pinned_worker=kept.rank)

    async def answer(self, call: Exchange) -> Ended:
        """Answer a request about one response. Raises ResponseNotFoundError, KvRouterError."""
        response_id, tenant, method = call.path_id, call.caller.tenant, call.head.method
        kept = self._kept.find(tenant, response_id, time.monotonic())
        if kept is None or _ID(response_id) is None:
            raise ResponseNotFoundError(response_id)
        about = msgspec.json.encode({"model": kept.model, "input": ""})
        asked = read_completion_request(RESPONSES, about)
        headers = (*call.head.pairs, *call.traces)
        request = with_tokens(self._placing.request_in(None, asked, headers, call.caller), _NOTHING)
        request = structs.replace(request, pinned_worker=kept.rank, session_id=None)
        errand = ForwardRequest(
            asked,
            headers,
            request,
            call.ids.request_id,
            method=method,
            target=_target(call, response_id),
        )
        try:
            ended = await self._push.forward(errand, call)
        except NoEndpointsError:
            await self._check_lost(tenant, response_id)
            raise
        if method == "DELETE" and ended == "answered":
            self._kept.forget(tenant, response_id)
        return ended

    async def check_lost(self, asked: CompletionRequest, request: SelectRequest) -> None:
        """Raise ResponseNotFoundError if the response that a request continues is lost."""
        if asked.read.previous_response_id is not None:
            await self._check_lost(request.tenant, asked.read.previous_response_id)

    async def _check_lost(self, tenant: str | None, response_id: str) -> None:
        """Forget a response if its worker is gone. Raises ResponseNotFoundError then."""
        kept = self._kept.find(tenant, response_id, time.monotonic())
        if kept is not None and await self._roster.is_gone(kept.rank.worker_id):
            self._kept.forget(tenant, response_id)
            raise ResponseNotFoundError(response_id)


def _target(call: Exchange, response_id: str) -> str:
    """Return the path at the engine, with the client's query."""
    path = call.head.route.path.replace("{request_id}", response_id)
    query = call.head.query.decode("latin-1")
    return f"{path}?{query}" if query else path
