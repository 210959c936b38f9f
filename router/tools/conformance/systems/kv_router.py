"""kv-router in direct mode: no bus, the router itself follows the engines' sockets."""

import re
import sys
from typing import Any

from router.tools.conformance.steps import BLOCK_SIZE
from router.tools.conformance.systems.base import Seat
from router.tools.conformance.systems.selection_service import SelectionService


class KvRouter(SelectionService):
    """Keeps its workers in a folder: after a kill it needs no registrations."""

    title = "kv-router"
    worker_in_log = re.compile(r"(?:rank|worker) (\d+)")

    def command(self, port: int) -> list[str]:
        """Return the command line of a router with a folder for its state."""
        data = self.directory / "kv-router-data"
        flags = [f"--http-port={port}", f"--data-dir={data}", "--drain-s=0"]
        return [sys.executable, "-m", "router", "serve", *flags]

    def registration(self, seat: Seat) -> dict[str, Any]:
        """Add the engine's kind, whether it reports held blocks again, and its chunks."""
        known: dict[str, Any] = {"engine": seat.kind}
        if seat.reannounces:
            known["report_mode"] = "full"
        if seat.chunk_tokens is not None:
            known["hybrid"] = {"chunk_tokens": seat.chunk_tokens}
        return super().registration(seat) | known

    def held_blocks(self, worker: dict[str, Any]) -> int:
        """Return what a prompt can be resumed from: on a hybrid model less than its overlap."""
        tokens = worker.get("resumable_tokens")
        return super().held_blocks(worker) if tokens is None else tokens // BLOCK_SIZE

    def doubts(self, workers: list[dict[str, Any]]) -> dict[int, str]:
        """Return the trust states other than `exact`."""
        trusts = {worker["worker_id"]: worker["trust"] for worker in workers}
        return {
            worker_id: trust["state"]
            for worker_id, trust in trusts.items()
            if trust["state"] != "exact"
        }

    async def restart(self) -> None:
        """Kill it and start it in the same folder."""
        await self._server.kill()
        await self._server.start(self.command(self._server.port), "/health")
        self._server.log.skip()
