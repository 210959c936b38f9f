"""Placement of a gateway's request: read, tokenized and booked as the forwarder does it."""

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct, structs

from router.client import Decision, Reservation, RouterClient
from router.errors import InvalidFieldError, KvRouterError
from router.forward.apis import error_formats
from router.forward.apis.api import APIS
from router.forward.apis.passed import PASSED
from router.forward.errors import (
    MethodNotAllowedError,
    ModelNotFoundError,
    PreconditionError,
    RouteNotFoundError,
)
from router.forward.headers import DP_RANK, REQUEST_ID, Pairs, header
from router.forward.permitted_fields import permitted
from router.forward.picker.answers import Refusal, Route
from router.forward.picker.pool import PoolEndpoint, PoolView, members
from router.forward.picker.steering import (
    DROPPED_REASON,
    NO_STEERING,
    PREFILLER,
    Steering,
    steering_in,
)
from router.forward.picker.stream import GatewayHead
from router.forward.placement import elsewhere
from router.forward.prefill.remote_prefill import PrefillRequest
from router.forward.prefill.router import PrefillRouter
from router.forward.preparation import Preparation, PreparedRequest, read_request
from router.forward.request_body import CompletionRequest
from router.forward.request_templates import RequestTemplate
from router.forward.resilience.booking import reserve_with_failover
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.forward.resilience.worker_list import WorkerList
from router.protocol.requests import RankTarget, SelectRequest
from router.runtime.http_server.exchange import MOST_HEADS
from router.runtime.security.caller import Caller
from router.runtime.security.guard import Access, Guard
from router.runtime.security.guarded import admit_head, refusal_headers
from router.scheduler.errors import NoEndpointsError

AT_ONCE_S = 0.001
"""The wait in the queue of a request that is refused in place of waiting."""

_OPEN_PATHS = ("/v1/models", "/health", "/version")
_MODEL = "/v1/models/"
_ROUTES = tuple(f"POST {path}" for path in (*APIS, *PASSED)) + tuple(
    f"GET {path}" for path in (*_OPEN_PATHS, f"{_MODEL}{{model}}")
)
_READING = ("GET", "HEAD")
_SHED = frozenset((429, 529))
_OF_ONE_REQUEST = frozenset((REQUEST_ID, b"traceparent", b"tracestate", b"content-length"))
"""Headers that differ from request to request, and that placement does not read."""


class _KnownHead:
    """The head of requests with the same headers, but for their ids, traces and lengths.

    `templates`: of their bodies; None until the head comes a second time.
    """

    __slots__ = ("access", "content_type", "steering", "templates")

    def __init__(self, headers: Pairs) -> None:
        self.access: Access | None = None
        self.content_type = (header(headers, b"content-type") or "").encode("latin-1")
        self.steering = NO_STEERING
        self.templates: list[RequestTemplate] | None = None


class Admitted(Struct, frozen=True, eq=False):
    """A request that may be placed once its body is there. `path`: without its query.

    `members`: the endpoints of its subset; None: all.
    """

    head: GatewayHead
    known: _KnownHead
    path: str
    caller: Caller
    members: list[PoolEndpoint] | None

    @property
    def is_passed_on(self) -> bool:
        """True for a request without a prompt, which any endpoint serves."""
        return self.head.method in _READING


class Placed(Struct, frozen=True, eq=False):
    """A placed request. `booked`, `prefill`: its bookings; none for requests without a prompt."""

    route: Route
    endpoint: PoolEndpoint
    booked: Reservation | None = None
    prefill: Reservation | None = None


