"""Direction of a session's requests to the rank that the session is bound to."""

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import CoroutineType
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from msgspec.structs import replace

from router.api.caller_commands import Book, PromptCommand
from router.api.request_headers import bookable
from router.core.commands import Select, Submit
from router.core.core import RouterCore
from router.core.selections import Selections
from router.protocol.replies import Decision
from router.protocol.requests import RankTarget, SelectRequest
from router.protocol.values import Rank
from router.scheduler.affinity import AffinityTable, Session

T = TypeVar("T")
U = TypeVar("U")

MayWait: TypeAlias = T | Coroutine[Any, Any, T]
"""A value, or a coroutine of it if it has to wait."""

Steps: TypeAlias = Generator[Any, Any, T]
"""Work that may wait between its steps: it yields what may be a coroutine, and is sent the value.

A coroutine would need a task even if nothing waits, which takes 15 µs.
"""


def begun(steps: Steps[T]) -> MayWait[T]:
    """Take steps until one waits. Returns the result, or a coroutine of it."""
    value = None
    try:
        while type(value := steps.send(value)) is not CoroutineType:
            pass
    except StopIteration as end:
        result: T = end.value
        return result
    return _finished(steps, value)


def then(value: MayWait[T], act: Callable[[T], U]) -> MayWait[U]:
    """Return the result of `act` on a value, or a coroutine of it."""
    if type(value) is CoroutineType:
        return _acted(value, act)
    return act(cast(T, value))


async def _acted(value: Coroutine[Any, Any, T], act: Callable[[T], U]) -> U:
    return act(await value)


async def _finished(steps: Steps[T], value: Any) -> T:
    """Take the steps after one that yielded this. Its error ends them: no step handles errors."""
    try:
        while True:
            value = steps.send(await value if type(value) is CoroutineType else value)
    except StopIteration as end:
        result: T = end.value
        return result


class Sessions(Protocol):
    """Bindings of sessions. No call raises: without its store it uses local bindings."""

    def find(self, session: Session) -> MayWait[Rank | None]:
        """Return the rank a session is bound to."""

    def bind(self, session: Session, rank: Rank, gone: Rank | None) -> MayWait[Rank]:
        """Record that a rank served a session. Returns the rank it is bound to from now on.

        The first binding wins, unless it is to the rank that is `gone`.
        """

    def release(self, session: Session) -> MayWait[None]:
        """Forget the rank of a session."""

    async def close(self) -> None:
        """Close the store."""


class LocalSessions:
    """Bindings known to this router only, and lost when it stops."""

    def __init__(self, table: AffinityTable) -> None:
        self.table = table

    def find(self, session: Session) -> Rank | None:
        """Return the rank a session is bound to."""
        return self.table.find(session, time.monotonic())

    def bind(self, session: Session, rank: Rank, gone: Rank | None) -> Rank:
        """Bind a session. See `AffinityTable.bind`."""
        return self.table.bind(session, rank, time.monotonic(), gone)

    def release(self, session: Session) -> None:
        """Forget the rank of a session."""
        self.table.release(session)

    async def close(self) -> None:
        """Do nothing: there is no store to close."""


class SessionStep:
    """Lookup of bindings before the core's decision, and their update after it.

    `is_hard`: requests of a session are not placed elsewhere while its rank may be chosen.
    """

    def __init__(
        self, core: RouterCore, sessions: Sessions, selections: Selections, *, is_hard: bool
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._selections = selections
        self._is_hard = is_hard

    def concerns(self, command: PromptCommand) -> bool:
        """Return whether a command has a session, or books a selection that may have one."""
        if isinstance(command, Select | Submit):
            return command.request.session_id is not None
        return isinstance(command, Book) and command.request.worker_id is None

    def before(self, command: PromptCommand) -> MayWait[PromptCommand]:
        """Return a command with its session's rank or, of a selection, with its session."""
        if isinstance(command, Book):
            return self._with_session(command)
        if not isinstance(command, Select | Submit):
            return command
        if isinstance(command, Submit):
            command = Submit(bookable(command.request))
        request = command.request
        if request.session_id is None or request.affinity_target is not None:
            return command
        found = self._sessions.find(Session(request.scope, request.session_id))
        return then(found, partial(_directed, command))

    def after(self, command: PromptCommand, reply: Any) -> MayWait[Submit | None]:
        """Bind the session of a request that was booked; a request that waits is bound later.

        Returns the command to execute instead, if another router has bound the session first.
        """
        if isinstance(command, Submit) and isinstance(reply, Decision):
            return self.bind(command.request, Rank(reply.worker_id, reply.dp_rank))
        if isinstance(command, Book) and command.session is not None:
            bound = self.bind(command.session, Rank(reply.worker_id, reply.dp_rank))
            return then(bound, lambda _: None)
        return None

    def bind(self, request: SelectRequest, rank: Rank) -> MayWait[Submit | None]:
        """Bind a session to the rank reserved for a directed request; the last one releases it.

        Returns the command to execute instead if another router was faster, otherwise None.
        """
        if request.session_id is None:
            return None
        target = request.affinity_target
        was = None if target is None else Rank(target.worker_id, target.dp_rank or 0)
        session = Session(request.scope, request.session_id)
        if request.session_is_final:
            return then(self._sessions.release(session), lambda _: None)
        may_stay = was is None or was == rank or self._core.may_choose(request.scope, was)
        bound = self._sessions.bind(session, rank, None if may_stay else was)
        return then(bound, partial(self._instead, request, rank))

    def _instead(self, request: SelectRequest, rank: Rank, bound: Rank) -> Submit | None:
        is_hard = self._is_hard and not request.session_is_hint
        if bound == rank or not is_hard or not self._core.may_choose(request.scope, bound):
            return None
        return Submit(_to(request, bound))

    def _with_session(self, command: Book) -> Book:
        asked = command.request
        if asked.worker_id is not None:
            return command
        key = (asked.scope, asked.selection_id or asked.request_id or "")
        selection = self._selections.find(key, time.monotonic())
        return replace(command, session=None if selection is None else selection.session)


def _directed(command: Select | Submit, rank: Rank | None) -> Select | Submit:
    return command if rank is None else type(command)(_to(command.request, rank))


def _to(request: SelectRequest, rank: Rank) -> SelectRequest:
    return replace(request, affinity_target=RankTarget(rank.worker_id, rank.dp_rank))
