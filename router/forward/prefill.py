"""Disaggregated serving: a prompt is computed by one worker, and answered by another.

    pools: is anybody there? ─ conditional: is it worth it? ─▶ book phase prefill ─▶ ask: one token
                                                                                        │ its params
            push.py: book phase decode, send these along ◀────────── HandOver ◀─────────┘

Before anything is sent to who answers, so that a failure costs time alone. What fails is computed
there (`always`, as Dynamo 1.0 does), or refused (`unregistered`: as Dynamo 1.6, only where no
worker is there for it is the prompt computed by who answers).
"""

import time

from msgspec import structs

from router.client import RouterClient
from router.errors import KvRouterError
from router.forward.asking_prompts import Prompt, PromptAsking
from router.forward.booking import book
from router.forward.errors import (
    NoHandOverError,
    PrefillFailedError,
    PromptRefusedError,
    WorkerFailedError,
)
from router.forward.handing_over import (
    HandOver,
    is_handed_over,
    is_to_bypass,
    prefill_request,
)
from router.forward.pools import PrefillPools
from router.forward.prefill_config import PrefillSettings
from router.forward.prefill_metrics import PrefillMetrics, PrefillOutcome
from router.forward.standing import Standing
from router.placement_errors import NoEndpointsError
from router.protocol.replies import Decision
from router.protocol.requests import RankTarget, SelectRequest, Usage


