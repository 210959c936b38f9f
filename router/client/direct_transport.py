"""The transport of a client in the router's own process: its commands, called directly.

    question ─▶ fields checked, tokens as an array ─▶ Commands.handle ─▶ reply, or what it waits for

Tokens are not serialized. The other fields contain what callers sent, so they are read as they are
over HTTP: the same values are refused, with the same errors.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from inspect import iscoroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from router.api.batches import (
    DONE,
    UNINTERRUPTED_SELECTIONS,
    UNINTERRUPTED_STEPS,
    command_of,
    refused,
)
from router.api.caller_commands import Book, CallerCommand, OverlapScores, PotentialLoads
from router.api.commands import Commands, PendingRequest
from router.api.request_headers import with_request_id
from router.api.token_requests import TokenRequests
from router.client.bodies import EncodedTokens, as_json, packed_tokens
from router.client.calls import (
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
from router.client.settings import Patience
from router.core.commands import Select, Submit
from router.core.views.workers import loads
from router.errors import KvRouterError
from router.protocol.batches import BatchReply, ItemResult, ReservationStep
from router.protocol.requests import BookRequest, PromptRequest, SelectRequest
from router.runtime.process.json_bodies import THREAD_BYTES, decode_now
from router.runtime.security.caller import Caller

T = TypeVar("T")

_TRUSTED = Caller("this process", frozenset(("route", "loads")))
"""The caller of every command: whoever asks has authorized callers of its own."""

_OK = Done("ok")

_LITTLE_ENDIAN_U32 = "<u4"

_STEPS = frozenset((PREFILL_COMPLETE.name, OUTPUT_BLOCK.name, FREE.name))
_read_step = msgspec.json.Decoder(ReservationStep).decode


class _Reader:
    """Reads the fields of a question with a prompt."""

    __slots__ = ("_decode", "_tokens")

    def __init__(self, kind: type[PromptRequest], tokens: TokenRequests[PromptRequest]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._tokens = tokens

    def read(self, fields: dict[str, Any], request_id: str | None) -> Any:
        """Return the checked request. Raises InvalidFieldError, MalformedBodyError."""
        rest = {name: value for name, value in fields.items() if name != "token_ids"}
        if request_id is not None:
            rest["request_id"] = request_id
        request = decode_now(self._decode, as_json(rest))
        if isinstance(request, SelectRequest):
            request = with_request_id(request, None)
        tokens = fields.get("token_ids")
        if tokens is not None:
            force_setattr(request, "token_ids", self._array(tokens))
        return request

    def _array(self, tokens: Any) -> Any:
        """Return tokens as an array. Raises InvalidFieldError, MalformedBodyError."""
        packed = None if isinstance(tokens, EncodedTokens) else packed_tokens(tokens)
        if packed is not None:
            return np.frombuffer(packed, _LITTLE_ENDIAN_U32)
        return self._tokens.decode(as_json({"token_ids": tokens}), []).token_ids


class DirectTransport:
    """The commands of a router in this process. They raise the router's errors themselves."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        tokens = TokenRequests(PromptRequest)
        select, prompt = _Reader(SelectRequest, tokens), _Reader(PromptRequest, tokens)
        self._prompts: dict[str, tuple[_Reader, Callable[[Any], CallerCommand]]] = {
            SELECT.name: (select, Select),
            SELECT_AND_RESERVE.name: (select, Submit),
            RESERVE.name: (_Reader(BookRequest, tokens), Book),
            POTENTIAL_LOADS.name: (prompt, PotentialLoads),
            OVERLAP_SCORES.name: (prompt, OverlapScores),
        }

    async def send(
        self,
        question: Question[T],
        headers: dict[str, str],  # noqa: ARG002 - the task of a request has its ids already
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
        name, fields, request_id = question.call.name, question.fields, question.request_id
        if name in self._prompts:
            return self._asked(name, fields, request_id)
        if name in _STEPS:
            self._apply({"step": name, "request_id": request_id, **fields}, in_batch=False)
            return _OK
        if name == LOADS.name:
            return loads(self._commands.core)
        if name == REPORT.name:
            return self._report(fields["steps"], in_batch=not fields.get("at_once", False))
        assert name == SELECT_BATCH.name
        return self._select_each(fields["requests"])

    def _asked(self, name: str, fields: dict[str, Any], request_id: str | None) -> Any:
        reader, command = self._prompts[name]
        tokens = fields.get("token_ids")
        if isinstance(tokens, EncodedTokens) and len(tokens.written) > THREAD_BYTES:
            return self._asked_later(name, fields, request_id)
        return self._commands.handle(command(reader.read(fields, request_id)), _TRUSTED)

    async def _asked_later(self, name: str, fields: dict[str, Any], request_id: str | None) -> Any:
        """Read a long prompt on another thread, so that other requests are served meanwhile."""
        reader, command = self._prompts[name]
        request = await asyncio.to_thread(reader.read, fields, request_id)
        return await self._commands.reply_to(command(request), _TRUSTED)

    async def _finished(self, reply: Any) -> Any:
        """Return a reply once it is there; a request that waits is withdrawn on cancellation."""
        if iscoroutine(reply):
            reply = await reply
        if isinstance(reply, PendingRequest):
            reply = await self._commands.decision(reply, _TRUSTED)
        return reply

    def _apply(self, fields: dict[str, Any], *, in_batch: bool) -> None:
        step = decode_now(_read_step, as_json(fields))
        self._commands.handle(command_of(step, in_batch), _TRUSTED)

    async def _report(self, steps: list[dict[str, Any]], *, in_batch: bool) -> BatchReply:
        """Apply each step of reservations; other requests run in between."""
        results = []
        for position, fields in enumerate(steps, 1):
            try:
                self._apply(fields, in_batch=in_batch)
                results.append(DONE)
            except KvRouterError as error:
                results.append(refused(error))
            if position % UNINTERRUPTED_STEPS == 0:
                await asyncio.sleep(0)
        return BatchReply(results)

    async def _select_each(self, requests: Iterable[dict[str, Any]]) -> BatchReply:
        """Select a rank for each request; other requests run in between."""
        results = []
        for position, fields in enumerate(requests, 1):
            try:
                reply = await self._finished(self._asked(SELECT.name, fields, None))
                results.append(ItemResult(200, reply))
            except KvRouterError as error:
                results.append(refused(error))
            if position % UNINTERRUPTED_SELECTIONS == 0:
                await asyncio.sleep(0)
        return BatchReply(results)


async def _in_time(reply: Coroutine[Any, Any, T], patience: Patience) -> T:
    try:
        async with asyncio.timeout(patience.total_s):
            return await reply
    except TimeoutError as error:
        reason = f"no reply in {patience.total_s:g} s"
        raise UnansweredError("this process", reason, is_maybe_done=True) from error
