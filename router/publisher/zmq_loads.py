"""Listens to an SGLang rank's load socket."""

import time
from collections.abc import Callable

import zmq

from router.publisher.engine_loads import TOPIC, EngineLoads
from router.publisher.zmq_sockets import Context, Receiver
from router.publisher.zmq_wakeups import Wakeups

_LOOK_S = 10.0


async def listen_to_loads(
    context: Context,
    endpoint: str,
    loads: EngineLoads,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Hear reports until cancelled. A lost one is superseded by the next, so that the socket may
    reconnect by itself.
    """
    wakeups = Wakeups()
    receiver = Receiver(context, zmq.SUB, wakeups)
    try:
        receiver.socket.subscribe(TOPIC)
        receiver.connect(endpoint)
        while True:
            await wakeups.wait(_LOOK_S)
            for frames in receiver.receive():
                loads.hear(frames, clock())
    finally:
        receiver.close()
