"""Engines attached by their URLs: each is asked what it is, registered, and asked again.

    --workers, POST /workers ─▶ follow ─ Server.look ─▶ attachment ─▶ Registrar ─▶ core, followers
                                  ▲ each second until it answers, then every five seconds │
                                  └───────────────────────────────────────────────────────┘

An engine that does not answer stays registered: its event sockets decide whether it can be chosen.
The registration keeps the URL (`stable_routing_id`), so that an engine is followed again after a
restart; engines that the setting no longer names are then removed.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from router.config.discovery import AttachConfig
from router.core.registrations import Registrations
from router.discovery.attach.attachment import Attachment, EngineUrl, attachment, parsed_url
from router.discovery.attach.engine_server import Server
from router.discovery.registration import Registrar
from router.errors import ConfigError, InvalidFieldError, KvRouterError
from router.observability.event_timeline import EventTimeline
from router.protocol.workers import WorkerRegistration
from router.runtime.process.metrics import Rows, expose, gauge
from router.runtime.security.http_access import HttpAccess

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
AWAIT_S = 1.0
"""The interval of requests to a server that does not answer yet."""
LOOK_S = 5.0
"""The interval of requests to a server that answers: adapters come and go."""
JITTER = 0.2

BY_SETTING, BY_REQUEST = "workers/", "attached/"
"""Prefixes of `stable_routing_id`: the URL comes from the setting, or from a request."""


class Attachments:
    """The attached engines; `sentences`: what is known of each, by worker id."""

    def __init__(
        self,
        config: AttachConfig,
        registrar: Registrar,
        registrations: Registrations,
        timeline: EventTimeline,
        registry: CollectorRegistry,
        random: Random,
    ) -> None:
        """Parse the URLs, and register the metrics. Raises ConfigError."""
        self._config = config
        self._registrar, self._registrations = registrar, registrations
        self._timeline, self._random = timeline, random
        with_key = HttpAccess(config.worker_token_file, config.worker_ca_file)
        without = HttpAccess(ca_file=config.worker_ca_file)
        self._options: Mapping[str, Mapping[str, Any]] = {
            BY_SETTING: with_key.options("worker"),
            BY_REQUEST: without.options("worker"),  # a caller may name any address
        }
        self._set = {each.worker_id: each for each in _configured(config.workers)}
        self._followed: dict[int, EngineUrl] = {}
        self._known: dict[int, Attachment] = {}
        self._group: asyncio.TaskGroup | None = None
        self.sentences: dict[int, str] = {}
        expose(registry, "kv_router_attached_", _METRICS, self)

    @property
    def counts(self) -> dict[str, int]:
        """The engines that answer, and those that do not."""
        up = sum(each.is_up for each in self._known.values())
        return {"up": up, "down": len(self._followed) - up}

    async def run(self) -> None:
        """Attach the engines of the setting and those of earlier requests, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for engine in (*self._set.values(), *await self._restored()):
                self._follow(engine)
            await asyncio.Event().wait()

    async def attach(self, url: str) -> int:
        """Attach an engine, and return its worker id, whether it answers yet or not.

        Raises InvalidFieldError, and what `Registrar` raises.
        """
        engine = parsed_url(url, "endpoint")
        if self._registered(engine.worker_id) is None:
            self._known.pop(engine.worker_id, None)  # of an engine that was unregistered since
        await self._look(engine)
        self._follow(engine)
        return engine.worker_id

    def access(self, worker_id: int) -> Mapping[str, Any]:
        """Return the options of httpx for requests to a worker; only the setting's get the key."""
        return self._options[BY_SETTING if worker_id in self._set else BY_REQUEST]

    def _follow(self, engine: EngineUrl) -> None:
        is_followed = engine.worker_id in self._followed
        self._followed[engine.worker_id] = engine
        if not is_followed and self._group is not None:
            self._group.create_task(self._follow_forever(engine.worker_id))

    async def _restored(self) -> list[EngineUrl]:
        """Return the engines that an earlier process attached by request; drop the setting's old.

        Those are the ones that the setting does not name any more.
        """
        found = []
        for each in list(self._registrations):
            owner = each.stable_routing_id or ""
            if owner.startswith(BY_REQUEST) and each.worker_id not in self._set:
                found.append(parsed_url(owner.removeprefix(BY_REQUEST), "endpoint"))
            elif owner.startswith(BY_SETTING) and each.worker_id not in self._set:
                await self._registrar.remove(each.worker_id)
        return found

    async def _follow_forever(self, worker_id: int) -> None:
        """Ask an engine again and again, until it is unregistered."""
        while True:
            try:
                await self._look(self._followed[worker_id])
            except KvRouterError as error:
                engine = self._followed[worker_id]
                self._say(worker_id, f"{engine.url}  is not registered: {error}", is_good=False)
            known = self._known.get(worker_id)
            pause_s = LOOK_S if known is not None and known.is_up else AWAIT_S
            await asyncio.sleep(pause_s * (1 + JITTER * (2 * self._random.random() - 1)))
            if worker_id in self._known and self._registered(worker_id) is None:
                del self._followed[worker_id], self._known[worker_id]
                self.sentences.pop(worker_id, None)
                return

    def _registered(self, worker_id: int) -> WorkerRegistration | None:
        try:
            return self._registrations.get(worker_id)
        except KvRouterError:
            return None

    async def _look(self, engine: EngineUrl) -> None:
        """Ask an engine what it is, and register it if that has changed.

        What is registered otherwise, by an earlier process or changed by a caller, stays until the
        engine says something else.
        """
        prefix = BY_SETTING if engine.worker_id in self._set else BY_REQUEST
        server = Server(engine.url, TIMEOUT_S, self._options[prefix])
        try:
            seen = await server.look()
        finally:
            await server.close()
        found = attachment(
            engine,
            seen,
            follows_others=self._config.workers_on_other_hosts,
        )
        known = self._known.get(engine.worker_id)
        registration = replace(found.registration, stable_routing_id=f"{prefix}{engine.text}")
        before = self._registered(engine.worker_id) if known is None else known.registration
        if found.is_up or before is None:
            await self._register(registration, before)
        else:
            registration = before
        self._known[engine.worker_id] = replace(found, registration=registration)
        self._say(engine.worker_id, found.sentence, is_good=found.is_up)

    async def _register(
        self, registration: WorkerRegistration, before: WorkerRegistration | None
    ) -> None:
        if before == registration:
            return
        await self._registrar.check(registration)
        if before is not None and before.scope != registration.scope:
            await self._registrar.remove(registration.worker_id)
        await self._registrar.put(registration)

    def _say(self, worker_id: int, sentence: str, *, is_good: bool) -> None:
        if self.sentences.get(worker_id) == sentence:
            return
        self.sentences[worker_id] = sentence
        (log.info if is_good else log.warning)("%s", sentence)
        self._timeline.note(
            "worker_attached", "good" if is_good else "fault", f"worker {worker_id}", sentence
        )


def _configured(workers: str) -> Iterable[EngineUrl]:
    try:
        engines = [parsed_url(each, "workers") for each in workers.split(",") if each.strip()]
    except InvalidFieldError as error:
        raise ConfigError("workers", error.reason, error.allowed) from error
    ids = [each.worker_id for each in engines]
    for each in engines:
        if ids.count(each.worker_id) > 1:
            raise ConfigError("workers", f"{each.url} is named twice", "each engine once")
    return engines


_METRICS: Rows = {"engines": gauge("Engines attached by URL, by state", "counts", "state")}
