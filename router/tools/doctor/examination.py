"""One examination: connect to the ports, query the server, listen, probe, request a replay.

ports ─▶ server ─▶ watch ┬ probe       ─▶ replay ─▶ EngineSeen ─▶ findings
                         └ wait
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from random import Random
from typing import Any

from router.discovery.attach.engine_client import EngineClient
from router.discovery.attach.engine_server import ObservedServer, Server
from router.publisher.engine_events.batch import EngineBatch, EngineStored
from router.publisher.zmq.sockets import Context, open_context
from router.tools.doctor import listening
from router.tools.doctor.checks.blocks import block_findings
from router.tools.doctor.checks.forms import form_findings
from router.tools.doctor.checks.ports import port_findings
from router.tools.doctor.checks.probes import probe_findings
from router.tools.doctor.checks.replay import replay_findings
from router.tools.doctor.checks.server import server_findings
from router.tools.doctor.checks.stream import stream_findings
from router.tools.doctor.config import DoctorConfig
from router.tools.doctor.event_totals import EventTotals, stored_in
from router.tools.doctor.findings import Finding
from router.tools.doctor.messages import ObservedLive, ObservedReplay
from router.tools.doctor.observed_engine import ObservedEngine
from router.tools.doctor.observed_probe import ObservedProbe
from router.tools.doctor.ports import ObservedPort, probe_port
from router.tools.doctor.prober import Prober
from router.tools.doctor.trial import Trial
from router.tools.doctor.wire_forms import WireForms

SETTLE_S = 0.3
"""The delay from the connection to the first request, until the subscription is active."""

PROBE_S = 120.0
"""The timeout of all probe requests together."""

MAX_STORED_EVENTS = 20_000
"""The limit of events kept for the probe."""


def findings_of(seen: ObservedEngine) -> list[Finding]:
    """Return the findings of all checks; without a publisher, those of ports and server only."""
    return list(_findings_of(seen))


def _findings_of(seen: ObservedEngine) -> Iterator[Finding]:
    yield from port_findings(seen)
    yield from server_findings(seen)
    if seen.is_publisher:
        yield from stream_findings(seen)
        yield from form_findings(seen)
        yield from block_findings(seen)
        yield from replay_findings(seen)
        yield from probe_findings(seen)


class Examination:
    """An examination of one engine; `run` is to be called once."""

    def __init__(self, config: DoctorConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self._live = ObservedLive()
        self._replay: ObservedReplay | None = None
        self._contents = EventTotals()
        self._forms = WireForms()
        self._stored: list[EngineStored] = []
        self._server: ObservedServer | None = None
        self._probe: ObservedProbe | None = None
        self._trial = Trial(config.block_size or None, None)

    async def run(self, stop: asyncio.Event) -> ObservedEngine:
        """Make all observations; `stop` ends the subscription early."""
        config = self._config
        events_port = await probe_port(config.zmq)
        replay_port = await probe_port(config.replay) if config.replay else None
        server = Server(EngineClient(config.url)) if config.url else None
        try:
            if server is not None:
                self._server = await server.look()
                self._trial = Trial(config.block_size or None, self._server.facts.total_kv_blocks)
            if events_port.is_publisher:
                with open_context(max_engines=1) as context:
                    await self._listen(context, server, stop)
                    await self._ask_for_replay(context, replay_port)
        finally:
            if server is not None:
                await server.close()
        return ObservedEngine(
            config, events_port, replay_port, self._live, self._replay, self._contents,
            self._forms, self._trial.seen(), self._server, self._probe,
        )  # fmt: skip

    async def _listen(self, context: Context, server: Server | None, stop: asyncio.Event) -> None:
        watch, over = (
            listening.ServerWatch(context, self._config.zmq, self._take_live),
            asyncio.Event(),
        )
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run(over))
            if await _before(stop, watch.connected.wait(), listening.CONNECT_S):
                began_s = time.monotonic()  # the time to connect does not count
                self._live.is_connected = True
                if server is not None and self._config.probe:
                    await _before(stop, self._probed(server), PROBE_S)
                left_s = began_s + self._config.seconds - time.monotonic()
                await _before(stop, asyncio.Event().wait(), left_s)
            over.set()
        self._live.losses = watch.losses
        self._live.watched_s = time.monotonic() - began_s

    async def _probed(self, server: Server) -> None:
        seen = self._server
        model = self._config.model or (seen.base_model if seen else None)
        if seen is None or seen.problem is not None or model is None:
            return
        await asyncio.sleep(SETTLE_S)
        size = seen.facts.block_size or self._config.block_size or None
        prober = Prober(server, seen, model, size, lambda: self._stored, self._rng)
        self._probe = await prober.run()

    def _take_live(self, frames: Sequence[bytes]) -> None:
        payload = self._live.take(frames)
        if payload is None:
            return
        batch = self._taken(payload)
        self._stored.extend(stored_in(batch))
        del self._stored[MAX_STORED_EVENTS:]
        last = self._live.sequences.last
        if not self._config.replay and last is not None:
            self._trial.take(last, batch)

    async def _ask_for_replay(self, context: Context, port: ObservedPort | None) -> None:
        is_there = port is not None and port.outcome == "zmtp" and port.socket_type != "PUB"
        if is_there:
            self._replay = ObservedReplay()
            endpoint, take = self._config.replay, self._take_replayed
            self._replay.failure = await listening.replay(context, endpoint, take)

    def _take_replayed(self, frames: Sequence[bytes]) -> bool:
        replay = self._replay or ObservedReplay()
        numbered = replay.take(frames, self._live.sequences)
        if numbered is None:
            return True
        is_known = self._live.sequences.has(*numbered)
        contents = EventTotals() if is_known else self._contents
        batch = contents.add(numbered[1])
        if not is_known:
            self._forms.add(numbered[1])
        self._trial.take(numbered[0], batch or _EMPTY)
        return replay.has_ended

    def _taken(self, payload: bytes) -> EngineBatch:
        self._forms.add(payload)
        return self._contents.add(payload) or _EMPTY


_EMPTY = EngineBatch(None, [], [], ["a batch that is none"])


async def _before(stop: asyncio.Event, wanted: Coroutine[Any, Any, object], seconds: float) -> bool:
    """Return whether `wanted` finished before the stop and in time; else cancel it."""
    waiting, stopping = asyncio.create_task(wanted), asyncio.create_task(stop.wait())
    both, timeout_s = (waiting, stopping), max(seconds, 0.0)
    await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in both:
        task.cancel()
    await asyncio.wait(both)
    if waiting.cancelled():
        return False
    waiting.result()
    return True
