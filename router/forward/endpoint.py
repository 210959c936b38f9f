"""The OpenAI endpoint before a router: its parts, its one TaskGroup, its shutdown.

Both `kv-router forward` and a router with an endpoint of its own run it.
"""

import asyncio
import logging
import socket
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from math import inf
from typing import TYPE_CHECKING, Any

from router.client import ClientSettings, Retries, RouterClient
from router.forward.apis.kept_responses import KeptResponses
from router.forward.app import ForwardApp, Models
from router.forward.completions import Completions, limits_of
from router.forward.config import ForwardConfig
from router.forward.cors import Cors
from router.forward.metrics import (
    ADMISSION_METRICS,
    BREAKER_METRICS,
    CACHE_METRICS,
    CHECK_METRICS,
    KEPT_METRICS,
    POOL_METRICS,
    PREFILL_METRICS,
    PREFIX,
    ForwardMetrics,
)
from router.forward.picker.pool import ClusterPool
from router.forward.placement import RequestPlacement
from router.forward.prefill.peer_events import PrefillEvents
from router.forward.prefill.pools import PrefillPools
from router.forward.prefill.remote_prefill import RemotePrefill
from router.forward.prefill.router import PrefillRouter
from router.forward.preparation import Preparation
from router.forward.push import Forwarder
from router.forward.resilience.circuit_breaker import BreakerLimits, CircuitBreaker
from router.forward.resilience.health_probe import HealthProber
from router.forward.resilience.worker_list import WorkerList
from router.forward.sessions import SeenIds
from router.forward.tokenizer.engine_client import EngineClient
from router.forward.tokenizer.engine_tokens import EngineTokens
from router.forward.tokenizer.engine_watch import EngineWatch
from router.forward.tokenizer.local_tokens import LocalTokens
from router.forward.tokenizer.tokenization import Tokenization
from router.forward.tokenizer.tokenizers import load_tokenizers
from router.forward.tokenizer.verification import Checks, TokenizerVerification
from router.runtime.http_client import HttpPool
from router.runtime.http_server.admission import Admission
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import (
    HttpServer,
    endpoint_of,
    listening,
    run_until,
    serve_until,
)
from router.runtime.process.metrics import Rows, expose
from router.runtime.security.edge import Edge
from router.runtime.security.http_access import HttpAccess
from router.runtime.security.nats_access import nats_access

if TYPE_CHECKING:  # gRPC is imported by processes with a picker alone
    from router.forward.picker.server import PickerPorts
    from router.forward.picker.service import PickerService

log = logging.getLogger(__name__)

TIDY_S = 5.0
_POLL_S = 0.05


def client_settings(config: ForwardConfig) -> ClientSettings:
    """Return the settings of the endpoint's client of the router."""
    return ClientSettings(max_wait_s=config.router.max_wait_s, retries=Retries(attempts=3))


