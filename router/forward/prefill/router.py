"""Disaggregated serving: one worker computes a prompt, another generates the response.

    pools: any prefill worker? ─ conditional: worth it? ─▶ book phase prefill ─▶ prefill: one token
                                                                                        │ its params
            push.py: book phase decode, send these along ◀────────── HandOver ◀─────────┘

The prefill precedes every message to the decode worker, so a failure costs only time. A failed
prefill is computed by the decode worker (`always`, as in Dynamo 1.0), or refused
(`unregistered`, as in Dynamo 1.6: the decode worker computes only if no prefill worker exists).
"""

import time

from msgspec import structs

from router.client import Reservation, RouterClient
from router.errors import KvRouterError
from router.forward.config import ForwardConfig
from router.forward.errors import (
    NoHandOverError,
    PrefillFailedError,
    PromptRefusedError,
    WorkerFailedError,
)
from router.forward.metrics import ForwardMetrics, PrefillOutcome
from router.forward.placement import again
from router.forward.prefill.conditions import rule_of
from router.forward.prefill.handoff import (
    KvHandoff,
    is_handed_over,
    is_to_bypass,
    prefill_request,
    pushes,
)
from router.forward.prefill.pools import PrefillPools
from router.forward.prefill.remote_prefill import PrefillRequest, RemotePrefill
from router.forward.resilience.booking import reserve_with_failover
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.protocol.replies import Decision
from router.protocol.requests import RankTarget, SelectRequest, Usage
from router.scheduler.errors import NoEndpointsError


