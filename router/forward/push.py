"""Forwarding of a request: placed by the router, sent to that engine, its response streamed back.

    place, book ─▶ request to the engine ─▶ head ─▶ first piece ─▶ … ─▶ end ─▶ freed
        ▲               │ no response, or a refusal that does not hold for other workers
        └─ excluding it ┘

In every case the reservation is left and freed, without delaying the response.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import structs

from router.client import Reservation, RouterClient, Usage
from router.config.openai import EngineConfig
from router.errors import InvalidFieldError, WorkerNotFoundError
from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.apis.event_stream import EngineErrorEvent, EventStream
from router.forward.apis.kept_responses import KeptResponses
from router.forward.apis.passed import PASSED, says_it_is_missing
from router.forward.apis.sse import EventSplitter, EventTooLargeError
from router.forward.errors import (
    ANOTHER_MAY_TAKE,
    EngineRefusedError,
    NoWorkerLeftError,
    RouteMissingError,
    RouteNotServedError,
    WorkerFailedError,
    reason_of,
)
from router.forward.headers import own_headers, to_client, to_engine
from router.forward.metrics import Ended, ForwardMetrics
from router.forward.migration import continuation, ending, is_migratable, left_tokens
from router.forward.passing import BodySizes, MissingRoutes
from router.forward.placement import again
from router.forward.prefill.handoff import KvHandoff, decode_fields
from router.forward.prefill.router import PrefillRouter
from router.forward.preparation import ForwardRequest
from router.forward.request_body import CompletionRequest
from router.forward.resilience.booking import reserve_with_failover
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.forward.resilience.retry_budget import BudgetLimits, RetryBudget
from router.forward.resilience.worker_list import WorkerList
from router.forward.stream_state import StreamState, stream_of
from router.forward.tokenizer.referee import RefereeKey
from router.protocol.replies import Decision
from router.protocol.requests import RankTarget
from router.runtime.http_client import HttpPool, Origin, Request, UpstreamError, UpstreamResponse
from router.runtime.http_server.exchange import Exchange, encoded_headers
from router.scheduler.errors import NoEndpointsError

REFUSAL_LIMIT_BYTES = 1024 * 1024
MOST_MISSING = 16
"""Limit of workers that one request is sent to and that do not have its route."""

_EVENTS = b"text/event-stream"
_NO = b"false"


class Forwarder:
    """Forwards requests. `authorization`: credentials for engines; None: the client's own."""

    def __init__(
        self,
        router: RouterClient,
        pool: HttpPool,
        engines: EngineConfig,
        authorization: bytes | None,
        metrics: ForwardMetrics,
        counted: Callable[[CompletionRequest, int, Usage, RefereeKey | None], None],
        breaker: CircuitBreaker,
        prefill: PrefillRouter,
        kept: KeptResponses,
        roster: WorkerList,
        sizes: BodySizes,
    ) -> None:
        self.breaker = breaker
        self.kept = kept
        self.roster = roster
        self.prefill = prefill
        self.budget = RetryBudget(BudgetLimits(), time.monotonic())
        self.router = router
        self.pool = pool
        self.engines = engines
        self.authorization = authorization
        self.metrics = metrics
        self.counted = counted
        self.missing = MissingRoutes()
        self.sizes = sizes

    def forward(self, errand: ForwardRequest, client: Exchange) -> Coroutine[Any, Any, Ended]:
        """Answer a request. Raises the error that refused it if nothing was sent yet."""
        return ForwardAttempts(self, errand, client).go()


