"""The state of one attached engine, from look to look."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from router.discovery.attach import sentences
from router.discovery.attach.attachment import Attachment
from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.engine_url import EngineUrl
from router.discovery.attach.life import EngineLife, Return
from router.discovery.attach.proof import RankProof
from router.discovery.attach.socket_choice import SocketChoice

BY_SETTING, BY_REQUEST, BY_POOL = "workers/", "attached/", "pool/"
"""Prefixes of `stable_routing_id`: the URL comes from the setting, from a request, or from a pool
of the cluster."""


class Duplicate(Struct, frozen=True):
    """The engine that this one is too, and the evidence."""

    worker_id: int
    url: str
    evidence: str


class FollowedEngine:
    """An engine that is asked again and again. `owner`: the prefix of its routing id.

    `known`: as it was registered last; `seen`: its server's last description. `choice`: the sockets
    in use; `guesses_failed`: those before it in the order of choices. `proofs`: the result of each
    rank in this life. `duplicate`: set if it is another attached engine. `returned`: its last
    return, until it was said. `former_fingerprint`: that of the process before this one.
    """

    __slots__ = (
        "choice",
        "duplicate",
        "engine",
        "former_fingerprint",
        "guesses_failed",
        "known",
        "life",
        "owner",
        "proofs",
        "returned",
        "seen",
    )

    def __init__(self, engine: EngineUrl, owner: str) -> None:
        self.owner = owner
        self.life = EngineLife()
        self.known: Attachment | None = None
        self.seen: ObservedServer | None = None
        self.former_fingerprint: str | None = None
        self.returned: Return | None = None
        self.proofs: dict[int, RankProof] = {}
        self.name(engine)

    def name(self, engine: EngineUrl) -> None:
        """Set its address, which may name other sockets than before."""
        self.engine = engine
        self.begin_life()

    def begin_life(self) -> None:
        """Forget what was proved of an earlier process."""
        self.former_fingerprint = self.fingerprint or self.former_fingerprint
        self.choice = SocketChoice({}, "")
        self.guesses_failed = 0
        self.proofs = {}
        self.duplicate: Duplicate | None = None

    def take_choice(self, choices: list[SocketChoice]) -> None:
        """Set the sockets to use; proofs of other sockets are forgotten."""
        choice = choices[min(self.guesses_failed, len(choices) - 1)]
        if choice.sockets != self.choice.sockets:
            self.proofs = {}
        self.choice = choice

    def take_proofs(self, proofs: Mapping[int, RankProof]) -> None:
        """Record results, and the next choice if a guess was wrong."""
        self.proofs.update(proofs)
        if self.choice.is_guess and not any(each.is_proved for each in self.proofs.values()):
            self.guesses_failed += 1
            self.choice, self.proofs = SocketChoice({}, ""), {}

    @property
    def fingerprint(self) -> str | None:
        """The engine's own fingerprint of its version and settings, of this process."""
        return next((p.fingerprint for p in self.proofs.values() if p.fingerprint), None)

    @property
    def has_other_flags(self) -> bool:
        """True if it came back with other settings."""
        before, now = self.former_fingerprint, self.fingerprint
        return self.returned is not None and None not in (before, now) and before != now

    @property
    def is_up(self) -> bool:
        """True if its server answered the last look."""
        return self.known is not None and self.known.is_up

    @property
    def unproved(self) -> list[int]:
        """The ranks with event sockets that an attempt may prove."""
        return [
            dp_rank
            for dp_rank in self.choice.sockets
            if dp_rank not in self.proofs or not self.proofs[dp_rank].is_final
        ]

    @property
    def caution(self) -> str | None:
        """The reason to trust its events less than they claim."""
        if self.life.is_several:
            return sentences.SEVERAL_ENGINES
        wrong = [each.problem for each in self.proofs.values() if each.is_wrong]
        known = None if self.known is None else self.known.caution
        return "; ".join(filter(None, [known, *wrong])) or None

    @property
    def is_good(self) -> bool:
        """True if nothing is to be done about it."""
        has_problem = any(each.problem is not None for each in self.proofs.values())
        is_whole = self.is_up and not has_problem and self.duplicate is None
        return is_whole and self.caution is None

    def clauses(self) -> Iterator[str]:
        """Yield what is known beyond its registration's sentence."""
        if not self.is_up:
            return
        problems = [each.problem for each in self.proofs.values() if each.problem is not None]
        if self.choice.sockets and self.proofs and not problems:
            yield sentences.proved(len(self.proofs))
        yield from problems
        if any(not each.has_salt for each in self.proofs.values()):
            yield sentences.UNSALTED
        if self.life.is_several:
            yield sentences.SEVERAL_ENGINES
