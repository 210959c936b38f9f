"""The two sockets of an engine, listened to as a router listens to them."""

import asyncio
import time
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from router.publisher.zmq_sockets import Condition, ReplayCall, Subscription

POLL_MS = 50
LOT = 256
CONNECT_S = 3.0
ANSWER_S = 2.0
"""Between two answers of a replay: the router gives up after so long."""

REPLAY_S = 60.0


class Watch:
    """One subscription to every topic, which calls `take` for every message."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, take: Callable[[list[bytes]], None]
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._take = take
        self.connected = asyncio.Event()
        self.losses = 0

    async def run(self, until: asyncio.Event) -> None:
        """Listen until told to stop; connects again when the connection is lost."""
        while not until.is_set():
            subscription = Subscription(self._context, self._endpoint, "")
            try:
                await self._listen(subscription, until)
            finally:
                subscription.close()
            self.losses += self.connected.is_set() and not until.is_set()
            await asyncio.sleep(POLL_MS / 1000)

    async def _listen(self, subscription: Subscription, until: asyncio.Event) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(subscription.socket, zmq.POLLIN)
        poller.register(subscription.monitor, zmq.POLLIN)
        began_s = time.monotonic()
        while not until.is_set():
            await poller.poll(POLL_MS)
            condition = subscription.look()
            for frames in subscription.receive(LOT):
                self._take(frames)
            is_late = time.monotonic() > began_s + CONNECT_S
            if condition is Condition.CONNECTED:
                self.connected.set()
            elif condition is Condition.LOST or is_late:
                return
            await asyncio.sleep(0)


async def replay(
    context: zmq.asyncio.Context, endpoint: str, take: Callable[[Sequence[bytes]], bool]
) -> None:
    """Ask for everything; `take` says of each answer whether it was the last."""
    call = ReplayCall(context, endpoint, 0)
    poller = zmq.asyncio.Poller()
    poller.register(call.socket, zmq.POLLIN)
    ends_s = time.monotonic() + REPLAY_S
    try:
        while time.monotonic() < ends_s and await poller.poll(int(ANSWER_S * 1000)):
            for frames in call.receive(LOT):
                if take(frames):
                    return
            await asyncio.sleep(0)
    finally:
        call.close()