class ForwardAttempts:
    """The attempts to forward one request."""

    def __init__(self, push: Forwarder, errand: ForwardRequest, client: Exchange) -> None:
        self._push = push
        self._errand = errand
        self._asked = errand.asked
        self._request = errand.request
        self._client = client
        self._begun_s = time.monotonic()
        self._attempts = 0
        self._failed: set[int] = set()
        self._missing: set[int] = set()
        self._tried_missing = 0
        self._migrations = 0
        self._hand_over: KvHandoff | None = None
        asked, words = errand.asked, errand.words
        may = is_migratable(asked) if words is None else words.is_migratable
        self._may_migrate = may and errand.prompt is not None
        self._stream = stream_of(asked, None if words is None else words.wanted)
        self._is_first_seen = False
        self._status = 0

    async def go(self) -> Ended:
        """Forward the request, until it is answered. Raises KvRouterError."""
        self._push.budget.request(self._begun_s)
        await self._prepare()
        last: WorkerFailedError | None = None
        while True:
            try:
                return await self._attempt()
            except NoEndpointsError:
                if last is None:
                    self._check_served()
                    raise
                return self._give_up(last)
            except WorkerFailedError as error:
                last = error
                if self._client.response_started and self._has_everything():
                    return self._end()
                if not self._may_go_elsewhere(error):
                    return self._give_up(error)
                if self._client.response_started:
                    self._move()

    async def _prepare(self) -> None:
        if not self._asked.api.passes:
            await self._have_prefilled()
        asked, missing = self._asked, self._push.missing
        if not missing:
            return
        self._missing = missing.workers(asked.model, asked.path, self._begun_s)
        self._failed |= self._missing

    async def _have_prefilled(self) -> None:
        if self._push.prefill.skips_remote_prefill(self._request, self._begun_s):
            return
        self._hand_over = hand_over = await self._push.prefill.hand_over(self._errand)
        if hand_over is None:
            return
        self._request = hand_over.request
        self._client.own_lines += encoded_headers(hand_over.headers)

    def _compute_there(self) -> None:
        """Drop the KV transfer, usable only once: the next worker computes the prompt."""
        if self._hand_over is not None and self._hand_over.params is not None:
            self._hand_over = None
            whole = structs.replace(self._request, phase="aggregated", prefill_worker_id=None)
            self._request = whole

    async def _booked(self) -> Reservation:
        push, failed = self._push, self._failed
        try:
            return await reserve_with_failover(push.router, push.breaker, self._request, failed)
        except WorkerNotFoundError:  # the prefill worker is gone, and its location with it
            if self._hand_over is None or self._request.prefill_worker_id is None:
                raise
            self._request = structs.replace(self._request, prefill_worker_id=None)
            return await reserve_with_failover(push.router, push.breaker, self._request, failed)

    async def _attempt(self) -> Ended:
        began_s = time.monotonic()
        booked = await self._booked()
        sent_s, self._status = time.monotonic(), 0
        try:
            self._push.metrics.deciding_seconds.note(sent_s - began_s)
            self._attempts += 1
            if not self._asked.api.chooses_rank:
                await self._push.roster.include(booked.decision.worker_id)
            ended = await self._send(booked)
            self._note_usage(booked.usage)
            self._land(booked)
            if self._errand.is_guess or not self._is_rank_known(booked.decision):
                booked.usage = None  # The router would learn from wrong numbers.
        except WorkerFailedError as error:
            self._status = 0 if error.is_its_fault else self._status
            raise
        finally:
            self._count(booked, time.monotonic() - sent_s)
            booked.leave()
            if booked.missed_reports:
                self._push.metrics.missed_reports.inc(booked.missed_reports)
        self._push.metrics.attempts.count("answered")
        return ended

    def _count(self, booked: Reservation, time_s: float) -> None:
        worker_id, model = booked.decision.worker_id, self._asked.model
        self._push.metrics.count_attempt(model, worker_id, self._status, time_s)

    def _note_usage(self, usage: Usage | None) -> None:
        if usage is not None and usage.completion_tokens:
            tokens = usage.completion_tokens
            self._push.metrics.output_tokens.count(self._asked.model, by=tokens)
        counted_tokens = self._errand.counted_tokens
        if usage is not None and self._asked.api.passes:
            self._push.sizes.note(self._asked, usage)
        if usage is not None and counted_tokens is not None and not self._migrations:
            self._push.counted(self._asked, counted_tokens, usage, self._errand.confirms)

    def _land(self, booked: Reservation) -> None:
        """Record a completed KV transfer.

        Transferred tokens count as cached, which the router did not predict, so their usage is not
        reported.
        """
        if self._hand_over is not None:
            self._push.prefill.landed(self._hand_over, booked.usage)
            booked.usage = None if self._hand_over.params is not None else booked.usage

    def _may_go_elsewhere(self, error: WorkerFailedError) -> bool:
        self._request = again(self._request)
        self._push.metrics.attempts.count("failed" if error.is_its_fault else "refused")
        self._failed.add(error.worker_id)
        if isinstance(error, RouteMissingError):
            return self._may_have_it_elsewhere(error)
        self._compute_there()
        if self._request.pinned_worker is not None:
            return False
        engines = self._push.engines
        if self._client.response_started:
            may = self._may_migrate and self._migrations < engines.max_migrations
            may = may and self._stream.has_all_tokens
        else:
            may = self._attempts < engines.max_attempts
        return may and self._push.budget.take(time.monotonic())

    def _may_have_it_elsewhere(self, error: RouteMissingError) -> bool:
        """Note a worker without the route. It did no work, so it counts as no attempt."""
        model, path = self._asked.model, self._asked.path
        self._push.missing.note(model, path, error.worker_id, time.monotonic())
        self._missing.add(error.worker_id)
        self._attempts -= 1
        self._tried_missing += 1
        return self._request.pinned_worker is None and self._tried_missing < MOST_MISSING

    def _check_served(self) -> None:
        """Raise RouteNotServedError if no worker is left and some do not have the route."""
        path, api = self._asked.path, self._asked.api
        if self._missing:
            engines = PASSED[path].engines if path in PASSED else api.engines
            raise RouteNotServedError(path, self._asked.model, engines)

    def _move(self) -> None:
        """Continue the rest on another worker: the generated tokens follow the prompt."""
        prompt = self._errand.prompt
        assert prompt is not None
        self._migrations += 1
        self._push.metrics.migrations.labels("moved").inc()
        stream = self._stream
        assert isinstance(stream, StreamState)
        stream.go_on(stream.before(is_chat=self._asked.path == CHAT))
        self._request = structs.replace(self._request, token_ids=[*prompt, *stream.token_ids])

    def _has_everything(self) -> bool:
        """Return whether only the end of the stream is missing, which needs no engine."""
        stream = self._stream
        is_full = stream.has_all_tokens and left_tokens(self._asked, len(stream.token_ids)) == 0
        return stream.is_finished or (self._may_migrate and is_full)

    def _end(self) -> Ended:
        stream = self._stream
        if isinstance(stream, StreamState):
            if not stream.is_finished:
                before = stream.before(is_chat=self._asked.path == CHAT)
                self._client.write(ending(before, self._asked.model))
            if not stream.is_done:
                self._client.write(b"data: [DONE]\n\n")
        self._client.finish()
        return "answered"

    def _give_up(self, error: WorkerFailedError) -> Ended:
        """Forward an engine's refusal as the response. Raises NoWorkerLeftError otherwise."""
        if isinstance(error, EngineRefusedError) and not self._client.response_started:
            lines = self._lines(error.answer, error.decision)
            status, errors = error.answer.status, self._asked.api.errors
            self._client.whole(status, lines, errors.of_engine(status, error.content))
            return "passed_on"
        if isinstance(error, RouteMissingError):
            self._check_served()
        left = NoWorkerLeftError(self._attempts, str(error))
        if not self._client.response_started:
            raise left from error
        self._push.metrics.migrations.labels("given_up").inc()
        self._client.refuse(left)
        return "broke_off"

    def _lines(self, answer: UpstreamResponse, decision: Decision) -> bytes:
        is_known = self._is_rank_known(decision)
        return to_client(answer.headers, decision, self._attempts, is_rank_known=is_known)

    def _is_rank_known(self, decision: Decision) -> bool:
        """Return whether the engine computes on the rank of the decision, not on one of its own."""
        api = self._asked.api
        return api.chooses_rank or self._push.roster.rank_count(decision.worker_id) == 1

    async def _send(self, booked: Reservation) -> Ended:
        decision, breaker = booked.decision, self._push.breaker
        worker_id, endpoint = decision.worker_id, decision.endpoint
        try:
            answer = await self._push.pool.send(Origin.of(endpoint), self._to_engine(decision))
            try:
                ended = await self._pass_on(answer, booked)
            finally:
                answer.close()
        except WorkerFailedError as error:
            if error.is_its_fault:
                breaker.failed(worker_id, endpoint, time.monotonic())
            raise
        except (UpstreamError, EventTooLargeError, EngineErrorEvent, InvalidFieldError) as error:
            breaker.failed(worker_id, endpoint, time.monotonic())
            raise WorkerFailedError(worker_id, reason_of(error)) from error
        breaker.succeeded(worker_id, endpoint, time.monotonic())
        return ended

    def _to_engine(self, decision: Decision) -> Request:
        errand, asked = self._errand, self._asked
        authorization = self._push.authorization
        headers = to_engine(tuple(errand.headers), decision.dp_rank, authorization)
        own = own_headers(errand.request_id)
        if errand.target:
            return Request(errand.method, errand.target, b"", headers, True, own)
        path = COMPLETIONS if self._migrations else asked.path
        return Request("POST", path, self._body(decision), headers, True, own)

    def _body(self, decision: Decision) -> bytes:
        asked, words = self._asked, self._errand.words
        if self._migrations and self._errand.prompt is not None:
            return continuation(asked, self._errand.prompt, self._stream.token_ids)
        given: dict[str, Any] = {}
        has_transfer = self._hand_over is not None or decision.source is not None
        if has_transfer and asked.api.can_continue:
            given = decode_fields(asked, self._hand_over, decision)
        fields: dict[str, Any] = {}
        if asked.is_stream and asked.api.event_of is None:
            fields["stream_options"] = {"include_usage": True}
            if self._may_migrate and self._push.engines.max_migrations:
                fields["return_token_ids"] = True
        if words is None or given:
            return asked.to_engine(**given, **fields)
        return words.to_engine(asked, **fields)

    async def _pass_on(self, answer: UpstreamResponse, booked: Reservation) -> Ended:
        decision, engines = booked.decision, self._push.engines
        self._status = answer.status
        if 300 <= answer.status < 400:
            # The target is not forwarded: clients would bypass the router.
            raise WorkerFailedError(decision.worker_id, f"a redirect ({answer.status})")
        if answer.status in ANOTHER_MAY_TAKE:
            refusal_body = await answer.read(REFUSAL_LIMIT_BYTES, engines.idle_timeout_s)
            raise EngineRefusedError(decision, answer, refusal_body)
        kind = answer.header(b"content-type") or b""
        if kind.startswith(_EVENTS) and answer.header(b"content-encoding") is None:
            passing = self._pass_bytes if self._asked.api.passes else self._pass_on_events
            return await passing(answer, booked)
        if self._client.response_started:
            raise WorkerFailedError(decision.worker_id, f"did not continue ({answer.status})")
        body = await answer.read(engines.answer_limit_bytes, engines.idle_timeout_s)
        if not self._errand.target and says_it_is_missing(answer.status, body):
            raise RouteMissingError(decision.worker_id, self._asked.path)
        self._saw_first()
        if answer.status == 200:
            reported = self._asked.api.reported(body)
            booked.usage = reported.usage
            self._note_kept(reported.answer_id, decision)
        elif answer.status >= 400:
            body = self._asked.api.errors.of_engine(answer.status, body)
        lines = self._lines(answer, decision)
        self._client.whole(answer.status, lines, body)
        return "answered" if answer.status < 400 else "passed_on"

    async def _pass_bytes(self, answer: UpstreamResponse, booked: Reservation) -> Ended:
        """Pass on a stream that is not read, such as a transcript."""
        client, idle_s = self._client, self._push.engines.idle_timeout_s
        while data := await answer.next_chunk(idle_s):
            self._show(data, answer, booked.decision)
            if client.is_slow:
                await client.drained()
        self._show(b"", answer, booked.decision)
        client.finish()
        return "answered"

    async def _pass_on_events(self, answer: UpstreamResponse, booked: Reservation) -> Ended:
        splitter, stream, client = EventSplitter(), self._stream, self._client
        idle_s = self._push.engines.idle_timeout_s
        while data := await answer.next_chunk(idle_s):
            shown, tokens = [], 0
            try:
                for event in splitter.feed(data):
                    seen, more = stream.take(event)
                    shown.append(seen)
                    tokens += more
            finally:  # counted tokens are sent, also before an event that ends the stream
                booked.note_tokens(tokens)
                if shown:
                    self._show(b"".join(shown), answer, booked.decision)
                self._note_progress(booked.decision)
            if client.is_slow:
                await client.drained()
        booked.usage = stream.usage
        if not stream.is_finished:
            raise WorkerFailedError(booked.decision.worker_id, "ended in the middle of a stream")
        return self._end()

    def _note_progress(self, decision: Decision) -> None:
        stream = self._stream
        if stream.has_first_token and not self._is_first_seen:
            self._saw_first()
        if isinstance(stream, EventStream) and stream.answer_id is not None:
            self._note_kept(stream.answer_id, decision)

    def _note_kept(self, response_id: str | None, decision: Decision) -> None:
        """Record which engine may keep a response: only that one can continue it."""
        asked, is_asked_about = self._asked, bool(self._errand.target)
        if response_id is None or is_asked_about or bytes(asked.fields.get("store", b"")) == _NO:
            return
        rank = RankTarget(decision.worker_id, decision.dp_rank)
        tenant, now_s = self._request.tenant, time.monotonic()
        self._push.kept.note(tenant, response_id, asked.model, rank, now_s)

    def _show(self, data: bytes, answer: UpstreamResponse, decision: Decision) -> None:
        client = self._client
        if not client.response_started:
            client.start(200, self._lines(answer, decision))
        if data:
            client.write(data)

    def _saw_first(self) -> None:
        self._is_first_seen = True
        if self._asked.api.passes:
            return  # its answer has no first token
        self._push.metrics.time_to_first_token_seconds.note(time.monotonic() - self._begun_s)
        if self._hand_over is not None:
            self._push.prefill.answered(self._hand_over)
