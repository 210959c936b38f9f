"""A process that forwards: its connections, its one TaskGroup, its end."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

from router.client import ClientSettings, Retries, RouterClient
from router.forward.app import ForwardApp
from router.forward.asking_prompts import PromptAsking
from router.forward.asking_tokens import TokensOfEngines
from router.forward.completions import Completions
from router.forward.config import ForwardConfig
from router.forward.metrics import ForwardMetrics
from router.forward.models import Models
from router.forward.pools import PrefillPools
from router.forward.prefill import PrefillRouter
from router.forward.prefill_config import PrefillSettings
from router.forward.prefill_news import PrefillNews
from router.forward.probing import Prober
from router.forward.protocol import ForwardProtocol
from router.forward.push import Push, PushSettings
from router.forward.roster import Roster
from router.forward.standing import Standing, StandingLimits
from router.forward.tokenizer.checking import Checking
from router.forward.tokenizer.checks import Checks
from router.forward.tokenizer.local_tokens import LocalTokens
from router.forward.tokenizer.metrics import TokenizerMetrics
from router.forward.tokenizer.tokenizers import load_tokenizers
from router.forward.tokenizing import Tokenizing
from router.http_client import HttpPool
from router.process.http_limits import HttpLimits
from router.process.request_ids import ANSWERED, TRACEPARENT
from router.process.serving import HttpServer, listening, serve_until
from router.process.settings import Loaded
from router.security.edge import Edge
from router.security.http_access import HttpAccess
from router.security.metrics import EdgeCollector
from router.security.nats_access import nats_access

TIDY_S = 5.0
_POLL_S = 0.05
_RETRIES = Retries(attempts=3)


class ForwardService:
    """One process. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: ForwardConfig) -> None:
        self._config = config
        self._edge = Edge(config)
        self._authorization = _authorization(config)
        limits = StandingLimits(failures=config.breaker_failures, open_s=config.breaker_open_s)
        self._standing = Standing(limits)
        self._app: ForwardApp | None = None
        self._news: PrefillNews | None = None
        self.metrics = ForwardMetrics()
        EdgeCollector(self._edge, self.metrics.registry)
        of_tokenizers = TokenizerMetrics(self.metrics.registry)
        self._tokenizers = load_tokenizers(
            config.tokenizer, config.known_tokens, of_tokenizers.counted
        )
        self._checks = Checks()
        of_tokenizers.watch(self._checks, self._tokenizers.known)

    def reconfigure(self, loaded: Loaded[ForwardConfig]) -> None:
        """Go on with other settings, those of `reload.LIVE`."""
        self._config = loaded.config
        if self._app is not None:
            self._app.completions.reconfigure(loaded.config)

    def reread(self) -> list[str]:
        """Read files that settings name again; what came of it, in words."""
        return self._edge.reload()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then let what has begun end, and close. Raises ConfigError."""
        config = self._config
        with listening(config.host, config.http_port) as listener:
            async with self._router() as router:
                pool = HttpPool(config.pool_limits)
                self.metrics.watch(pool, self._standing)
                roster = Roster(router, config.routing_group)
                self._app = app = self._made_app(router, pool, roster)
                limits, tls = HttpLimits.of(config, config.max_connections), self._edge.tls
                server = HttpServer(app, limits, tls, self._refused, ForwardProtocol)
                background = (
                    self._edge.run(),
                    _tidy(pool),
                    *self._watching(roster, pool),
                )
                try:
                    await serve_until(stop, server, listener, background, self._drain)
                finally:
                    pool.close()

    def _watching(self, roster: Roster, pool: HttpPool) -> Iterator[Coroutine[Any, Any, None]]:
        """Of workers: who is there, who lives, and what their tokens are."""
        interval_s = self._config.probe_interval_s
        yield roster.run()
        yield Prober(roster, self._standing, pool, self.metrics, interval_s).run()
        if self._news is not None:
            yield self._news.run()
        if self._tokenizers:
            engines = TokensOfEngines(pool, self._authorization)
            yield Checking(self._tokenizers, roster, pool, engines, self._checks).run()

    def _made_app(self, router: RouterClient, pool: HttpPool, roster: Roster) -> ForwardApp:
        config = self._config
        settings = PushSettings(
            config.max_attempts,
            config.max_migrations,
            config.idle_timeout_s,
            config.answer_limit_bytes,
            self._authorization,
        )
        tokenizing = Tokenizing(
            router,
            TokensOfEngines(pool, self._authorization),
            self.metrics,
            config.routing_group,
            self._tokenizers.known,
            LocalTokens(self._tokenizers, self._checks),
        )
        prefill = self._made_prefill(router, pool)
        push = Push(router, pool, settings, self.metrics, tokenizing.note, self._standing, prefill)
        models = Models(router, config.routing_group)
        guard, metrics = self._edge.guard, self.metrics
        completions = Completions(config, push, tokenizing, metrics, guard, roster)
        return ForwardApp(completions, models, metrics, guard)

    def _made_prefill(self, router: RouterClient, pool: HttpPool) -> PrefillRouter:
        config = self._config
        settings = PrefillSettings(
            config.disaggregation == "auto" and config.mode == "push",
            config.prefill_fallback,
            config.max_attempts,
            config.prefill_timeout_s,
            config.answer_limit_bytes,
            config.conditional,
            self._authorization,
        )
        pools, metrics = PrefillPools(), self.metrics.prefill
        metrics.watch(pools)
        if config.nats_url and settings.is_on:
            at = config.nats_url, config.namespace, nats_access(config)
            self._news = PrefillNews(*at, pools, self._standing, metrics)
        asking = PromptAsking(pool, settings, self._standing, self._news)
        return PrefillRouter(router, asking, settings, metrics, self._standing, pools)

    @asynccontextmanager
    async def _router(self) -> AsyncIterator[RouterClient]:
        config = self._config
        settings = ClientSettings(
            max_wait_s=config.max_wait_s, retries=_RETRIES, headers=_trace_headers
        )
        options = config.router_access.options("router")
        token = options.get("headers", {}).get("authorization", "").removeprefix("Bearer ") or None
        if config.nats_url:
            access = nats_access(config)
            over_nats = RouterClient.over_nats(
                config.nats_url, config.namespace, token=token, access=access, settings=settings
            )
            async with over_nats as router:
                yield router
            return
        over_http = RouterClient.over_http(
            config.router_url, token=token, tls=options["verify"], settings=settings
        )
        async with over_http as router:
            yield router

    async def _drain(self) -> None:
        """Until every answer that has begun has ended, for a while."""
        ends_s = asyncio.get_running_loop().time() + self._config.drain_s
        while self.metrics.in_flight and asyncio.get_running_loop().time() < ends_s:
            await asyncio.sleep(_POLL_S)

    def _refused(self, code: str) -> None:
        self.metrics.refusals.labels(code).inc()


async def _tidy(pool: HttpPool) -> None:
    while True:
        await asyncio.sleep(TIDY_S)
        pool.close_old()


def _trace_headers() -> dict[str, str]:
    """Our span of the request that is answered, where its client said a trace."""
    ids = ANSWERED.get()
    return {} if ids is None or ids.span is None else {TRACEPARENT: str(ids.span)}


def _authorization(config: ForwardConfig) -> bytes | None:
    """What engines are told of who asks; the client's own word, unless that was for us."""
    if config.engine_token_file:
        access = HttpAccess(token_file=config.engine_token_file)
        header: str = access.options("engine")["headers"]["authorization"]
        return header.encode()
    return b"" if config.token_file else None
