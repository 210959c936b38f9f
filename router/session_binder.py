"""Requests of a session to where the session is bound."""

from msgspec import structs

from router.core import RouterCore
from router.protocol.requests import RankTarget, SelectRequest
from router.protocol.values import Rank
from router.scheduler.affinity import Session
from router.sessions import Sessions


class SessionBinder:
    """Looks bindings up before the core is asked, and writes them after.

    `is_hard`: a session's requests go nowhere else while its rank may be chosen.
    """

    def __init__(self, core: RouterCore, sessions: Sessions, *, is_hard: bool) -> None:
        self._core = core
        self._sessions = sessions
        self._is_hard = is_hard

    async def directed(self, request: SelectRequest) -> SelectRequest:
        """The request, with where its session is bound; callers may have said it themselves."""
        if request.session_id is None or request.affinity_target is not None:
            return request
        bound = await self._sessions.find(_session(request, request.session_id))
        return request if bound is None else _to(request, bound)

    async def bind(self, request: SelectRequest, rank: Rank) -> SelectRequest | None:
        """Note that a rank was booked for a directed request.

        Not None: another router was quicker, and this is what has to be placed instead.
        """
        if request.session_id is None:
            return None
        target = request.affinity_target
        was = None if target is None else Rank(target.worker_id, target.dp_rank or 0)
        gone = None if was is None or self._core.may_choose(request.scope, was) else was
        bound = await self._sessions.bind(_session(request, request.session_id), rank, gone)
        if bound == rank or not self._is_hard or not self._core.may_choose(request.scope, bound):
            return None
        return _to(request, bound)


def _session(request: SelectRequest, session_id: str) -> Session:
    return Session(request.scope, session_id)


def _to(request: SelectRequest, rank: Rank) -> SelectRequest:
    return structs.replace(request, affinity_target=RankTarget(rank.worker_id, rank.dp_rank))
