"""Remote prefill: one worker of role prefill computes a prompt; the outcome goes to peers."""

import time
from typing import Literal

from msgspec import Struct

from router.errors import InvalidFieldError
from router.forward.config import ForwardConfig
from router.forward.errors import (
    ANOTHER_MAY_TAKE,
    NOT_ITS_FAULT,
    PromptRefusedError,
    WorkerFailedError,
    reason_of,
)
from router.forward.headers import Pairs, own_headers, to_engine
from router.forward.prefill.handoff import Prefilled, prefill_body, read_prefilled
from router.forward.prefill.peer_events import PrefillEvents
from router.forward.request_body import CompletionRequest
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.protocol.prefills import PrefillEvent
from router.protocol.replies import Decision
from router.protocol.requests import RankTarget, SelectRequest
from router.runtime.http_client import HttpPool, Origin, Request, UpstreamError


class PrefillRequest(Struct, frozen=True, eq=False):
    """A request with a prompt to be computed by a prefill worker."""

    asked: CompletionRequest
    headers: Pairs
    request: SelectRequest
    request_id: str


class RemotePrefill:
    """Requests prefills, from one worker per call."""

    def __init__(
        self,
        pool: HttpPool,
        config: ForwardConfig,
        authorization: bytes | None,
        breaker: CircuitBreaker,
        events: PrefillEvents | None,
    ) -> None:
        """Create it.

        `authorization`: credentials for engines; None: the client's own. `events`: publishes
        outcomes to the other forwarders; None: no bus.
        """
        self._pool = pool
        self._timeout_s = config.prefill.prefill_timeout_s
        self._answer_limit_bytes = config.engines.answer_limit_bytes
        self._authorization = authorization
        self._breaker = breaker
        self._events = events

    async def compute(
        self, prompt: PrefillRequest, decision: Decision, target: RankTarget | None = None
    ) -> Prefilled:
        """Have a worker compute a prompt, and push it to `target`.

        Raises WorkerFailedError, PromptRefusedError.
        """
        worker_id, endpoint = decision.worker_id, decision.endpoint
        began_s = time.monotonic()
        try:
            prefilled = await self._answer(prompt, decision, target)
        except WorkerFailedError as error:
            if error.is_its_fault:
                self._failed(decision, time.monotonic() - began_s)
            raise
        except (UpstreamError, InvalidFieldError) as error:
            self._failed(decision, time.monotonic() - began_s)
            raise WorkerFailedError(worker_id, reason_of(error)) from error
        self._breaker.succeeded(worker_id, endpoint, time.monotonic())
        self._publish("computed", decision, time.monotonic() - began_s)
        return prefilled

    def _failed(self, decision: Decision, seconds: float) -> None:
        self._breaker.failed(decision.worker_id, decision.endpoint, time.monotonic())
        self._publish("failed", decision, seconds)

    def _publish(
        self, outcome: Literal["computed", "failed"], decision: Decision, seconds: float
    ) -> None:
        if self._events is None:
            return
        event = PrefillEvent(
            forwarder_id=self._events.forwarder_id,
            outcome=outcome,
            model_name=decision.model_name,
            worker_id=decision.worker_id,
            endpoint=decision.endpoint,
            isl_tokens=decision.isl_tokens,
            seconds=seconds,
        )
        self._events.publish(event)

    async def _answer(
        self, prompt: PrefillRequest, decision: Decision, target: RankTarget | None
    ) -> Prefilled:
        asked, timeout_s = prompt.asked, self._timeout_s
        headers = to_engine(tuple(prompt.headers), decision.dp_rank, self._authorization)
        own = own_headers(prompt.request_id)
        request = Request("POST", asked.path, prefill_body(asked, target), headers, True, own)
        origin = Origin.of(decision.endpoint)
        async with self._pool.response(origin, request, timeout_s) as answer:
            body = await answer.read(self._answer_limit_bytes, timeout_s)
        if answer.status in ANOTHER_MAY_TAKE or 300 <= answer.status < 400:
            is_its_fault = answer.status not in NOT_ITS_FAULT
            raise WorkerFailedError(
                decision.worker_id, f"status {answer.status}", is_its_fault=is_its_fault
            )
        if answer.status >= 400:
            raise PromptRefusedError(decision.worker_id, answer.status)
        return read_prefilled(body)
