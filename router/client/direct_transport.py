"""The transport of a client in the router's own process: its commands, called directly.

    request ─▶ tokens as an array ─▶ Commands.handle ─▶ reply, or what it waits for

Requests are passed on as they are, without being serialized: the code that builds them checks what
its own callers sent. Nothing can be lost on the way, so a step of a reservation is one call.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from inspect import iscoroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from router.api.batches import BatchCommands, command_of
from router.api.caller_commands import Book, CallerCommand, OverlapScores, PotentialLoads
from router.api.commands import Commands, PendingRequest
from router.api.token_requests import TokenRequests
from router.client.bodies import EncodedTokens, as_json, as_list, packed_tokens
from router.client.calls import (
    CAPACITY,
    FREE,
    LOADS,
    OUTPUT_BLOCK,
    OVERLAP_SCORES,
    POTENTIAL_LOADS,
    PREFILL_COMPLETE,
    REPORT,
    RESERVE,
    SELECT,
    SELECT_AND_RESERVE,
    SELECT_BATCH,
    Done,
    Question,
)
from router.client.errors import UnansweredError
from router.client.progress_reports import Step
from router.client.retry import HeadersOf
from router.client.settings import Patience
from router.core.commands import Select, Submit
from router.core.views.capacity import capacity
from router.errors import KvRouterError
from router.protocol.batches import ReservationBatch, ReservationStep
from router.protocol.requests import BookRequest, PromptRequest, ReserveRequest
from router.runtime.process.json_bodies import THREAD_BYTES
from router.runtime.security.caller import ANYBODY
from router.runtime.security.guard import Guard

T = TypeVar("T")

_OK = Done("ok")

_LITTLE_ENDIAN_U32 = "<u4"


def _book(request: ReserveRequest) -> Book:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Book(BookRequest(**fields))


_COMMANDS: dict[str, Callable[[Any], CallerCommand]] = {
    SELECT.name: Select,
    SELECT_AND_RESERVE.name: Submit,
    RESERVE.name: _book,
    POTENTIAL_LOADS.name: PotentialLoads,
    OVERLAP_SCORES.name: OverlapScores,
}
"""The command of each call with a prompt."""

_STEPS = frozenset((PREFILL_COMPLETE.name, OUTPUT_BLOCK.name, FREE.name))


class DirectTransport:
    """The commands of a router in this process. They raise the router's errors themselves."""

    __slots__ = ("_batches", "_commands", "_tokens")

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._batches = BatchCommands(commands, Guard(), msgspec.json.Decoder)
        self._tokens = TokenRequests(PromptRequest)

    async def send(
        self,
        question: Question[T],
        headers: HeadersOf,  # noqa: ARG002 - the task of a request has its ids already
        patience: Patience,
    ) -> T:
        """Carry out a command and return its reply.

        Raises the router's errors, and UnansweredError for what takes longer than `patience`.
        """
        reply = self._begun(question)
        if isinstance(reply, PendingRequest) or iscoroutine(reply):
            reply = await _in_time(self._finished(reply), patience)
        result: T = reply
        return result

    def _begun(self, question: Question[Any]) -> Any:
        """Return the reply, or a request that waits, or a coroutine of either."""
        name, content = question.call.name, question.content
        command = _COMMANDS.get(name)
        if command is not None:
            tokens = content.token_ids
            if isinstance(tokens, EncodedTokens) and len(tokens.written) > THREAD_BYTES:
                return self._asked_later(command, question)
            return self._commands.handle(command(self._read(question)), ANYBODY)
        if name in _STEPS:
            fields = {**question.fields, "step": name, "request_id": question.request_id}
            self._commands.handle(command_of(ReservationStep(**fields), in_batch=False), ANYBODY)
            return _OK
        if name == LOADS.name:
            return self._commands.splits.loads()
        if name == CAPACITY.name:
            return capacity(self._commands.core, time.monotonic())
        if name == REPORT.name:
            steps = [msgspec.Raw(as_json(step)) for step in content["steps"]]
            return self._batches.progress(ANYBODY, ReservationBatch(steps))
        assert name == SELECT_BATCH.name
        requests = [msgspec.Raw(as_json(request)) for request in content["requests"]]
        return self._batches.select(ANYBODY, requests)

    def _read(self, question: Question[Any]) -> Any:
        """Return a request with its id, and its tokens as an array.

        Raises InvalidFieldError, MalformedBodyError.
        """
        request = question.content.__copy__()
        if question.request_id is not None:
            given = getattr(request, "selection_id", None) or question.request_id
            force_setattr(request, "request_id", given)
        if request.token_ids is not None:
            force_setattr(request, "token_ids", self._array(request.token_ids))
        return request

    def _array(self, tokens: Any) -> Any:
        """Return tokens as an array. Raises InvalidFieldError, MalformedBodyError."""
        if isinstance(tokens, EncodedTokens):
            return self._tokens.tokens_in(bytes(tokens.written))
        packed = packed_tokens(tokens)
        if packed is not None:
            return np.frombuffer(packed, _LITTLE_ENDIAN_U32)
        return self._tokens.tokens_in(msgspec.json.encode(tokens, enc_hook=as_list))

    async def _asked_later(
        self, command: Callable[[Any], CallerCommand], question: Question[Any]
    ) -> Any:
        """Read a long prompt on another thread, so that other requests are served meanwhile."""
        request = await asyncio.to_thread(self._read, question)
        return await self._commands.reply_to(command(request), ANYBODY)

    async def _finished(self, reply: Any) -> Any:
        """Return a reply once it is there; a request that waits is withdrawn on cancellation."""
        if iscoroutine(reply):
            reply = await reply
        if isinstance(reply, PendingRequest):
            reply = await self._commands.decision(reply, ANYBODY)
        return reply


class DirectReports:
    """Steps of reservations, applied in the next iteration of the event loop.

    By then the response that they belong to has been written.
    """

    __slots__ = ("_commands", "_waiting")

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._waiting: list[Step] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def report(self, step: Step) -> None:
        """Apply a step soon, after those reported before."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._apply_all)
        self._waiting.append(step)

    def report_later(self, step: Step, pause_s: float) -> None:
        """Do nothing: a reservation of this process that is unknown has expired."""

    async def finish(self) -> None:
        """Wait until all steps are applied."""
        while self._waiting:
            await asyncio.sleep(0)

    def _apply_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            error: KvRouterError | None = None
            try:
                self._commands.handle(command_of(each.step, in_batch=False), ANYBODY)
            except KvRouterError as refused:
                error = refused
            each.heard(error)


async def _in_time(reply: Coroutine[Any, Any, T], patience: Patience) -> T:
    try:
        async with asyncio.timeout(patience.total_s):
            return await reply
    except TimeoutError as error:
        reason = f"no reply in {patience.total_s:g} s"
        raise UnansweredError("this process", reason, is_maybe_done=True) from error