class GatewayPlacement:
    """Places requests of gateways. `authorization`: see `OpenAiEndpoint`."""

    def __init__(
        self,
        router: RouterClient,
        preparation: Preparation,
        prefill: PrefillRouter,
        breaker: CircuitBreaker,
        roster: WorkerList,
        pool: PoolView,
        guard: Guard,
        authorization: bytes | None,
        fallbacks: int,
    ) -> None:
        self._router = router
        self._preparation = preparation
        self._prefill = prefill
        self._breaker = breaker
        self._roster = roster
        self._pool = pool
        self._guard = guard
        self._authorization = authorization
        self._fallbacks = fallbacks
        self._turns = itertools.count()
        self._heads: dict[tuple[str, str, Pairs], _KnownHead] = {}

    def admitted(self, head: GatewayHead) -> Admitted:
        """Admit a request by its headers alone. Raises the error that refuses it.

        A caller that is not known learns neither routes nor endpoints.
        """
        path, reads = head.path.partition("?")[0], head.method in _READING
        shared = tuple([pair for pair in head.headers if pair[0] not in _OF_ONE_REQUEST])
        key = (head.method, head.path, shared)
        kept = self._heads.get(key)
        known = _KnownHead(shared) if kept is None else kept
        method = "GET" if reads else head.method
        caller = admit_head(self._guard, known, method, path, head.headers)
        if kept is None:
            _check_route(head.method, path)
        found = None if head.subset is None else members(self._pool, head.subset)
        if found is not None and not found:
            raise self._no_endpoints("any", head)
        if kept is None:
            self._keep_head(known, key)
        elif known.templates is None:
            known.templates = []
        return Admitted(head, known, path, caller, found)

    def _keep_head(self, known: _KnownHead, key: tuple[str, str, Pairs]) -> None:
        """Keep a head, once its caller is admitted. Raises InvalidFieldError.

        Beyond the limit all heads are dropped.
        """
        known.steering = steering_in(key[2])
        if len(self._heads) >= MOST_HEADS:
            self._heads.clear()
        self._heads[key] = known

    async def place(self, admitted: Admitted, body: bytes, booking_id: str) -> Placed:
        """Place a request, and book it under an id. Raises the error that refuses it.

        The caller must leave the bookings.
        """
        if admitted.is_passed_on:
            return self._any_endpoint(admitted)
        headers, known, caller = admitted.head.headers, admitted.known, admitted.caller
        steering = known.steering
        read, template = await read_request(
            admitted.path, body, known.content_type, known.templates
        )
        named = _renamed(read, self._pool.model(read.model) or steering.model)
        asked, _ = permitted(named, caller)
        if asked is not read:
            template = None  # it is that of other fields
        router_request = self._preparation.placing.request_in(template, asked, headers, caller)
        router_request = self._limited(router_request, admitted)
        router_request = self._prioritized(router_request, steering, booking_id)
        prepared = await self._preparation.prepared(asked, router_request, headers, caller.tenant)
        changed = None if prepared.asked.fields is read.fields else _body(prepared.asked)
        try:
            return await self._booked(prepared, admitted, changed)
        except NoEndpointsError as error:
            if await self._roster.is_unknown(asked.model):
                raise ModelNotFoundError(asked.model, self._roster.models) from error
            raise
        except KvRouterError as error:
            if steering.if_available and error.http_status in _SHED:
                raise PreconditionError(str(error)) from error
            raise

    def _any_endpoint(self, admitted: Admitted) -> Placed:
        """Return a ready endpoint for a request without a prompt; nothing is booked."""
        found = admitted.members
        ready = members(self._pool, None) if found is None else found
        ejected = self._breaker.ejected()
        ready = [each for each in ready if each.worker_id not in ejected] or ready
        if not ready:
            raise self._no_endpoints("any", admitted.head)
        endpoint = ready[next(self._turns) % len(ready)]
        headers = self._own_headers(None, endpoint)
        removed = self._removed(admitted.known.steering)
        return Placed(Route(endpoint.address, headers, removed), endpoint)

    def _no_endpoints(self, model: str, head: GatewayHead) -> NoEndpointsError:
        reason = "no endpoint" if head.subset is None else "no endpoint of the subset"
        return NoEndpointsError(model, self._preparation.placing.routing_group, reason)

    def _prioritized(
        self, request: SelectRequest, steering: Steering, booking_id: str
    ) -> SelectRequest:
        """Return the request with its id and the priority of its objective; some may not wait."""
        objective = steering.objective
        priority = 0 if objective is None else self._pool.priority(objective)
        fields: dict[str, Any] = {"request_id": booking_id}
        if priority > 0:
            fields["strict_priority"] = priority
        if priority < 0 or steering.if_available:
            fields["max_wait_s"] = AT_ONCE_S
        if self._fallbacks:
            fields["explain"] = True
        return structs.replace(request, **fields)

    def _limited(self, request: SelectRequest, admitted: Admitted) -> SelectRequest:
        """Return the request within its pool and subset. Raises NoEndpointsError for none."""
        found = admitted.members
        if found is None:
            outsiders = self._pool.outsiders()
            return elsewhere(request, outsiders) if outsiders else request
        worker_ids = {each.worker_id for each in found}
        if request.allowed_worker_ids is not None:
            worker_ids &= set(request.allowed_worker_ids)
        if not worker_ids:
            raise self._no_endpoints(request.model_name, admitted.head)
        request = structs.replace(request, allowed_worker_ids=sorted(worker_ids))
        if len(found) == 1 and found[0].dp_rank is not None and request.pinned_worker is None:
            target = RankTarget(found[0].worker_id, found[0].dp_rank)
            request = structs.replace(request, pinned_worker=target)
        return request

    async def _booked(
        self,
        prepared: PreparedRequest,
        admitted: Admitted,
        body: bytes | None,
    ) -> Placed:
        asked, router_request = prepared.asked, prepared.request
        booking_id = router_request.request_id or ""
        prefill: Reservation | None = None
        if not asked.api.passes:
            prompt = PrefillRequest(asked, admitted.head.headers, router_request, booking_id)
            prefill = await self._prefill.booked(prompt)
        try:
            if prefill is not None:
                worker_id = prefill.decision.worker_id
                router_request = structs.replace(
                    router_request, phase="decode", prefill_worker_id=worker_id
                )
            booked = await reserve_with_failover(self._router, self._breaker, router_request, ())
            try:
                return self._placed(booked, prefill, asked, admitted.known.steering, body)
            except BaseException:
                booked.leave()
                raise
        except BaseException:
            if prefill is not None:
                prefill.leave()
            raise

    def _placed(
        self,
        booked: Reservation,
        prefill: Reservation | None,
        asked: CompletionRequest,
        steering: Steering,
        body: bytes | None,
    ) -> Placed:
        decision = booked.decision
        endpoint = self._endpoint(decision)
        headers = self._own_headers(decision if asked.api.chooses_rank else None, endpoint)
        if prefill is not None:
            headers.append((PREFILLER, self._endpoint(prefill.decision).address.encode()))
        addresses = ",".join((endpoint.address, *self._others(decision, endpoint)))
        route = Route(addresses, headers, self._removed(steering), body, booked.request_id)
        return Placed(route, endpoint, booked, prefill)

    def _endpoint(self, decision: Decision) -> PoolEndpoint:
        return self._pool.endpoint(decision.worker_id, decision.dp_rank, decision.endpoint)

    def _others(self, decision: Decision, chosen: PoolEndpoint) -> list[str]:
        """Return the addresses to try behind the chosen one, the cheapest first."""
        if not self._fallbacks or decision.candidates is None:
            return []
        workers, found = self._roster.workers, [chosen.address]
        for each in sorted(decision.candidates, key=lambda one: one.cost):
            if each.worker_id in workers:
                url = workers[each.worker_id].endpoint
                found.append(self._pool.endpoint(each.worker_id, each.dp_rank, url).address)
        return list(dict.fromkeys(found))[1 : 1 + self._fallbacks]

    def _removed(self, steering: Steering) -> tuple[str, ...]:
        """Return the names of headers that engines must not receive."""
        if self._authorization is None:
            return steering.removed
        return (*steering.removed, "authorization", "x-api-key")

    def _own_headers(
        self, decision: Decision | None, endpoint: PoolEndpoint
    ) -> list[tuple[str, bytes]]:
        headers: list[tuple[str, bytes]] = []
        names_rank = decision is not None and endpoint.dp_rank is None
        if decision is not None and names_rank and self._roster.rank_count(decision.worker_id) > 1:
            headers.append((DP_RANK.decode(), b"%d" % decision.dp_rank))
        if self._authorization:
            headers.append(("authorization", self._authorization))
        return headers


