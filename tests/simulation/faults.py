"""Makes the faults of a scenario happen, and in the end undoes what is left of them."""

from simulation.scenario import RATES, WIRE_RATES

TIGHT_BYTES_PER_RANK = 3_000
TIGHT_BYTES_PER_HYBRID_RANK = 30_000
"""There are more blocks, and every part of a checkpoint has the layout."""


class Faults:
    """Strikes a world. Every fault that happened is counted under its name."""

    def __init__(self, world):
        self._world = world
        self._server = world.server
        self._loop = world.loop
        self._counts = world.server.counts

    def schedule(self):
        for fault in self._world.scenario.faults:
            self._loop.call_at(fault.at_s, self._strike, fault)

    def heal(self):
        """From now on nothing goes wrong; what did, has to mend itself."""
        for link in self._server.links:
            link.rates.clear()
            if link.is_partitioned:
                link.partition(False)
        self._start_server()
        for engine in self._world.engines.values():
            engine.rates.clear()
        for router_id in range(1, self._world.scenario.routers + 1):
            self._world.start_router(router_id)
        for worker_id in self._world.agents:
            self._world.begin_again(worker_id)
        if self._server.max_bytes is not None:
            ranks = len(self._world.scenario.all_ranks())
            is_hybrid = self._world.scenario.has_hybrids
            bytes_per_rank = TIGHT_BYTES_PER_HYBRID_RANK if is_hybrid else TIGHT_BYTES_PER_RANK
            tight = self._world.scenario.stays_tight
            self._server.max_bytes = bytes_per_rank * ranks if tight else None

    def _strike(self, fault):
        if self._world.is_quiet:
            return
        self._world.trace("fault:", fault)
        if fault.kind in RATES or fault.kind in WIRE_RATES:
            self._set_rate(fault)
            return
        self._counts[fault.kind] += 1
        getattr(self, f"_{fault.kind}")(fault)

    def _later(self, fault, function, *arguments):
        self._loop.call_later(fault.lasts_s, function, *arguments)

    # ── Targets of faults ────────────────────────────────────────────────────────────────────────

    def _links(self, fault):
        """One, or all of them."""
        links = self._server.links
        return list(links) if fault.target % 4 == 0 else [links[fault.target % len(links)]]

    def _engines(self, fault):
        engines = list(self._world.engines.values())
        return engines if fault.target % 4 == 0 else [engines[fault.target % len(engines)]]

    def _worker_id(self, fault):
        """Of a worker whose agent is up; None if there is none."""
        alive = [w for w, agent in self._world.agents.items() if not agent.is_stopped]
        return alive[fault.target % len(alive)] if alive else None

    # ── What strikes ─────────────────────────────────────────────────────────────────────────────

    def _set_rate(self, fault):
        struck = self._engines(fault) if fault.kind in WIRE_RATES else self._links(fault)
        for each in struck:
            each.rates[fault.kind] = fault.rate
            self._later(fault, each.rates.pop, fault.kind, None)

    def _zmq_disconnect(self, fault):
        for engine in self._engines(fault):
            for wire in list(engine.wires):
                wire.disconnect()

    def _restart_engine(self, fault):
        for engine in self._engines(fault)[:1]:
            engine.restart(fault.lasts_s)

    def _partition(self, fault):
        for link in self._links(fault):
            link.partition(True)
            self._later(fault, self._reunite, link)

    def _reunite(self, link):
        if link.is_partitioned:
            link.partition(False)

    def _restart_server(self, fault):
        self._server.stop()
        self._later(fault, self._start_server)

    def _start_server(self):
        if not self._server.is_up:
            self._server.start()

    def _empty_server(self, fault):
        self._restart_server(fault)
        self._server.lose_store()

    def _shorten_store(self, fault):
        self._restart_server(fault)
        if self._server.log is not None:
            self._server.log.cut(1 + fault.target % 5)

    def _fill_store(self, fault):
        log = self._server.log
        self._server.max_bytes = 0 if log is None else log.size_bytes
        self._later(fault, self._make_room)

    def _make_room(self):
        if not self._world.is_quiet:
            self._server.max_bytes = None

    def _restart_router(self, fault):
        alive = list(self._world.routers)
        if alive:
            router_id = alive[fault.target % len(alive)]
            self._world.routers.pop(router_id).stop()
            self._later(fault, self._world.start_router, router_id)

    def _restart_agent(self, fault, clock_step=1000):
        worker_id = self._worker_id(fault)
        if worker_id is not None:
            self._world.agents[worker_id].stop()
            self._later(fault, self._world.begin_again, worker_id, clock_step)

    def _turn_clock_back(self, fault):
        self._restart_agent(fault, clock_step=-999_999)

    def _lose_worker(self, fault):
        """It is gone for good; several that go together could not be distinguished."""
        worker_id = self._worker_id(fault)
        if worker_id is not None and not (self._world.gone or self._world.scenario.is_bridged):
            self._world.lose(worker_id)

    def _replace_agent(self, fault):
        """Cut off and taken for dead: another begins in its place, and it comes back."""
        worker_id = self._worker_id(fault)
        if worker_id is not None:
            former = self._world.agents[worker_id].link
            former.partition(True)
            self._world.start_agent(worker_id)
            self._later(fault, self._reunite, former)

    def _poison_log(self, fault):
        """A stranger writes to the subject of a rank."""
        rank = self._rank(fault)
        if self._server.log is not None and self._server.is_up:
            self._server.append(self._world.subjects.events(rank), b"\xc1poison", None, False)

    def _poison_load(self, fault):
        for link in self._links(fault):
            self._server.tell(link, self._world.subjects.load(self._rank(fault)), b"\xc1poison")

    def _ask_for_checkpoints(self, fault):
        for rank in self._world.scenario.all_ranks():
            self._server.tell(
                self._server.links[0], self._world.subjects.checkpoint_wanted(rank), b""
            )

    def _rank(self, fault):
        ranks = self._world.scenario.all_ranks()
        return ranks[fault.target % len(ranks)]
