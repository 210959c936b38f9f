"""A link to nats-server that loses, doubles and delays whole messages, stalls, and is cut."""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from random import Random

from support.processes.listening import listening
from support.processes.servers import free_port

_LIMIT_BYTES = 1 << 20
_CLOSED = (asyncio.IncompleteReadError, ConnectionError, OSError)


@dataclass(frozen=True)
class Faults:
    """How likely each is to befall a message; what is delayed is overtaken by what follows.

    `about`: only messages with this in their subject are concerned. `latency_s` is added to
    everything, in order.
    """

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.3
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    about: bytes = b""


NONE = Faults()


class Proxy:
    """Stands between nats-server and one of its clients; every connection goes through `url`."""

    def __init__(self, target_port, seed=0):
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.from_client = self.to_client = NONE
        self.counts = {"lost": 0, "doubled": 0, "delayed": 0}
        self._target_port = target_port
        self._rng = Random(seed)
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_down = False
        self._links = set()
        self._listening = AsyncExitStack()

    async def __aenter__(self):
        await self._listening.enter_async_context(
            listening(self._serve, self.port, limit=_LIMIT_BYTES)
        )
        return self

    async def __aexit__(self, *_):
        await self._listening.aclose()

    def set_faults(self, faults):
        """For both directions."""
        self.from_client = self.to_client = faults

    def stall(self):
        """Stop both directions silently; what was sent arrives after `resume`."""
        self._flows.clear()

    def resume(self):
        self._flows.set()

    async def cut(self):
        """Close what is connected now."""
        for link in (links := tuple(self._links)):
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    async def go_down(self):
        """Cut, and refuse connections, until `come_up`."""
        self._is_down = True
        await self.cut()

    def come_up(self):
        self._is_down = False

    async def _serve(self, reader, writer):
        link = asyncio.current_task()
        self._links.add(link)
        try:
            with suppress(*_CLOSED, asyncio.CancelledError):
                if not self._is_down:
                    await self._link(reader, writer)
        finally:
            self._links.discard(link)
            writer.transport.abort()

    async def _link(self, client_reader, client_writer):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._target_port, limit=_LIMIT_BYTES
        )
        pumps = [
            asyncio.create_task(self._pump(client_reader, writer, lambda: self.from_client)),
            asyncio.create_task(self._pump(reader, client_writer, lambda: self.to_client)),
        ]
        async with AsyncExitStack() as stack:
            stack.callback(writer.transport.abort)
            for pump in pumps:
                stack.callback(pump.cancel)
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)

    async def _pump(self, reader, writer, faults):
        """Frames from one end to the other, until either closes."""
        with suppress(*_CLOSED):
            async with asyncio.TaskGroup() as late:
                while True:
                    frame, subject = await read_frame(reader)
                    await self._flows.wait()
                    now = faults()
                    await asyncio.sleep(now.latency_s + len(frame) / now.bytes_per_s)
                    if subject is None or now.about not in subject:
                        writer.write(frame)
                    else:
                        self._forward(frame, writer, now, late)
                    await writer.drain()

    def _forward(self, frame, writer, faults, late):
        fate = self._rng.random()
        if fate < faults.lost:
            self.counts["lost"] += 1
        elif fate < faults.lost + faults.doubled:
            self.counts["doubled"] += 1
            writer.write(frame + frame)
        elif fate < faults.lost + faults.doubled + faults.delayed:
            self.counts["delayed"] += 1
            late.create_task(_write_later(frame, writer, faults.delay_s * self._rng.random()))
        else:
            writer.write(frame)


async def read_frame(reader):
    """The next frame of the NATS protocol, and its subject if it is a message."""
    line = await reader.readuntil(b"\r\n")
    operation, *arguments = line.split()
    if operation.upper() not in (b"PUB", b"HPUB", b"MSG", b"HMSG"):
        return line, None
    payload = await reader.readexactly(int(arguments[-1]) + 2)
    return line + payload, arguments[0]


async def _write_later(frame, writer, delay_s):
    await asyncio.sleep(delay_s)
    with suppress(*_CLOSED):
        writer.write(frame)
