"""One visit to an attached engine: what it is, whether its sockets are its own, what is new."""

import time
from collections.abc import Mapping
from random import Random
from typing import Any

from msgspec.structs import replace

from router.config.discovery import AttachConfig
from router.core.commands import SetCaution
from router.core.core import RouterCore
from router.core.registrations import Registrations
from router.core.views.workers import EngineOf
from router.discovery.attach import duplicates, sentences
from router.discovery.attach.announcer import Announcer
from router.discovery.attach.attachment import attachment, bare_registration
from router.discovery.attach.engine_client import EngineClient
from router.discovery.attach.engine_server import ObservedServer, Server
from router.discovery.attach.followed_engine import BY_POOL, BY_REQUEST, BY_SETTING, FollowedEngine
from router.discovery.attach.proof import SocketProver
from router.discovery.attach.socket_choice import socket_choices
from router.discovery.registration import Registrar
from router.errors import KvRouterError
from router.protocol.values import Rank
from router.protocol.workers import WorkerRegistration
from router.runtime.security.http_access import ClientTls, HttpAccess

TIMEOUT_S = 5.0

Followed = Mapping[int, FollowedEngine]
"""All attached engines, by worker id, in the order in which they were named."""


class EngineVisitor:
    """The visits. `proof_requests`: those sent to prove event sockets."""

    def __init__(
        self,
        config: AttachConfig,
        core: RouterCore,
        registrar: Registrar,
        registrations: Registrations,
        engine_of: EngineOf,
        announcer: Announcer,
        random: Random,
    ) -> None:
        """Read the files of keys and authorities. Raises ConfigError."""
        self._core = core
        self._registrar, self._registrations = registrar, registrations
        self._announcer = announcer
        self._follows_others = config.workers_on_other_hosts
        is_proving = config.prove_workers and core.reads_events
        self._prover = SocketProver(core, engine_of, random) if is_proving else None
        self._tls = ClientTls(config.worker_ca_file, prefix="worker")
        key = HttpAccess(config.worker_token_file).headers("worker")
        self._headers: Mapping[str, Mapping[str, str]] = {
            BY_SETTING: key,
            BY_POOL: key,
            BY_REQUEST: {},  # a caller may name any address
        }
        self.proof_requests = 0

    def access(self, owner: str) -> Mapping[str, Any]:
        """Return the options of httpx for requests to an engine: operators' engines get the key."""
        return {"verify": self._tls.context(), "headers": self._headers[owner]}

    async def look(self, followed: FollowedEngine, all_followed: Followed) -> None:
        """Ask an engine what it is, register it if that has changed, and say it.

        Raises what `Registrar` raises.
        """
        client = self._client(followed)
        try:
            await self._look(followed, Server(client), all_followed)
        finally:
            await client.close()
        self._say(followed, all_followed)

    async def visit(self, followed: FollowedEngine, all_followed: Followed) -> None:
        """Do the same, and prove the sockets before it is said. Raises what `Registrar` raises."""
        client = self._client(followed)
        try:
            await self._look(followed, Server(client), all_followed)
            self._announcer.know(followed.engine.worker_id, self._sentence(followed, all_followed))
            while await self._prove(followed, client, all_followed):
                await self._look(followed, Server(client), all_followed)
        finally:
            await client.close()
        self._say(followed, all_followed)

    def _client(self, followed: FollowedEngine) -> EngineClient:
        return EngineClient(followed.engine.url, TIMEOUT_S, self.access(followed.owner))

    async def _look(self, followed: FollowedEngine, server: Server, others: Followed) -> None:
        """Register an engine as it is now.

        What is registered otherwise, by an earlier process or changed by a caller, stays until the
        engine says something else.
        """
        seen = await server.look()
        self._note(followed, seen)
        engine, known = followed.engine, followed.known
        found = attachment(
            engine,
            seen,
            followed.choice,
            was_up=followed.life.has_been_up,
        )
        registration, registered = found.registration, self._registered(engine.worker_id)
        if found.is_up and duplicates.is_duplicate(followed, seen, registration, others):
            registration = bare_registration(engine, registration.model_name)
        routing_id = f"{followed.owner}{engine.text}"
        registration = replace(registration, stable_routing_id=routing_id)
        before = registered if known is None else known.registration
        if found.is_up or before is None:
            await self._register(registration, before)
        else:
            registration = before
        followed.seen, followed.known = seen, replace(found, registration=registration)
        self._core.handle(SetCaution(engine.worker_id, followed.caution), time.monotonic())

    def _note(self, followed: FollowedEngine, seen: ObservedServer) -> None:
        """Record whether it answers, as which process, and the sockets to use."""
        now_s = time.monotonic()
        if seen.problem is not None:
            followed.life.note_absent(now_s)
            return
        returned = followed.life.note(seen, now_s)
        if returned is not None:
            followed.returned = returned
            if returned.is_new:
                followed.begin_life()
        choices = socket_choices(
            followed.engine,
            seen,
            follows_others=self._follows_others,
            may_guess=self._prover is not None,
        )
        followed.take_choice(choices)

    def _registered(self, worker_id: int) -> WorkerRegistration | None:
        try:
            return self._registrations.get(worker_id)
        except KvRouterError:
            return None

    async def _register(
        self, registration: WorkerRegistration, before: WorkerRegistration | None
    ) -> None:
        if before == registration:
            return
        await self._registrar.check(registration)
        if before is not None and before.scope != registration.scope:
            await self._registrar.remove(registration.worker_id)
        await self._registrar.put(registration)

    async def _prove(
        self, followed: FollowedEngine, client: EngineClient, others: Followed
    ) -> bool:
        """Prove sockets that are not proved yet. Returns whether to look again at once."""
        known, guesses_failed = followed.known, followed.guesses_failed
        if self._prover is None or known is None or not known.is_up or followed.duplicate:
            return False
        worker_id, unproved = known.registration.worker_id, followed.unproved
        late = {r: each.again(Rank(worker_id, r)) for r, each in followed.proofs.items()}
        new = await self._prover.prove(client, known.registration, unproved) if unproved else {}
        self.proof_requests += sum(each.is_final for each in new.values())
        followed.take_proofs({**late, **new})
        if duplicates.is_seen_elsewhere(followed, new, others):
            return True
        if new and followed.has_other_flags:
            await self._registrar.remove(worker_id)  # with the rates that were learned
            await self._registrar.put(known.registration)
        self._core.handle(SetCaution(worker_id, followed.caution), time.monotonic())
        return followed.guesses_failed != guesses_failed

    def _say(self, followed: FollowedEngine, others: Followed) -> None:
        """Say what is known of an engine, and that it is back."""
        url, worker_id = followed.engine.url, followed.engine.worker_id
        if followed.returned is not None:
            back = sentences.returned(
                followed.returned, followed.former_fingerprint, followed.fingerprint
            )
            self._announcer.note(worker_id, f"{url}  {back}")
            followed.returned = None
        sentence = self._sentence(followed, others)
        self._announcer.say(worker_id, sentence, is_good=followed.is_good)

    def _sentence(self, followed: FollowedEngine, others: Followed) -> str:
        if (other := followed.duplicate) is not None:
            return sentences.duplicate(followed.engine.url, other.url, other.evidence)
        known = "" if followed.known is None else followed.known.sentence
        beside = duplicates.difference(followed, others)
        return "; ".join(filter(None, [known, *followed.clauses(), beside]))
