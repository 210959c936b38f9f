"""The HTTP servers of registered workers: whether each answers, and the models that it lists.

A worker without events, or with event sockets that never answered, is known by its server alone.
Requests carry no secret, and follow no redirect; a server is asked every five seconds, and all
servers together at most twenty times a second.
"""

import asyncio
from collections.abc import Mapping
from random import Random
from urllib.parse import urlsplit

from msgspec import Struct

from router.discovery.attach.engine_client import EngineClient
from router.errors import ServerError

TIMEOUT_S = 2.0
INTERVAL_S = 5.0
INTERVAL_S_PER_SERVER = 0.05
JITTER = 0.2
AT_ONCE = 32
"""Concurrent requests; servers beyond it are asked later."""

UNVERIFIED = {"verify": False}
"""Certificates are not verified: the requests contain no secret, and an engine whose authority is
unknown here is an engine."""


class ServedModels(Struct, frozen=True):
    """A server's list of models. `owner`: the software that serves them, by its own name.

    `problem`: the reason why there was no response. `names`: None if it does not list its models,
    for lack of a key or of such a route.
    """

    problem: str | None = None
    names: frozenset[str] | None = None
    owner: str = ""


class ServerState(Struct, frozen=True):
    """The results of requests to a server since its worker was registered.

    `has_answered`: it did at some time. `failures`: requests without a response since the last one.
    `last`: the last result.
    """

    has_answered: bool = False
    failures: int = 0
    last: ServedModels = ServedModels()

    def after(self, result: ServedModels) -> "ServerState":
        """Return the state after one more request."""
        if result.problem is None:
            return ServerState(has_answered=True, last=result)
        return ServerState(self.has_answered, self.failures + 1, result)


NOT_ASKED = ServerState()


async def served_models(server: EngineClient) -> ServedModels:
    """Return the models that a server lists. The response is bounded in bytes and seconds."""
    try:
        listed = await server.send("GET", "/v1/models")
    except ServerError as error:
        return ServedModels(error.reason if error.status is None else None)
    data = listed.get("data")
    cards = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    owner = next((str(each["owned_by"]) for each in cards if each.get("owned_by")), "")
    names = frozenset(str(each["id"]) for each in cards if each.get("id"))
    return ServedModels(None, names or None, owner)


def is_server(endpoint: str) -> bool:
    """Return whether an endpoint names an HTTP server."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


class EngineServers:
    """The servers, by worker id. To be closed."""

    __slots__ = ("_asking", "_due_s", "_endpoints", "_random", "_states")

    def __init__(self, random: Random) -> None:
        self._random = random
        self._endpoints: dict[int, str] = {}
        self._states: dict[int, ServerState] = {}
        self._due_s: dict[int, float] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}

    def state(self, worker_id: int) -> ServerState:
        """Return what is known of a worker's server."""
        return self._states.get(worker_id, NOT_ASKED)

    def ask(self, endpoints: Mapping[int, str], group: asyncio.TaskGroup, now_s: float) -> None:
        """Begin the requests that are due, and forget other workers. O(workers)."""
        for worker_id, endpoint in list(self._endpoints.items()):
            if endpoints.get(worker_id) != endpoint:
                self._forget(worker_id)
        for worker_id, endpoint in endpoints.items():
            self._endpoints[worker_id] = endpoint
            is_due = now_s >= self._due_s.get(worker_id, now_s)
            if is_due and worker_id not in self._asking and len(self._asking) < AT_ONCE:
                interval_s = max(INTERVAL_S, INTERVAL_S_PER_SERVER * len(endpoints))
                jitter = 1 + JITTER * (2 * self._random.random() - 1)
                self._due_s[worker_id] = now_s + interval_s * jitter
                self._asking[worker_id] = group.create_task(self._ask(worker_id, endpoint))

    def _forget(self, worker_id: int) -> None:
        del self._endpoints[worker_id]
        self._states.pop(worker_id, None)
        self._due_s.pop(worker_id, None)
        if task := self._asking.pop(worker_id, None):
            task.cancel()

    async def _ask(self, worker_id: int, endpoint: str) -> None:
        server = EngineClient(_without_login(endpoint), TIMEOUT_S, UNVERIFIED)
        try:
            result = await served_models(server)
        finally:
            await server.close()
        self._states[worker_id] = self.state(worker_id).after(result)
        del self._asking[worker_id]


def _without_login(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
