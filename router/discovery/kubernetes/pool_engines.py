"""The engines of an InferencePool, attached by their URLs as those of `workers` are."""

from collections.abc import Callable, Coroutine
from typing import Any

from router.discovery.attach.attachments import Attachments
from router.discovery.attach.followed_engine import BY_POOL
from router.discovery.kubernetes.found import Found
from router.discovery.kubernetes.pool_watch import PoolWatch, url_of


class PoolEngines:
    """A source of `Discovery`."""

    def __init__(self, pool: PoolWatch, attachments: Attachments) -> None:
        self._pool = pool
        self._attachments = attachments
        self.owner = BY_POOL
        self.watches = pool.watches

    @property
    def is_known(self) -> bool:
        """True once the pool was listed, and its pods if there is one."""
        return self._pool.is_known

    def run(self, on_change: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """Follow the cluster until cancelled."""
        return self._pool.run(on_change)

    def found(self) -> dict[str, Found]:
        """Return the engines by name. O(pods)."""
        return self._pool.found()

    def worker_id(self, found: Found) -> int:
        """Return the worker id of an engine. Raises InvalidFieldError."""
        return url_of(found).worker_id

    async def put(self, found: Found) -> None:
        """Attach an engine. Raises InvalidFieldError."""
        self._attachments.attach_found(url_of(found))

    async def remove(self, worker_id: int) -> None:
        """Detach an engine. Raises what `Registrar` raises."""
        await self._attachments.detach(worker_id)
