"""Registration of workers: endpoints checked, then added to the core, followed and persisted.

An engine's event socket has no authentication, and its events contain the tokens of prompts. An
address that the whole internet can reach is therefore most likely a mistake.

Registration of workers: checked, added to the core, followed, and persisted.

put ─ check_endpoints ─▶ Registrations ─▶ Engines.settle ─▶ data folder ─▶ response
"""

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias
from urllib.parse import urlsplit

from router.core.commands import OrderWorker
from router.core.core import RouterCore
from router.core.registered_workers import RegisteredWorker
from router.core.registrations import Registrations
from router.errors import InvalidFieldError, KvRouterError
from router.ingest.data_dir import DataDir, Kept
from router.ingest.effect_runner import EffectRunner
from router.ingest.engines import Engines
from router.protocol.catalogue import VLLM_P2P, Lifecycle, block_protocols
from router.protocol.workers import WorkerRegistration
from router.publisher.batch_order.address import rank_endpoint

RESOLVE_S = 1.0
"""The time to resolve a name; a name that takes longer, or is unknown, is accepted."""

_BLOCKS_AT = "tcp://host:port, unix:///path, or vllm-p2p://host:port of vLLM's own P2P tier"
_NOT_PUBLIC = "an address of a private network; any, if allow_public_engines is set"


async def check_endpoints(registration: WorkerRegistration, *, allow_public: bool) -> None:
    """Raise InvalidFieldError for the first endpoint that is not accepted."""
    for field, endpoint in _endpoints(registration):
        rank_endpoint(endpoint, 0, field)
        await _check_host(field, endpoint, "events contain", allow_public=allow_public)
    for field, address in _block_addresses(registration):
        if not block_protocols([address]):
            raise InvalidFieldError(field, f"{address!r} is no address", _BLOCKS_AT, status=422)
        await _check_host(field, address, "blocks are", allow_public=allow_public)


async def _check_host(field: str, endpoint: str, what: str, *, allow_public: bool) -> None:
    """Raise InvalidFieldError if the host of a TCP endpoint is not accepted."""
    if not endpoint.startswith(("tcp://", VLLM_P2P)):
        return
    for address in await _addresses(urlsplit(endpoint).hostname or ""):
        if address.is_unspecified:
            reason = f"{endpoint!r} is an address to listen on, not one to connect to"
            raise InvalidFieldError(field, reason, "its host's address", status=422)
        if address.is_global and not allow_public:
            reason = f"{endpoint!r} is public, and an engine's {what} its prompts"
            raise InvalidFieldError(field, reason, _NOT_PUBLIC, status=422)


def _check_eagle(registration: WorkerRegistration) -> None:
    """Raise InvalidFieldError if two blocks of each hit would be subtracted."""
    hybrid = registration.hybrid
    if registration.is_eagle and hybrid is not None and hybrid.eagle_groups:
        raise InvalidFieldError(
            "hybrid.eagle_groups",
            "given beside is_eagle",
            "one of the two: eagle_groups for a hybrid model of vLLM, is_eagle for SGLang, which "
            "hashes pairs of tokens",
            status=422,
        )


def _endpoints(registration: WorkerRegistration) -> Iterator[tuple[str, str]]:
    """Yield field and endpoint, without empty endpoints."""
    for field in ("kv_events_endpoint", "replay_endpoint"):
        if endpoint := getattr(registration, field):
            yield field, endpoint
    for field in ("kv_events_endpoints", "replay_endpoints", "load_endpoints"):
        for dp_rank, endpoint in (getattr(registration, field) or {}).items():
            if endpoint:
                yield f"{field}.{dp_rank}", endpoint


def _block_addresses(registration: WorkerRegistration) -> Iterator[tuple[str, str]]:
    """Yield field and address of all places where a worker shares its blocks."""
    for dp_rank, addresses in (registration.block_addresses or {}).items():
        for address in addresses:
            yield f"block_addresses.{dp_rank}", address


