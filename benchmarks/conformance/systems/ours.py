"""kv-router in direct mode: no bus, engines' sockets followed by the router itself."""

import sys
from typing import Any

from .base import Seat
from .selection_service import SelectionService


class KvRouter(SelectionService):
    """Keeps its workers in a folder; after a kill nobody has to tell it anything again."""

    title = "kv-router"

    def command(self, port: int) -> list[str]:
        data = self.directory / "kv-router-data"
        flags = [f"--http-port={port}", f"--data-dir={data}", "--drain-s=0"]
        return [sys.executable, "-m", "router", "serve", *flags]

    def registration(self, seat: Seat) -> dict[str, Any]:
        mode = {"report_mode": "full"} if seat.reannounces else {}
        return super().registration(seat) | mode

    def doubts(self, workers: list[dict[str, Any]]) -> dict[int, str]:
        trusts = {worker["worker_id"]: worker["trust"] for worker in workers}
        return {
            worker_id: trust["state"]
            for worker_id, trust in trusts.items()
            if trust["state"] != "exact"
        }

    async def restart(self) -> None:
        await self._server.kill()
        await self._server.start(self.command(self._server.port), "/health")