def _check_route(method: str, path: str) -> None:
    """Raise RouteNotFoundError or MethodNotAllowedError for a request that is not served."""
    reads, route = method in _READING, f"{method} {path}"
    if not (_is_open(path) if reads else path in APIS or path in PASSED):
        raise RouteNotFoundError(route, _ROUTES)
    if not reads and method != "POST":
        raise MethodNotAllowedError(route, ("POST",))


def _is_open(path: str) -> bool:
    """Return whether any endpoint may be read at this path."""
    return path in _OPEN_PATHS or path.startswith(_MODEL)


def _renamed(asked: CompletionRequest, model: str | None) -> CompletionRequest:
    """Return the request with the model of a rewrite, or of a header. Raises InvalidFieldError."""
    if model is None or model == asked.model:
        return asked
    if asked.path in PASSED and PASSED[asked.path].is_form:
        raise InvalidFieldError("model", "to be replaced in a form", "a body that is JSON")
    fields: Mapping[str, Raw] = {**asked.fields, "model": Raw(msgspec.json.encode(model))}
    read = structs.replace(asked.read, model=model)
    return structs.replace(asked, fields=fields, read=read, body=None)


def _body(asked: CompletionRequest) -> bytes:
    """Return the body of a request whose fields were changed here."""
    return msgspec.json.encode(asked.fields)


def refusal_of(error: KvRouterError, path: str) -> Refusal:
    """Return an error as the client of an API expects it. `path`: with its query."""
    known = path.partition("?")[0]
    api = APIS.get(known) or (PASSED[known].api if known in PASSED else None)
    errors = error_formats.OPENAI if api is None else api.errors
    status, body = errors.reply(error)
    headers = refusal_headers(error)
    reason = _dropped_reason(status)
    if reason is not None:
        headers = (*headers, (DROPPED_REASON.encode(), reason))
    return Refusal(status, msgspec.json.encode(body), error.code, headers)


def _dropped_reason(status: int) -> bytes | None:
    """Return the reason as llm-d names it, or None for other errors."""
    if status in _SHED:
        return b"rejected-saturated"
    return b"rejected-no-endpoints" if status == 503 else None
