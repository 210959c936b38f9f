"""The picker of an endpoint: its parts, before the same router client as the forwarder."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from router.client import RouterClient
from router.forward.config import ForwardConfig
from router.forward.picker.metrics import PICKER_METRICS, PREFIX, PickerMetrics
from router.forward.picker.picker import Picker, PickerLimits
from router.forward.picker.placed_requests import PlacedRequests
from router.forward.picker.placement import GatewayPlacement
from router.forward.picker.pool import ClusterPool, KubernetesPool, RouterPool
from router.forward.picker.server import PickerPorts, PickerServer
from router.forward.prefill.router import PrefillRouter
from router.forward.preparation import Preparation
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.forward.resilience.worker_list import WorkerList
from router.runtime.http_server.limits import HttpLimits
from router.runtime.process.metrics import expose
from router.runtime.security.guard import Guard


class PickerService:
    """The picker. `guard`: of the endpoint; `authorization`, `cluster`: see `OpenAiEndpoint`."""

    def __init__(
        self,
        config: ForwardConfig,
        router: RouterClient,
        preparation: Preparation,
        prefill: PrefillRouter,
        breaker: CircuitBreaker,
        roster: WorkerList,
        guard: Guard,
        authorization: bytes | None,
        cluster: ClusterPool | None,
        registry: CollectorRegistry,
        ports: PickerPorts,
        reservation_ttl_s: float,
    ) -> None:
        own = config.picker
        metrics = PickerMetrics(registry)
        listed = RouterPool(roster, own.priorities)
        pool = listed if cluster is None else KubernetesPool(listed, cluster)
        placement = GatewayPlacement(
            router,
            preparation,
            prefill,
            breaker,
            roster,
            pool,
            guard,
            authorization,
            own.epp_fallbacks,
        )
        ends_by_log = own.epp_ends == "access_log"
        requests = PlacedRequests(
            pool, breaker, metrics, time.monotonic, ends_by_log=ends_by_log, ttl_s=reservation_ttl_s
        )
        self._picker = Picker(placement, requests, metrics, limits_of(config))
        self._server = PickerServer(ports, self._picker, pool, config.max_connections)
        expose(registry, PREFIX, PICKER_METRICS, self._picker)

    def tasks(self, stop: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """Return the tasks that serve; from `stop` on the picker is not ready, and answers on."""
        return [self._picker.run(), self._server.run(stop)]

    def is_busy(self) -> bool:
        """Return whether requests are in flight, or gateways may not know yet that it drains."""
        return not self._server.is_quiet(time.monotonic())


def limits_of(config: ForwardConfig) -> PickerLimits:
    """Return the limits of requests in a configuration."""
    return PickerLimits(
        config.bodies.body_limit_bytes,
        HttpLimits.of(config.http, config.security, config.max_connections),
        config.picker.epp_max_streams,
        config.bodies.body_timeout_s,
        config.completions.bodies_limit_bytes,
    )
