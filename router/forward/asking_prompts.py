"""A worker of role prefill is asked for a prompt, and what came of it is told to the others."""

import time
from typing import Literal

from msgspec import Struct

from router.errors import InvalidFieldError
from router.forward.bodies import Asked
from router.forward.errors import PromptRefusedError, WorkerFailedError, reason_of
from router.forward.handing_over import Prefilled, prefill_body, read_prefilled
from router.forward.headers import Pairs, to_engine
from router.forward.prefill_config import PrefillSettings
from router.forward.prefill_news import PrefillNews
from router.forward.standing import Standing
from router.forward.statuses import ANOTHER_MAY_TAKE, NOT_ITS_FAULT
from router.http_client import HttpPool, Origin, Request, UpstreamError
from router.protocol.prefills import PrefillEvent
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest


class Prompt(Struct, frozen=True, eq=False):
    """A request, as far as its prompt is concerned."""

    asked: Asked
    headers: Pairs
    request: SelectRequest
    request_id: str


class PromptAsking:
    """Asks one worker at a time."""

    def __init__(
        self,
        pool: HttpPool,
        settings: PrefillSettings,
        standing: Standing,
        news: PrefillNews | None = None,
    ) -> None:
        """`news`: where others that forward are told."""
        self._pool = pool
        self._settings = settings
        self._standing = standing
        self._news = news

    async def ask(self, prompt: Prompt, decision: Decision) -> Prefilled:
        """What it answers. Raises WorkerFailedError, PromptRefusedError."""
        worker_id, endpoint = decision.worker_id, decision.endpoint
        began_s = time.monotonic()
        try:
            prefilled = await self._answer(prompt, decision)
        except WorkerFailedError as error:
            if error.is_its_fault:
                self._failed(decision, time.monotonic() - began_s)
            raise
        except (UpstreamError, InvalidFieldError) as error:
            self._failed(decision, time.monotonic() - began_s)
            raise WorkerFailedError(worker_id, reason_of(error)) from error
        self._standing.succeeded(worker_id, endpoint, time.monotonic())
        self._tell("computed", decision, time.monotonic() - began_s)
        return prefilled

    def _failed(self, decision: Decision, seconds: float) -> None:
        self._standing.failed(decision.worker_id, decision.endpoint, time.monotonic())
        self._tell("failed", decision, seconds)

    def _tell(
        self, outcome: Literal["computed", "failed"], decision: Decision, seconds: float
    ) -> None:
        if self._news is None:
            return
        event = PrefillEvent(
            forwarder_id=self._news.forwarder_id,
            outcome=outcome,
            model_name=decision.model_name,
            worker_id=decision.worker_id,
            endpoint=decision.endpoint,
            isl_tokens=decision.isl_tokens,
            seconds=seconds,
        )
        self._news.tell(event)

    async def _answer(self, prompt: Prompt, decision: Decision) -> Prefilled:
        settings, asked = self._settings, prompt.asked
        headers = to_engine(prompt.headers, decision, prompt.request_id, settings.authorization)
        request = Request("POST", asked.path, prefill_body(asked), headers, True)
        origin = Origin.of(decision.endpoint)
        async with self._pool.asked(origin, request, settings.timeout_s) as answer:
            body = await answer.read(settings.answer_limit_bytes, settings.timeout_s)
        if answer.status in ANOTHER_MAY_TAKE or 300 <= answer.status < 400:
            is_its_fault = answer.status not in NOT_ITS_FAULT
            raise WorkerFailedError(
                decision.worker_id, f"status {answer.status}", is_its_fault=is_its_fault
            )
        if answer.status >= 400:
            raise PromptRefusedError(decision.worker_id, answer.status)
        return read_prefilled(body)
