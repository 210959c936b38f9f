"""Polling of an engine's Prometheus metrics."""

import logging
import time
from collections.abc import Callable

import httpx

from router.errors import WireError
from router.publisher.engine_metrics.dialects import EngineKind
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.follower.http_fetch import fetch, poll_forever

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
LIMIT_BYTES = 16 << 20
MAX_PAUSE_S = 5.0
"""The limit of the pause, which doubles with each failed reading."""


class MetricsPoll:
    """The polling of one endpoint.

    `problem`: the reason why the last reading failed; None if it succeeded. `read_s`: the time of
    the last success. `readings` and `failures` are counters.
    """

    def __init__(
        self,
        kind: EngineKind,
        url: str,
        interval_s: float,
        take: Callable[[EngineMetrics, float, float], None],
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
        """Read until cancelled; errors of `take` end the task.

        `take` is called with each reading, the time of its middle, and the seconds that it took.
        """
        await poll_forever(
            self._read,
            timeout_s=TIMEOUT_S,
            interval_s=self._interval_s,
            max_pause_s=MAX_PAUSE_S,
        )

    async def _read(self, client: httpx.AsyncClient) -> bool:
        """Read once, and return whether that succeeded."""
        began_s = self._clock()
        try:
            body = await fetch(
                client, "GET", self._url, limit_bytes=LIMIT_BYTES, timeout_s=TIMEOUT_S
            )
            took_s = self._clock() - began_s
            metrics = EngineMetrics(self._kind, body.decode("utf-8", "replace"))
            if metrics.is_foreign:
                raise WireError(f"no metric of {self._kind} in it")
        except WireError as error:
            self._failed(error.reason)
            return False
        self._succeeded()
        self._take(metrics, began_s + took_s / 2, took_s)
        return True

    def _failed(self, problem: str) -> None:
        """Count a failure; log it if the problem has changed."""
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
