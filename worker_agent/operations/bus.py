"""Control of an agent's tiers over NATS, on kv.{namespace}.worker.{id}.tiers.

Bodies are the same as over HTTP, with the command as `method`: tiers_status, tiers_reset_pool,
tiers_reset_blocks, tiers_reset_all; a token is in the header `authorization`. An error has the body
as over HTTP, with its text and status in the headers of NATS services. Commands are executed one at
a time.
"""

import logging
from contextlib import suppress
from typing import Any

import msgspec
from nats.aio.msg import Msg

from router.errors import InvalidFieldError, KvRouterError
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus, is_inbox, subscribe, translated
from router.runtime.bus.errors import BusError
from router.runtime.process.errors import BodyTooLargeError
from router.runtime.process.json_bodies import decode_body
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import identify
from router.runtime.security.route_scopes import BUS
from worker_agent.operations.messages import BODY_LIMIT_BYTES, TierCommand, TierCommands

log = logging.getLogger(__name__)


class TierResponder:
    """A responder to commands of callers that the guard admits."""

    def __init__(self, control: TierCommands, worker_id: int, guard: Guard) -> None:
        self._control = control
        self._worker_id = worker_id
        self._guard = guard
        self._decode = msgspec.json.Decoder(TierCommand).decode

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Respond until cancelled."""
        subscription = await subscribe(bus, subjects.tiers(self._worker_id))
        async for message in subscription.messages:
            if is_inbox(message.reply):
                body, headers = await self._answer(message, bus.client.max_payload)
                with suppress(BusError):
                    async with translated(message.subject):
                        await bus.client.publish(message.reply, body, headers=headers)

    async def _answer(self, message: Msg, limit_bytes: int) -> tuple[bytes, dict[str, str]]:
        try:
            body = msgspec.json.encode(await self._reply(message))
            if len(body) > limit_bytes:
                allowed = f"a response of {limit_bytes} bytes: one level of one dp_rank, or HTTP"
                raise InvalidFieldError("hashes", f"{len(body)} bytes", allowed)
        except KvRouterError as error:
            log.debug("refused (%s): %s", error.code, error)
            return _refusal(error)
        return body, {"Content-Type": "application/json"}

    async def _reply(self, message: Msg) -> Any:
        caller = identify(self._guard, message.headers)
        if len(message.data) > BODY_LIMIT_BYTES:
            raise BodyTooLargeError(BODY_LIMIT_BYTES)
        command: TierCommand = await decode_body(self._decode, message.data)
        self._guard.check_scope(caller, BUS, str(command.__struct_config__.tag))
        return await self._control.answer(command)


def _refusal(error: KvRouterError) -> tuple[bytes, dict[str, str]]:
    headers = {
        "Content-Type": "application/json",
        "Nats-Service-Error": " ".join(str(error).split()),
        "Nats-Service-Error-Code": str(error.http_status),
    }
    return msgspec.json.encode({"method": "error", **error.body()}), headers
