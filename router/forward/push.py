"""A request's way: placed by the router, sent to that engine, its answer passed on as it comes.

    place, book ─▶ ask the engine ─▶ head ─▶ first piece ─▶ … ─▶ end ─▶ freed
        ▲               │ no answer, or a refusal that another may not give
        └── without it ─┘

Whatever happens, the booking is left, and freed: no answer waits for that.
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from router.client import Reservation, RouterClient, Usage
from router.errors import InvalidFieldError, WorkerNotFoundError
from router.forward.asking_prompts import Prompt
from router.forward.bodies import CHAT, COMPLETIONS, UNREADABLE, Asked
from router.forward.booking import book
from router.forward.call import Call
from router.forward.errors import NoWorkerLeftError, WorkerFailedError, reason_of
from router.forward.events import EventSplitter, EventTooLargeError
from router.forward.handing_over import HandOver, decode_fields
from router.forward.headers import to_client, to_engine
from router.forward.metrics import Ended, ForwardMetrics
from router.forward.migration import continuation, ending, is_migratable, left_tokens
from router.forward.prefill import PrefillRouter
from router.forward.retry_budget import BudgetLimits, RetryBudget
from router.forward.standing import Standing
from router.forward.statuses import ANOTHER_MAY_TAKE, NOT_ITS_FAULT
from router.forward.stream import EngineErrorEvent, StreamState, Wanted
from router.forward.words import Words
from router.http_client import Answer, HttpPool, Origin, Request, UpstreamError
from router.placement_errors import NoEndpointsError
from router.protocol.replies import Decision

REFUSAL_LIMIT_BYTES = 1024 * 1024
_EVENTS = b"text/event-stream"


class PushSettings(Struct, frozen=True):
    """How patient, and how often. `authorization`: ours for engines; None: the client's."""

    max_attempts: int
    max_migrations: int
    idle_s: float
    answer_limit_bytes: int
    authorization: bytes | None = None


class Errand(Prompt, frozen=True, eq=False):
    """A request to forward: what it asks, and what the router is asked for it. `counted_tokens`:
    how long engines should find its prompt, where that is known; `prompt`: its tokens, likewise.
    `words`: those of a single prompt, which may have come before.
    """

    counted_tokens: int | None = None
    prompt: Sequence[int] | None = None
    words: Words | None = None

    @property
    def is_guess(self) -> bool:
        """Was the router told of another prompt than engines compute? So it is where nobody could
        read it, and where there are several.
        """
        is_read = self.counted_tokens is not None or self.prompt is not None
        return not is_read or self.asked.has_several_prompts


class RefusedError(WorkerFailedError):
    """An engine refused, and what it said of it."""

    def __init__(self, decision: Decision, answer: Answer, body: bytes) -> None:
        status = answer.status
        is_its_fault = status not in NOT_ITS_FAULT
        super().__init__(decision.worker_id, f"status {status}", is_its_fault=is_its_fault)
        self.answer = answer
        self.decision = decision
        self.content = body


class _UsageOnly(Struct, frozen=True):
    usage: Usage | None = None


_usage = msgspec.json.Decoder(_UsageOnly).decode


class Push:
    """Forwards requests."""

    def __init__(
        self,
        router: RouterClient,
        pool: HttpPool,
        settings: PushSettings,
        metrics: ForwardMetrics,
        counted: Callable[[Asked, int, Usage], None],
        standing: Standing,
        prefill: PrefillRouter,
    ) -> None:
        self.standing = standing
        self.prefill = prefill
        self.budget = RetryBudget(BudgetLimits(), time.monotonic())
        self.router = router
        self.pool = pool
        self.settings = settings
        self.metrics = metrics
        self.counted = counted

    def forward(self, errand: Errand, client: Call) -> Coroutine[Any, Any, Ended]:
        """Answer a request. Raises what it was refused with, if nothing was said yet."""
        return _Way(self, errand, client).go()