async def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a host name; none if it cannot be resolved yet."""
    try:
        return [ipaddress.ip_address(host.partition("%")[0])]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]


log = logging.getLogger(__name__)

MakeWorker: TypeAlias = Callable[[WorkerRegistration, int], RegisteredWorker | None]
"""A conversion of a registration and an incarnation for the core; None if fields are missing."""


class Registrar:
    """Changes to registered workers.

    `keeps_orders`: operators' orders are persisted here, because there is no bus for them. `held`:
    reasons not to choose workers, by id, which discovery knows.
    """

    def __init__(
        self,
        core: RouterCore,
        registrations: Registrations,
        engines: Engines,
        effect_runner: EffectRunner,
        data_dir: DataDir | None,
        make_worker: MakeWorker,
        *,
        keeps_orders: bool,
        allow_public: bool,
    ) -> None:
        self._core = core
        self._registrations = registrations
        self._engines = engines
        self._effect_runner = effect_runner
        self._data_dir = data_dir
        self._make_worker = make_worker
        self._keeps_orders = keeps_orders
        self._allow_public = allow_public
        self.held: dict[int, str] = {}
        self._saving = asyncio.Lock()
        self._changes = self._saved_changes = 0

    async def check(self, registration: WorkerRegistration) -> None:
        """Check what a registration says of its engine. Raises InvalidFieldError."""
        _check_eagle(registration)
        await check_endpoints(registration, allow_public=self._allow_public)

    async def put(self, registration: WorkerRegistration) -> None:
        """Add or replace a worker that was checked.

        Ranks with the same event source as before keep their blocks. Raises what
        `Registrations.put` raises, and DataDirError.
        """
        self._put(registration)
        await self._follow_up(registration.worker_id)

    async def remove(self, worker_id: int) -> None:
        """Remove a worker. Raises WorkerNotFoundError, AnnouncedWorkerError, DataDirError."""
        self._effect_runner.perform(self._registrations.remove(worker_id))
        await self._follow_up(worker_id)

    async def order(self, worker_id: int, lifecycle: Lifecycle) -> None:
        """Apply and persist an operator's order, without a bus. Raises DataDirError."""
        self._core.handle(OrderWorker(worker_id, lifecycle), 0.0)
        await self._keep()

    def restore(self) -> int:
        """Register the workers that an earlier process persisted. Returns their number."""
        if self._data_dir is None:
            return 0
        kept = self._data_dir.load()
        for worker_id, lifecycle in kept.orders.items():
            self._core.handle(OrderWorker(worker_id, lifecycle), 0.0)
        for registration in kept.workers:
            self._restore(registration)
        return len(kept.workers)

    def _restore(self, registration: WorkerRegistration) -> None:
        try:
            self._put(registration)
        except KvRouterError as error:
            log.warning("worker %d not restored: %s", registration.worker_id, error)

    def _put(self, registration: WorkerRegistration) -> None:
        now_s = time.monotonic()
        fresh = time.time_ns() // 1000
        incarnation = self._registrations.incarnation(registration.worker_id, fresh)
        worker = self._make_worker(registration, incarnation)
        if worker is None:
            self._effect_runner.perform(self._registrations.put_incomplete(registration))
        else:
            self._registrations.put(worker, now_s)

    async def _follow_up(self, worker_id: int) -> None:
        await self._engines.settle([worker_id])
        await self._keep()

    async def _keep(self) -> None:
        """Persist the registrations; changes made during a save share the next one."""
        if self._data_dir is None:
            return
        self._changes += 1
        change = self._changes
        async with self._saving:
            if self._saved_changes >= change:
                return
            covered = self._changes
            orders = self._core.fleet.orders if self._keeps_orders else {}
            kept = Kept(list(self._registrations), dict(orders))
            await asyncio.to_thread(self._data_dir.save, kept)
            self._saved_changes = covered
