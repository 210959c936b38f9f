"""Engines attached by their URLs: each is visited again and again.

    --workers, POST /workers ─▶ follow ─▶ EngineVisitor.visit ─▶ Registrar ─▶ core, followers
                                  ▲                        └─▶ Announcer
                                  └ each second until it answers, then every two seconds

An engine that does not answer stays registered: its event sockets decide whether it can be chosen.
The registration keeps the URL (`stable_routing_id`), so that an engine is followed again after a
restart; engines that the setting no longer names are then removed.
"""

import asyncio
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from router.config.discovery import AttachConfig
from router.core.registrations import Registrations
from router.discovery.attach.announcer import Announcer
from router.discovery.attach.engine_url import EngineUrl, parsed_url
from router.discovery.attach.followed_engine import BY_POOL, BY_REQUEST, BY_SETTING, FollowedEngine
from router.discovery.attach.visitor import EngineVisitor
from router.discovery.registration import Registrar
from router.errors import ConfigError, InvalidFieldError, KvRouterError
from router.runtime.process.metrics import Rows, counter, expose, gauge

AWAIT_S = 1.0
"""The interval of visits to a server that does not answer yet."""
LOOK_S, LOOK_S_PER_ENGINE = 2.0, 0.02
"""The interval of visits to a server that answers: adapters come and go. With many engines it is
longer, so that there are at most 50 visits a second."""
JITTER = 0.2


class Attachments:
    """The attached engines. `followed`: by worker id, in the order in which they were named."""

    def __init__(
        self,
        config: AttachConfig,
        registrar: Registrar,
        registrations: Registrations,
        visitor: EngineVisitor,
        announcer: Announcer,
        registry: CollectorRegistry,
        random: Random,
    ) -> None:
        """Parse the URLs, and register the metrics. Raises ConfigError."""
        self._registrar, self._registrations = registrar, registrations
        self._visitor, self._announcer, self._random = visitor, announcer, random
        self._set = {each.worker_id: each for each in _configured(config.workers)}
        self._followed: dict[int, FollowedEngine] = {}
        self._following: dict[int, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._visited = asyncio.Event()
        expose(registry, "kv_router_attached_", _METRICS, self)

    @property
    def sentences(self) -> Mapping[int, str]:
        """The sentence about each engine, by worker id."""
        return self._announcer.sentences

    @property
    def counts(self) -> dict[str, int]:
        """The engines that answer, and those that do not."""
        up = sum(each.is_up for each in self._followed.values())
        return {"up": up, "down": len(self._followed) - up}

    @property
    def proof_requests(self) -> int:
        """The requests sent to prove event sockets."""
        return self._visitor.proof_requests

    async def run(self) -> None:
        """Attach the engines of the setting and those of earlier requests, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for engine in (*self._set.values(), *await self._restored()):
                self._follow(self._new(engine))
            for worker_id in self._followed.keys() - self._following.keys():
                self._begin(worker_id)  # attached before this task ran
            await asyncio.Event().wait()

    async def until_visited(self) -> None:
        """Wait until each engine of the setting was visited once."""
        if self._set:
            await self._visited.wait()

    async def attach(self, url: str) -> int:
        """Attach an engine, and return its worker id, whether it answers yet or not.

        Raises InvalidFieldError, and what `Registrar` raises.
        """
        engine = parsed_url(url, "endpoint")
        worker_id = engine.worker_id
        followed = self._followed.get(worker_id)
        if followed is None or not self._is_registered(worker_id):
            followed = self._new(engine)  # one that is followed was unregistered since
        elif followed.engine != engine:
            followed.name(engine)
        await self._visitor.look(followed, self._followed)
        self._follow(followed)
        return worker_id

    def attach_found(self, engine: EngineUrl) -> None:
        """Attach an engine that the cluster names, whether it answers yet or not."""
        followed = self._followed.get(engine.worker_id)
        if followed is None:
            followed = FollowedEngine(engine, BY_POOL)
        elif followed.engine != engine:
            followed.name(engine)
        self._follow(followed)

    async def detach(self, worker_id: int) -> None:
        """Stop following an engine, and remove its registration. Raises what `Registrar` raises."""
        following = self._following.pop(worker_id, None)
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        self._forget(worker_id)
        if self._is_registered(worker_id):
            await self._registrar.remove(worker_id)

    def access(self, worker_id: int) -> Mapping[str, Any]:
        """Return the options of httpx for requests to a worker; operators' engines get the key."""
        followed = self._followed.get(worker_id)
        return self._visitor.access(BY_REQUEST if followed is None else followed.owner)

    def _new(self, engine: EngineUrl) -> FollowedEngine:
        return FollowedEngine(engine, BY_SETTING if engine.worker_id in self._set else BY_REQUEST)

    def _follow(self, followed: FollowedEngine) -> None:
        worker_id = followed.engine.worker_id
        self._followed[worker_id] = followed
        self._announcer.expect(worker_id)
        if worker_id not in self._following and self._group is not None:
            self._begin(worker_id)

    def _begin(self, worker_id: int) -> None:
        if self._group is not None:
            self._following[worker_id] = self._group.create_task(self._follow_forever(worker_id))

    def _forget(self, worker_id: int) -> None:
        self._followed.pop(worker_id, None)
        self._following.pop(worker_id, None)
        self._announcer.forget(worker_id)

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
        """Visit an engine again and again, until it is unregistered."""
        while True:
            followed = self._followed[worker_id]
            try:
                await self._visitor.visit(followed, self._followed)
            except KvRouterError as error:
                sentence = f"{followed.engine.url}  is not registered: {error}"
                self._announcer.say(worker_id, sentence, is_good=False)
            if all(each.known is not None for each in self._followed.values()):
                self._visited.set()
            look_s = max(LOOK_S, LOOK_S_PER_ENGINE * len(self._followed))
            pause_s = look_s if followed.is_up else AWAIT_S
            await asyncio.sleep(pause_s * (1 + JITTER * (2 * self._random.random() - 1)))
            if followed.known is not None and not self._is_registered(worker_id):
                self._forget(worker_id)
                return

    def _is_registered(self, worker_id: int) -> bool:
        try:
            self._registrations.get(worker_id)
        except KvRouterError:
            return False
        return True


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


_METRICS: Rows = {
    "engines": gauge("Engines attached by URL, by state", "counts", "state"),
    "proof_requests": counter("Requests sent to prove event sockets", "proof_requests"),
}