class PrefillRouter:
    """Arranges remote prefills."""

    def __init__(
        self,
        router: RouterClient,
        prefill_calls: RemotePrefill,
        config: ForwardConfig,
        metrics: ForwardMetrics,
        breaker: CircuitBreaker,
        pools: PrefillPools,
    ) -> None:
        self._router = router
        self._prefill_calls = prefill_calls
        self._is_on = config.has_remote_prefill
        self._fallback = config.prefill.prefill_fallback
        self._max_attempts = config.engines.max_attempts
        self._conditional = rule_of(config.prefill)
        self._metrics = metrics
        self._breaker = breaker
        self.pools = pools

    def skips_remote_prefill(self, request: SelectRequest, now_s: float) -> bool:
        """Return whether no remote prefill is possible, so that `hand_over` would return None."""
        if not self._is_on:
            return True
        is_named = request.prefill_worker_id is not None
        return not is_named and self.pools.is_resting(request.model_name, now_s)

    async def hand_over(self, prompt: PrefillRequest) -> KvHandoff | None:
        """Have another worker compute a prompt. Returns None if the request is served as usual.

        Raises the error of the router or of the last worker, unless it falls back to the decode
        worker.
        """
        request, model = prompt.request, prompt.request.model_name
        if not self._is_on or is_handed_over(prompt.asked):
            return None
        is_named = request.prefill_worker_id is not None
        is_there = is_named or self.pools.is_worth_trying(model, time.monotonic())
        if not is_there or not (is_named or await self._has_prefill_worker(request)):
            return self._computed_there(request, "unavailable")
        if await self._is_bypassed(prompt):
            return self._computed_there(request, "bypassed")
        try:
            return await self._handed_over(prompt)
        except NoEndpointsError:
            if is_named:  # no prefill worker: the caller named the one that has computed the prompt
                return None
            self.pools.missed(model, time.monotonic())
            return self._computed_there(request, "unavailable")

    async def booked(self, prompt: PrefillRequest) -> Reservation | None:
        """Book a prefill worker for a decode worker that has the prompt computed there itself.

        For engines behind a gateway, whose own sidecar calls the prefill worker. The caller must
        leave the reservation. Returns None if the decode worker is to compute the prompt. Raises
        KvRouterError.
        """
        request, now_s = prompt.request, time.monotonic()
        if self.skips_remote_prefill(request, now_s) or is_handed_over(prompt.asked):
            return None
        is_there = self.pools.is_worth_trying(request.model_name, now_s)
        if not is_there or not await self._has_prefill_worker(request):
            return None
        if await self._is_bypassed(prompt):
            return None
        prefill = prefill_request(request)
        try:
            booked = await reserve_with_failover(self._router, self._breaker, prefill, ())
        except NoEndpointsError:
            self.pools.missed(request.model_name, now_s)
            return None
        self.pools.found(request.model_name)
        return booked

    async def _has_prefill_worker(self, request: SelectRequest) -> bool:
        return self.pools.state(request.model_name) == "active" or await self._finds(request)

    async def _finds(self, request: SelectRequest) -> bool:
        """Return whether the router finds a prefill worker.

        The request is an item of a batch: a batch item without a worker is not counted as a
        refusal.
        """
        model, group = request.model_name, request.routing_group
        asked = SelectRequest(token_ids=[0], model_name=model, routing_group=group, phase="prefill")
        try:
            (result,) = await self._router.select_batch([asked])
        except KvRouterError:  # the placement of this request will report the error
            return False
        is_found = (result.refused or {}).get("code") != NoEndpointsError.code
        if not is_found:
            self.pools.missed(model, time.monotonic())
        return is_found

    async def _handed_over(self, prompt: PrefillRequest) -> KvHandoff | None:
        """Have a prompt computed, with fallbacks. Raises NoEndpointsError if no worker exists."""
        try:
            return await self._prefilled(prompt)
        except NoEndpointsError:
            raise
        except PromptRefusedError:  # the decode worker will report the error
            return self._computed_there(prompt.request, "not_taken")
        except KvRouterError:
            if self._fallback == "unregistered":
                self._metrics.prefills.labels("refused").inc()
                raise
            return self._computed_there(prompt.request, "fell_back")

    async def place(self, request: SelectRequest) -> Decision | None:
        """Return the decision for a remote prefill, or None; books nothing."""
        if not self._is_on or not await self._finds(request):
            return None
        try:
            return await self._router.select(prefill_request(request))
        except NoEndpointsError:
            return None

    def landed(self, hand_over: KvHandoff, usage: Usage | None) -> None:
        """Count a prefill at the end of its response.

        `usage`: usage reported by the decode worker; transferred tokens count as cached there.
        """
        if hand_over.params is None:
            return
        is_unused = usage is not None and usage.prompt_tokens_details and not usage.cached
        outcome: PrefillOutcome = "not_used" if is_unused else "handed_over"
        self._metrics.prefills.labels(outcome).inc()
        if usage is not None:
            self._metrics.handed_over_tokens.inc(usage.cached)

    def answered(self, hand_over: KvHandoff) -> None:
        """Record the first token of the decode worker."""
        if hand_over.params is not None:
            self._metrics.hand_over_seconds.observe(time.monotonic() - hand_over.ended_s)

    def _computed_there(self, request: SelectRequest, outcome: PrefillOutcome) -> KvHandoff | None:
        """Serve the request by one worker, and count this if prefill workers ever existed."""
        if self.pools.state(request.model_name) == "pending":
            return None
        self._metrics.prefills.labels(outcome).inc()
        whole = structs.replace(request, phase="aggregated", prefill_worker_id=None)
        return KvHandoff(whole)

    async def _is_bypassed(self, prompt: PrefillRequest) -> bool:
        """Return whether the decode worker computes the prompt itself. Raises KvRouterError."""
        request, conditional = prompt.request, self._conditional
        if is_to_bypass(prompt.asked) or not prompt.asked.api.can_continue:
            return True
        if conditional is None or request.prefill_worker_id is not None:
            return False
        request = again(request)  # only asked: it is refused, if at all, where it is booked
        whole = structs.replace(request, phase="aggregated", advisory=True)
        decode, load = await self._router.select(whole), None
        if conditional.looks_at_prefill:
            asked = structs.replace(prefill_request(request), advisory=True)
            try:
                load = (await self._router.select(asked)).worker_load
            except NoEndpointsError:
                return False
        return conditional.bypasses(decode, load)

    async def _prefilled(self, prompt: PrefillRequest) -> KvHandoff:
        """Book and request a prefill, with retries. Raises NoEndpointsError, PrefillFailedError.

        Also raises the router's errors, PromptRefusedError and NoHandOverError.
        """
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
                self._metrics.prefills.labels("failed").inc()
                failed.add(error.worker_id)
                if named is not None or len(failed) >= self._max_attempts:
                    raise PrefillFailedError(len(failed), str(error)) from error
                last = error
            except NoEndpointsError:
                if not failed:
                    raise
                raise PrefillFailedError(len(failed), str(last)) from last

    async def _attempt(
        self, prompt: PrefillRequest, request: SelectRequest, failed: set[int]
    ) -> KvHandoff:
        booked = await reserve_with_failover(self._router, self._breaker, request, failed)
        try:
            began_s, worker_id = time.monotonic(), booked.decision.worker_id
            self.pools.found(request.model_name)
            decode = structs.replace(
                again(prompt.request), phase="decode", prefill_worker_id=worker_id
            )
            target = await self._target(decode)
            prefilled = await self._prefill_calls.compute(prompt, booked.decision, target)
            booked.usage = prefilled.usage
        finally:
            booked.leave()
        ended_s = time.monotonic()
        self._metrics.prefill_seconds.observe(ended_s - began_s)
        if prefilled.kv_transfer_params is None:
            raise NoHandOverError(worker_id)
        params, usage = prefilled.kv_transfer_params, prefilled.usage
        self.pools.note_pushes(request.model_name, pushes=pushes(params))
        if params.get("pushed") and decode.session_id is None and decode.affinity_target is None:
            decode = structs.replace(decode, affinity_target=target, session_is_hint=True)
        return KvHandoff(decode, params, booked.decision, ended_s, usage)

    async def _target(self, decode: SelectRequest) -> RankTarget | None:
        """Return the rank that would decode a prompt now, for prefill workers that push to it.

        Nothing is booked: it may be another once the prompt is computed, which then reads the
        blocks. Returns None if there is none.
        """
        if not self.pools.pushes(decode.model_name):
            return None
        try:
            decision = await self._router.select(decode)
        except KvRouterError:  # booking it will report the error
            return None
        return RankTarget(decision.worker_id, decision.dp_rank)