class _Way:
    """One request on its way."""

    def __init__(self, push: Push, errand: Errand, client: Call) -> None:
        self._push = push
        self._errand = errand
        self._asked = errand.asked
        self._request = errand.request
        self._client = client
        self._begun_s = time.monotonic()
        self._attempts = 0
        self._failed: set[int] = set()
        self._migrations = 0
        self._hand_over: HandOver | None = None
        asked, words = errand.asked, errand.words
        may = is_migratable(asked) if words is None else words.is_migratable
        self._may_migrate = may and errand.prompt is not None
        self._stream = StreamState(Wanted.of(asked) if words is None else words.wanted)

    async def go(self) -> Ended:
        """Until it is answered. Raises KvRouterError."""
        self._push.budget.request(self._begun_s)
        await self._have_prefilled()
        last: WorkerFailedError | None = None
        while True:
            try:
                return await self._attempt()
            except NoEndpointsError:
                if last is None:
                    raise
                return self._give_up(last)
            except WorkerFailedError as error:
                last = error
                if self._client.has_started and self._has_everything():
                    return self._end()
                if not self._may_go_elsewhere(error):
                    return self._give_up(error)
                if self._client.has_started:
                    self._move()

    async def _have_prefilled(self) -> None:
        if self._push.prefill.is_out_of_question(self._request, self._begun_s):
            return
        self._hand_over = hand_over = await self._push.prefill.hand_over(self._errand)
        if hand_over is None:
            return
        self._request = hand_over.request
        self._client.own_headers = [*self._client.own_headers, *hand_over.headers]

    def _compute_there(self) -> None:
        """What was handed over is given once: whoever is next computes the prompt."""
        if self._hand_over is not None and self._hand_over.params is not None:
            self._hand_over = None
            whole = structs.replace(self._request, phase="aggregated", prefill_worker_id=None)
            self._request = whole

    async def _booked(self) -> Reservation:
        push, failed = self._push, self._failed
        try:
            return await book(push.router, push.standing, self._request, failed)
        except WorkerNotFoundError:  # who has computed the prompt is gone, with its place
            if self._hand_over is None or self._request.prefill_worker_id is None:
                raise
            self._request = structs.replace(self._request, prefill_worker_id=None)
            return await book(push.router, push.standing, self._request, failed)

    async def _attempt(self) -> Ended:
        began_s = time.monotonic()
        booked = await self._booked()
        try:
            self._push.metrics.deciding.note(time.monotonic() - began_s)
            self._attempts += 1
            ended = await self._ask(booked)
            self._note_usage(booked.usage)
            self._land(booked)
            if self._errand.is_guess:
                booked.usage = None  # from which the router could only learn wrong things
        finally:
            booked.leave()
            if booked.missed_reports:
                self._push.metrics.missed_reports.inc(booked.missed_reports)
        self._push.metrics.attempts.count("answered")
        return ended

    def _note_usage(self, usage: Usage | None) -> None:
        counted_tokens = self._errand.counted_tokens
        if usage is not None and counted_tokens is not None and not self._migrations:
            self._push.counted(self._asked, counted_tokens, usage)

    def _land(self, booked: Reservation) -> None:
        """What was handed over counts as cached, which no router has predicted."""
        if self._hand_over is not None:
            self._push.prefill.landed(self._hand_over, booked.usage)
            booked.usage = None if self._hand_over.params is not None else booked.usage

    def _may_go_elsewhere(self, error: WorkerFailedError) -> bool:
        self._push.metrics.attempts.count("failed" if error.is_its_fault else "refused")
        self._failed.add(error.worker_id)
        self._compute_there()
        if self._request.pinned_worker is not None:
            return False
        settings = self._push.settings
        if self._client.has_started:
            may = self._may_migrate and self._migrations < settings.max_migrations
            may = may and self._stream.has_all_tokens
        else:
            may = self._attempts < settings.max_attempts
        return may and self._push.budget.take(time.monotonic())

    def _move(self) -> None:
        """The rest is another worker's: behind the prompt comes what was generated."""
        prompt = self._errand.prompt
        assert prompt is not None
        self._migrations += 1
        self._push.metrics.migrations.labels("moved").inc()
        stream = self._stream
        stream.go_on(stream.before(is_chat=self._asked.path == CHAT))
        self._request = structs.replace(self._request, token_ids=[*prompt, *stream.token_ids])

    def _has_everything(self) -> bool:
        """Whether only the end is missing, which needs no engine."""
        stream = self._stream
        is_full = stream.has_all_tokens and left_tokens(self._asked, len(stream.token_ids)) == 0
        return stream.is_finished or (self._may_migrate and is_full)

    def _end(self) -> Ended:
        before = self._stream.before(is_chat=self._asked.path == CHAT)
        if not self._stream.is_finished:
            self._client.write(ending(before, self._asked.model))
        if not self._stream.is_done:
            self._client.write(b"data: [DONE]\n\n")
        self._client.finish()
        return "answered"

    def _give_up(self, error: WorkerFailedError) -> Ended:
        """An engine's refusal is the client's answer. Raises NoWorkerLeftError."""
        if isinstance(error, RefusedError) and not self._client.has_started:
            headers = to_client(error.answer.headers, error.decision, self._attempts)
            self._client.whole(error.answer.status, headers, error.content)
            return "passed_on"
        left = NoWorkerLeftError(self._attempts, str(error))
        if not self._client.has_started:
            raise left from error
        self._push.metrics.migrations.labels("given_up").inc()
        self._client.refuse(left)
        return "broke_off"

    async def _ask(self, booked: Reservation) -> Ended:
        decision, standing = booked.decision, self._push.standing
        worker_id, endpoint = decision.worker_id, decision.endpoint
        try:
            answer = await self._push.pool.ask(Origin.of(endpoint), self._to_engine(decision))
            try:
                ended = await self._pass_on(answer, booked)
            finally:
                answer.close()
        except WorkerFailedError as error:
            if error.is_its_fault:
                standing.failed(worker_id, endpoint, time.monotonic())
            raise
        except (UpstreamError, EventTooLargeError, EngineErrorEvent, InvalidFieldError) as error:
            standing.failed(worker_id, endpoint, time.monotonic())
            raise WorkerFailedError(worker_id, reason_of(error)) from error
        standing.succeeded(worker_id, endpoint, time.monotonic())
        return ended

    def _to_engine(self, decision: Decision) -> Request:
        errand, asked = self._errand, self._asked
        authorization = self._push.settings.authorization
        headers = to_engine(errand.headers, decision, errand.request_id, authorization)
        path, body = asked.path, self._body(decision)
        return Request("POST", COMPLETIONS if self._migrations else path, body, headers, True)

    def _body(self, decision: Decision) -> bytes:
        asked, words = self._asked, self._errand.words
        if self._migrations and self._errand.prompt is not None:
            return continuation(asked, self._errand.prompt, self._stream.token_ids)
        given: dict[str, Any] = {}
        if self._hand_over is not None or decision.source is not None:
            given = decode_fields(asked, self._hand_over, decision)
        fields: dict[str, Any] = {}
        if asked.is_stream:
            fields["stream_options"] = {"include_usage": True}
            if self._may_migrate and self._push.settings.max_migrations:
                fields["return_token_ids"] = True
        if words is None or given:
            return asked.to_engine(**given, **fields)
        return words.to_engine(asked, **fields)

    async def _pass_on(self, answer: Answer, booked: Reservation) -> Ended:
        decision, settings = booked.decision, self._push.settings
        if 300 <= answer.status < 400:
            # Whereto is nobody's business: it would be a way around the router.
            raise WorkerFailedError(decision.worker_id, f"a redirect ({answer.status})")
        if answer.status in ANOTHER_MAY_TAKE:
            said = await answer.read(REFUSAL_LIMIT_BYTES, settings.idle_s)
            raise RefusedError(decision, answer, said)
        kind = answer.header(b"content-type") or b""
        if kind.startswith(_EVENTS) and answer.header(b"content-encoding") is None:
            return await self._pass_on_events(answer, booked)
        if self._client.has_started:
            raise WorkerFailedError(decision.worker_id, f"does not go on ({answer.status})")
        body = await answer.read(settings.answer_limit_bytes, settings.idle_s)
        self._saw_first()
        if answer.status == 200:
            booked.usage = _usage_in(body)
        headers = to_client(answer.headers, decision, self._attempts)
        self._client.whole(answer.status, headers, body)
        return "answered" if answer.status < 400 else "passed_on"

    async def _pass_on_events(self, answer: Answer, booked: Reservation) -> Ended:
        splitter, stream, client = EventSplitter(), self._stream, self._client
        idle_s = self._push.settings.idle_s
        while data := await answer.next_chunk(idle_s):
            shown, tokens = [], 0
            try:
                for event in splitter.feed(data):
                    seen, more = stream.take(event)
                    shown.append(seen)
                    tokens += more
            finally:  # what is counted is shown, also before an event that ends it
                booked.note_tokens(tokens)
                if shown:
                    self._show(b"".join(shown), answer, booked.decision)
            if client.is_slow:
                await client.drained()
        booked.usage = stream.usage
        if not stream.is_finished:
            raise WorkerFailedError(booked.decision.worker_id, "ended in the middle of a stream")
        return self._end()

    def _show(self, data: bytes, answer: Answer, decision: Decision) -> None:
        client = self._client
        if not client.has_started:
            self._saw_first()
            client.start(200, to_client(answer.headers, decision, self._attempts))
        if data:
            client.write(data)

    def _saw_first(self) -> None:
        self._push.metrics.first_token.note(time.monotonic() - self._begun_s)
        if self._hand_over is not None:
            self._push.prefill.answered(self._hand_over)


def _usage_in(body: bytes) -> Usage | None:
    try:
        return _usage(body).usage
    except UNREADABLE:
        return None
