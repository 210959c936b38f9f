"""Reads an engine's Prometheus metrics again and again."""

import logging
import time
from collections.abc import Callable

import httpx

from router.errors import WireError
from router.publisher.engine_metrics import EngineMetrics
from router.publisher.http_fetch import ask_forever, fetch
from router.publisher.metrics_dialects import EngineKind

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
LIMIT_BYTES = 16 << 20
MAX_PAUSE_S = 5.0
"""Between readings that fail the pause doubles, up to this."""


class MetricsPoll:
    """One endpoint. `problem`: why the last reading failed, None if it did not; `read_s`: when the
    last one succeeded. `readings` and `failures` count.
    """

    def __init__(
        self,
        kind: EngineKind,
        url: str,
        interval_s: float,
        take: Callable[[EngineMetrics], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = kind
        self._url = url
        self._interval_s = interval_s
        self._take = take
        self._clock = clock
        self.problem: str | None = "not read yet"
        self.read_s: float | None = None
        self.readings = 0
        self.failures = 0

    async def run(self) -> None:
        """Read until cancelled; each reading is handed to `take`, whose errors end it."""
        await ask_forever(
            self._read,
            timeout_s=TIMEOUT_S,
            interval_s=self._interval_s,
            max_pause_s=MAX_PAUSE_S,
        )

    async def _read(self, client: httpx.AsyncClient) -> bool:
        """One reading, and whether it succeeded."""
        try:
            body = await fetch(
                client, "GET", self._url, limit_bytes=LIMIT_BYTES, timeout_s=TIMEOUT_S
            )
            metrics = EngineMetrics(self._kind, body.decode("utf-8", "replace"))
            if metrics.is_foreign:
                raise WireError(f"none of the metrics that {self._kind} has")
        except WireError as error:
            self._failed(error.reason)
            return False
        self._succeeded()
        self._take(metrics)
        return True

    def _failed(self, problem: str) -> None:
        """Count it; say it where it is another problem than before."""
        self.failures += 1
        if problem != self.problem:
            log.warning("cannot read %s: %s; trying again", self._url, problem)
        self.problem = problem

    def _succeeded(self) -> None:
        self.readings += 1
        self.read_s = self._clock()
        if self.problem is not None:
            log.info("reading the engine's metrics at %s", self._url)
        self.problem = None