class PrefillRouter:
    """Has prompts computed."""

    def __init__(
        self,
        router: RouterClient,
        asking: PromptAsking,
        settings: PrefillSettings,
        metrics: PrefillMetrics,
        standing: Standing,
        pools: PrefillPools,
    ) -> None:
        self._router = router
        self._asking = asking
        self._settings = settings
        self._metrics = metrics
        self._standing = standing
        self.pools = pools

    def is_out_of_question(self, request: SelectRequest, now_s: float) -> bool:
        """Whether a prompt is plainly nobody else's work: `hand_over` would come to None."""
        if not self._settings.is_on:
            return True
        is_named = request.prefill_worker_id is not None
        return not is_named and self.pools.is_resting(request.model_name, now_s)

    async def hand_over(self, prompt: Prompt) -> HandOver | None:
        """Have a prompt computed, where that is another's work; None: nothing is to be done
        otherwise than ever. Raises what the router or the last worker refused with, unless that
        falls back.
        """
        request, model = prompt.request, prompt.request.model_name
        if not self._settings.is_on or is_handed_over(prompt.asked):
            return None
        is_named = request.prefill_worker_id is not None
        is_there = is_named or self.pools.is_worth_asking(model, time.monotonic())
        if not is_there or not (is_named or await self._is_anybody_there(request)):
            return self._computed_there(request, "unavailable")
        if await self._is_bypassed(prompt):
            return self._computed_there(request, "bypassed")
        try:
            return await self._handed_over(prompt)
        except NoEndpointsError:
            if is_named:  # no worker for prompts: whoever named it has had it computed
                return None
            self.pools.missed(model, time.monotonic())
            return self._computed_there(request, "unavailable")

    async def _is_anybody_there(self, request: SelectRequest) -> bool:
        return self.pools.state(request.model_name) == "active" or await self._finds(request)

    async def _finds(self, request: SelectRequest) -> bool:
        """Asked as one of a batch: that there is nobody is an answer there, and no refusal, which
        routers would count.
        """
        model, group = request.model_name, request.routing_group
        asked = SelectRequest(token_ids=[0], model_name=model, routing_group=group, phase="prefill")
        try:
            (result,) = await self._router.select_batch([asked])
        except KvRouterError:  # whoever places this request will hear of it, too
            return False
        is_found = (result.refused or {}).get("code") != NoEndpointsError.code
        if not is_found:
            self.pools.missed(model, time.monotonic())
        return is_found

    async def _handed_over(self, prompt: Prompt) -> HandOver | None:
        """Raises NoEndpointsError where nobody is there for it."""
        try:
            return await self._prefilled(prompt)
        except NoEndpointsError:
            raise
        except PromptRefusedError:  # who answers will say what is wrong with it
            return self._computed_there(prompt.request, "not_taken")
        except KvRouterError:
            if self._settings.falls_back == "unregistered":
                self._metrics.outcomes.labels("refused").inc()
                raise
            return self._computed_there(prompt.request, "fell_back")

    async def place(self, request: SelectRequest) -> Decision | None:
        """Where a prompt would be computed, if elsewhere; nothing is booked."""
        if not self._settings.is_on or not await self._finds(request):
            return None
        try:
            return await self._router.select(prefill_request(request))
        except NoEndpointsError:
            return None

    def landed(self, hand_over: HandOver, usage: Usage | None) -> None:
        """Who went on has answered; `usage`: what it said of the prompt. What it was given counts
        as cached there.
        """
        if hand_over.params is None:
            return
        is_unused = usage is not None and usage.prompt_tokens_details and not usage.cached
        outcome: PrefillOutcome = "not_used" if is_unused else "handed_over"
        self._metrics.outcomes.labels(outcome).inc()
        if usage is not None:
            self._metrics.tokens.inc(usage.cached)

    def answered(self, hand_over: HandOver) -> None:
        """The first token of who went on has come."""
        if hand_over.params is not None:
            self._metrics.hand_over.observe(time.monotonic() - hand_over.ended_s)

    def _computed_there(self, request: SelectRequest, outcome: PrefillOutcome) -> HandOver | None:
        """All is one worker's; which of them only matters where there were others."""
        if self.pools.state(request.model_name) == "pending":
            return None
        self._metrics.outcomes.labels(outcome).inc()
        whole = structs.replace(request, phase="aggregated", prefill_worker_id=None)
        return HandOver(whole)

    async def _is_bypassed(self, prompt: Prompt) -> bool:
        """Raises KvRouterError."""
        request, conditional = prompt.request, self._settings.conditional
        if is_to_bypass(prompt.asked):
            return True
        if conditional is None or request.prefill_worker_id is not None:
            return False
        whole = structs.replace(request, phase="aggregated", advisory=True)
        decode, load = await self._router.select(whole), None
        if conditional.looks_at_prefill:
            asked = structs.replace(prefill_request(request), advisory=True)
            try:
                load = (await self._router.select(asked)).worker_load
            except NoEndpointsError:
                return False
        return conditional.bypasses(decode, load)

    async def _prefilled(self, prompt: Prompt) -> HandOver:
        """Raises NoEndpointsError if there is nobody for it, and what else goes wrong."""
        request = prefill_request(prompt.request)
        if (named := prompt.request.prefill_worker_id) is not None:
            request = structs.replace(request, pinned_worker=RankTarget(named))
        failed: set[int] = set()
        while True:
            try:
                return await self._attempt(prompt, request, failed)
            except NoHandOverError:
                raise
            except WorkerFailedError as error:
                self._metrics.outcomes.labels("failed").inc()
                failed.add(error.worker_id)
                if named is not None or len(failed) >= self._settings.max_attempts:
                    raise PrefillFailedError(len(failed), str(error)) from error
                last = error
            except NoEndpointsError:
                if not failed:
                    raise
                raise PrefillFailedError(len(failed), str(last)) from last

    async def _attempt(self, prompt: Prompt, request: SelectRequest, failed: set[int]) -> HandOver:
        booked = await book(self._router, self._standing, request, failed)
        try:
            began_s, worker_id = time.monotonic(), booked.decision.worker_id
            self.pools.found(request.model_name)
            prefilled = await self._asking.ask(prompt, booked.decision)
            booked.usage = prefilled.usage
        finally:
            booked.leave()
        ended_s = time.monotonic()
        self._metrics.prefill.observe(ended_s - began_s)
        if prefilled.kv_transfer_params is None:
            raise NoHandOverError(worker_id)
        decode = structs.replace(prompt.request, phase="decode", prefill_worker_id=worker_id)
        params, usage = prefilled.kv_transfer_params, prefilled.usage
        return HandOver(decode, params, booked.decision, ended_s, usage)
