"""The commands as callers of one tenant have them: within what is theirs, under their own ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from msgspec import Struct, structs

from router.commands import Commands, Wait
from router.errors import (
    DuplicateReservationError,
    ReservationNotFoundError,
    SelectionNotFoundError,
)
from router.logged_decisions import LoggedDecision
from router.plain import PlainRequest
from router.protocol.replies import Decision, OverlapScoresReply, PotentialLoad, ReservationReply
from router.protocol.requests import BookRequest, PromptRequest, SelectRequest, Usage
from router.request_headers import bookable
from router.security.caller import Caller
from router.security.errors import ForbiddenError
from router.sequence.hashing import TokenArray
from router.shadow import ShadowReport
from router.waiters import Gone

S = TypeVar("S", bound=Struct)
P = TypeVar("P", bound=PromptRequest)

OWN_IDS = ("request_id", "selection_id", "session_id")
"""Fields by which a request is found again: each tenant has a name space of its own."""


def commands_of(commands: Commands, caller: Caller) -> Commands:
    """The commands, as this caller has them."""
    return commands if caller.tenant is None else TenantCommands(commands, caller)


class TenantCommands(Commands):
    """As the commands behind it, for one caller that is bound to a tenant.

    Every public method is here: what is not overridden would pass a tenant by. All raise what those
    behind raise, and ForbiddenError.
    """

    def __init__(self, commands: Commands, caller: Caller) -> None:
        self.core = commands.core
        self._commands = commands
        self._caller = caller

    async def select(self, request: SelectRequest) -> Decision:
        """Choose a rank; books nothing."""
        return self._given(await self._commands.select(self._own_select(request)))

    def is_immediate(self, request: PromptRequest) -> bool:
        """See `Commands.is_immediate`."""
        return self._commands.is_immediate(request)

    def select_now(self, request: SelectRequest) -> Decision:
        """`select` of an immediate request."""
        return self._given(self._commands.select_now(self._own_select(request)))

    def select_plain(self, _request: PlainRequest, _id: str | None, _tokens: TokenArray) -> None:
        """None: what is asked has to be held against what is this caller's."""

    def submit_now(self, request: SelectRequest) -> Decision | Wait:
        """`submit` of an immediate request."""
        with self._ids_as_given():
            submitted = self._commands.submit_now(self._own_select(bookable(request)))
            return submitted if isinstance(submitted, Wait) else self._given(submitted)

    async def select_and_reserve(
        self, request: SelectRequest, gone: Gone | None = None
    ) -> Decision:
        """Choose a rank and book it; if all are busy, once one is free."""
        with self._ids_as_given():
            own = self._own_select(bookable(request))
            del request
            return self._given(await self._commands.select_and_reserve(own, gone))

    async def submit(self, request: SelectRequest) -> Decision | Wait:
        """Choose a rank and book it, or have the request wait."""
        with self._ids_as_given():
            submitted = await self._commands.submit(self._own_select(bookable(request)))
            return submitted if isinstance(submitted, Wait) else self._given(submitted)

    async def decision(self, wait: Wait, gone: Gone | None = None) -> Decision:
        """Where a waiting request was placed, once it is."""
        with self._ids_as_given():
            return self._given(await self._commands.decision(wait, gone))

    async def reserve(self, asked: BookRequest) -> ReservationReply:
        """Book a rank that the caller chose, or what was selected."""
        with self._ids_as_given():
            return self._given(await self._commands.reserve(self._own_booking(asked)))

    def prefill_complete(
        self, request_id: str, usage: Usage | None = None, *, in_batch: bool = False
    ) -> None:
        """A booked prompt is computed."""
        with self._ids_as_given():
            own_id = self._own_id(request_id)
            self._commands.prefill_complete(own_id, usage, in_batch=in_batch)

    def output_block(
        self, request_id: str, decay_fraction: float | None, *, in_batch: bool = False
    ) -> None:
        """A booked request grew by a block."""
        with self._ids_as_given():
            own_id = self._own_id(request_id)
            self._commands.output_block(own_id, decay_fraction, in_batch=in_batch)

    def free(self, request_id: str, usage: Usage | None = None) -> None:
        """A booked request ended."""
        with self._ids_as_given():
            self._commands.free(self._own_id(request_id), usage)

    async def potential_loads(self, request: PromptRequest) -> list[PotentialLoad]:
        """The load of every rank, were this prompt placed there."""
        return await self._commands.potential_loads(self._caller.bound(request))

    async def overlap_scores(self, request: PromptRequest) -> OverlapScoresReply:
        """The cached prefix of every rank."""
        return await self._commands.overlap_scores(self._caller.bound(request))

    async def look(self, request: SelectRequest, candidates: int) -> LoggedDecision:
        """Where a prompt would go, and why."""
        return self._given(await self._commands.look(self._own_select(request), candidates))

    def shadow_report(self) -> ShadowReport:
        """Raises ForbiddenError: it is about everybody."""
        raise ForbiddenError("authorization", "a tenant asks about all", "a token with admin")

    def drain(self) -> None:
        """Raises ForbiddenError: no caller ends the process."""
        raise ForbiddenError("authorization", "a tenant asks to drain", "a signal")

    def _own_select(self, request: SelectRequest) -> SelectRequest:
        tenant = self._caller.tenant
        if request.tenant not in (None, tenant):
            reason = f"{request.tenant!r} is not this token's"
            raise ForbiddenError("tenant", reason, f"{tenant}, or none")
        return structs.replace(self._own(request), tenant=tenant)

    def _own_booking(self, asked: BookRequest) -> BookRequest:
        """What was selected under an id of the tenant's has its prompt already, which was its."""
        if asked.worker_id is not None:
            return self._own(asked)
        self._caller.check_group(asked.routing_group)
        return self._with_own_ids(asked)

    def _own(self, request: P) -> P:
        """A request within what is the tenant's, under ids of its own."""
        return self._with_own_ids(self._caller.bound(request))

    def _with_own_ids(self, request: S) -> S:
        given = {name: getattr(request, name, None) for name in OWN_IDS}
        own = {n: self._caller.own_id(n, v) for n, v in given.items() if v is not None}
        return structs.replace(request, **own) if own else request

    def _own_id(self, request_id: str) -> str:
        return self._caller.own_id("request_id", request_id)

    def _given(self, reply: S) -> S:
        """A reply with ids as the caller gave them."""
        own = {name: getattr(reply, name, None) for name in OWN_IDS}
        given = {n: self._caller.given_id(v) for n, v in own.items() if v is not None}
        return structs.replace(reply, **given) if given else reply

    @contextmanager
    def _ids_as_given(self) -> Iterator[None]:
        """Errors that name a request, too."""
        try:
            yield
        except (ReservationNotFoundError, DuplicateReservationError) as error:
            raise type(error)(self._caller.given_id(error.request_id)) from error
        except SelectionNotFoundError as error:
            given = self._caller.given_id(error.selection_id)
            raise SelectionNotFoundError(given, error.model_name, error.routing_group) from error
