"""Clients of an engine's two sockets, which behave as a router's do."""

import asyncio
import time
from collections.abc import Callable, Sequence

from router.publisher.zmq.connection_monitor import Condition
from router.publisher.zmq.sockets import Context, ReplayCalls, Subscription
from router.publisher.zmq.wakeups import Wakeups

TICK_S = 0.05
CONNECT_S = 3.0
ANSWER_S = 2.0
"""The timeout between two messages of a replay, as in a router."""

REPLAY_S = 60.0
"""The timeout of a whole replay."""


class ServerWatch:
    """A subscription to every topic that calls `take` for each message."""

    def __init__(
        self, context: Context, endpoint: str, take: Callable[[list[bytes]], None]
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._take = take
        self.connected = asyncio.Event()
        self.losses = 0

    async def run(self, until: asyncio.Event) -> None:
        """Listen until `until` is set; reconnects when the connection is lost."""
        while not until.is_set():
            wakeups = Wakeups()
            subscription = Subscription(self._context, self._endpoint, "", wakeups)
            try:
                self.losses += await self._listen(subscription, wakeups, until)
            finally:
                subscription.close()
            await asyncio.sleep(TICK_S)

    async def _listen(
        self, subscription: Subscription, wakeups: Wakeups, until: asyncio.Event
    ) -> bool:
        """Listen until the end or a lost connection; return whether that was connected before."""
        ends_s, was_connected = time.monotonic() + CONNECT_S, False
        while not until.is_set():
            await wakeups.wait(TICK_S)
            condition = subscription.watch.look()
            if condition is Condition.CONNECTED:
                was_connected = True
                self.connected.set()
            for frames in subscription.receive():
                self._take(frames)
            is_late = not was_connected and time.monotonic() > ends_s
            if condition is Condition.LOST or is_late:
                return was_connected
        return False


async def replay(
    context: Context, endpoint: str, take: Callable[[Sequence[bytes]], bool]
) -> str | None:
    """Request all batches; return the reason for an early end, or None if it was complete.

    `take`: is called with each message, and returns True for the last one.
    """
    wakeups = Wakeups()
    calls = ReplayCalls(context, endpoint, wakeups)
    answered_s = began_s = time.monotonic()
    try:
        calls.request(0)
        while time.monotonic() < min(answered_s + ANSWER_S, began_s + REPLAY_S):
            await wakeups.wait(TICK_S)
            for frames in calls.receive():
                answered_s = time.monotonic()
                if take(frames):
                    return None
        return calls.failure if answered_s == began_s else "its responses stopped"
    finally:
        calls.close()