class OpenAiEndpoint:
    """The endpoint. `serve` returns after `stop` is set and every connection is closed.

    `edge`: the guard and the TLS context of its port; `metrics`: those of the process; `cluster`:
    the pool of a Kubernetes cluster that the picker serves; None: the router's workers;
    `reservation_ttl_s`: the router's, if it is known.
    """

    def __init__(
        self,
        config: ForwardConfig,
        edge: Edge,
        metrics: ForwardMetrics,
        cluster: ClusterPool | None = None,
        reservation_ttl_s: float = inf,
    ) -> None:
        self._config = config
        self._reservation_ttl_s = reservation_ttl_s
        self._cluster = cluster
        self._edge = edge
        self._authorization = _authorization(config)
        engines = config.engines
        limits = BreakerLimits(failures=engines.breaker_failures, open_s=engines.breaker_open_s)
        self._breaker = CircuitBreaker(limits)
        self._completions: Completions | None = None
        self._engines: EngineTokens | None = None
        self._prefill_events: PrefillEvents | None = None
        self._picker: PickerService | None = None
        self._picker_ports: PickerPorts | None = None
        origins = config.completions.origins
        self._admission = Admission(edge.guard, limits_of(config), origins)
        self._cors = Cors(origins)
        self.metrics = metrics
        self._expose(BREAKER_METRICS, self._breaker)
        self._expose(ADMISSION_METRICS, self._admission)
        texts = config.completions
        self._tokenizers = load_tokenizers(
            texts.tokenizer, texts.known_tokens, metrics.count_tokenized
        )
        self._kept = KeptResponses()
        self._expose(KEPT_METRICS, self._kept)
        self._checks = Checks()
        self._expose(CHECK_METRICS, self._checks)
        self._expose(CACHE_METRICS, self._tokenizers.known)

    def reconfigure(self, config: ForwardConfig) -> None:
        """Apply changed settings, those of `reload.LIVE`."""
        self._config = config
        if self._completions is not None:
            self._completions.reconfigure(config)

    @contextmanager
    def listening(self, key: str = "http_port") -> Iterator[socket.socket | None]:
        """Bind the ports of clients and gateways before anything depends on them.

        `key`: the setting of the clients' port. Yields its socket; None without one, beside a
        picker. Raises ConfigError, which names the setting.
        """
        config, port = self._config, self._config.http.http_port
        with ExitStack() as stack:
            if config.picker.epp_port:
                from router.forward.picker.server import picker_ports

                ports = picker_ports(config.picker, config.security.host)
                self._picker_ports = stack.enter_context(ports)
            is_without = not port and key != "http_port"
            bound = nullcontext() if is_without else listening(config.security.host, port, key)
            yield stack.enter_context(bound)

    async def serve(
        self,
        stop: asyncio.Event,
        listener: socket.socket | None,
        router: RouterClient,
        background: Iterable[Coroutine[Any, Any, None]] = (),
    ) -> None:
        """Serve until `stop` is set; then finish open requests, at most `drain_s`, and close.

        `listener`: None without a port for clients, beside the picker of a gateway. `background`:
        further tasks that run as long.
        """
        config, tls = self._config, self._edge.tls
        pool = HttpPool(config.engines.pool_limits)
        self._expose(POOL_METRICS, pool)
        roster = WorkerList(router, config.completions.routing_group)
        app = self._made_app(router, pool, roster)
        self._completions = app.completions
        limits = HttpLimits.of(config.http, config.security, config.max_connections)
        tasks = [*background, _tidy(pool), *self._watching(roster, pool)]
        if self._picker is not None:
            tasks += self._picker.tasks(stop)
        try:
            if listener is None:
                await run_until(stop, tasks, self._drain)
                return
            log.info(
                "OpenAI endpoint listens on %s", endpoint_of(listener, has_tls=tls is not None)
            )
            server = HttpServer(app, limits, tls, self._refused, app.completions)
            await serve_until(stop, server, listener, tasks, self._drain)
        finally:
            pool.close()

    def _expose(self, rows: Rows, subject: object) -> None:
        expose(self.metrics.registry, PREFIX, rows, subject)

    def _watching(self, roster: WorkerList, pool: HttpPool) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the background tasks that follow workers: their list, health and tokenization."""
        interval_s = self._config.engines.probe_interval_s
        yield roster.run()
        if self._engines is not None and interval_s:
            yield EngineWatch(self._engines, roster).run()
        yield HealthProber(roster, self._breaker, pool, self.metrics, interval_s).run()
        if self._prefill_events is not None:
            yield self._prefill_events.run()
        if self._tokenizers:
            engines = EngineClient(pool, self._authorization)
            yield TokenizerVerification(self._tokenizers, roster, pool, engines, self._checks).run()

    def _made_app(self, router: RouterClient, pool: HttpPool, roster: WorkerList) -> ForwardApp:
        config = self._config
        self._engines = engines = EngineTokens(
            router,
            EngineClient(pool, self._authorization),
            self.metrics,
            config.completions.routing_group,
            self._tokenizers.known,
            roster.names,
        )
        local = LocalTokens(self._tokenizers, self._checks, roster.names)
        texts = config.completions
        placing = RequestPlacement(
            texts.routing_group,
            texts.mode == "direct",
            config.router.max_wait_s,
            SeenIds(),
            roster.names,
        )
        preparation = Preparation(placing, Tokenization(engines, local, self.metrics))
        prefill = self._made_prefill(router, pool)
        if self._picker_ports is not None:
            self._picker = self._made_picker(
                router, preparation, prefill, roster, self._picker_ports
            )
        push = Forwarder(
            router,
            pool,
            config.engines,
            self._authorization,
            self.metrics,
            preparation.tokenizing.note,
            self._breaker,
            prefill,
            self._kept,
            roster,
            preparation.sizes,
        )
        models = Models(router, config.completions.routing_group)
        completions = Completions(
            push, preparation, self.metrics, self._admission, roster, self._cors
        )
        return ForwardApp(completions, models, self.metrics, self._cors, self._cluster)

    def _made_picker(
        self,
        router: RouterClient,
        preparation: Preparation,
        prefill: PrefillRouter,
        roster: WorkerList,
        ports: "PickerPorts",
    ) -> "PickerService":
        from router.forward.picker.service import PickerService

        return PickerService(
            self._config,
            router,
            preparation,
            prefill,
            self._breaker,
            roster,
            self._edge.guard,
            self._authorization,
            self._cluster,
            self.metrics.registry,
            ports,
            self._reservation_ttl_s,
        )

    def _made_prefill(self, router: RouterClient, pool: HttpPool) -> PrefillRouter:
        config, pools, metrics = self._config, PrefillPools(), self.metrics
        self._expose(PREFILL_METRICS, pools)
        url = config.router.nats_url
        if url and config.has_remote_prefill:
            at = url, config.router.namespace, nats_access(config.nats, url)
            self._prefill_events = PrefillEvents(*at, pools, self._breaker, metrics)
        prefill_calls = RemotePrefill(
            pool, config, self._authorization, self._breaker, self._prefill_events
        )
        return PrefillRouter(router, prefill_calls, config, metrics, self._breaker, pools)

    async def _drain(self) -> None:
        """Wait until all responses in progress have ended, at most `drain_s`."""
        ends_s = asyncio.get_running_loop().time() + self._config.drain_s
        while self._is_busy() and asyncio.get_running_loop().time() < ends_s:
            await asyncio.sleep(_POLL_S)

    def _is_busy(self) -> bool:
        return self._admission.in_flight > 0 or (
            self._picker is not None and self._picker.is_busy()
        )

    def _refused(self, code: str) -> None:
        self.metrics.refusals.labels(code).inc()


async def _tidy(pool: HttpPool) -> None:
    while True:
        await asyncio.sleep(TIDY_S)
        pool.close_old()


def _authorization(config: ForwardConfig) -> bytes | None:
    """Return the credentials for engines.

    None: the client's own header is forwarded; it is not if it holds a token of this process.
    """
    path = config.engines.engine_token_file
    if path:
        return HttpAccess(token_file=path).headers("engine")["authorization"].encode()
    return b"" if config.security.token_file else None
