"""Which models there are: those of the router's workers."""

import time

from router.client import RouterClient
from router.errors import KvRouterError
from router.forward.errors import reason_of


class Models:
    """Asks the router when somebody asks."""

    def __init__(self, router: RouterClient, routing_group: str) -> None:
        self._router = router
        self._routing_group = routing_group
        self._began = int(time.time())

    async def listed(self) -> dict[str, object]:
        """As OpenAI lists them. Raises KvRouterError."""
        models = [
            {"id": name, "object": "model", "created": self._began, "owned_by": "kv-router"}
            for name in await self._names()
        ]
        return {"object": "list", "data": models}

    async def unready_reason(self) -> str | None:
        """Why nobody can be served; None: somebody can."""
        try:
            names = await self._names()
        except KvRouterError as error:
            return f"the router does not list its workers: {reason_of(error)}"
        return None if names else f"no worker of group {self._routing_group!r}"

    async def _names(self) -> list[str]:
        loads = await self._router.loads()
        group = self._routing_group
        return sorted({each.model_name for each in loads if each.routing_group == group})
