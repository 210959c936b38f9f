"""A TCP link that is cut, refuses connections, and stops carrying bytes."""

import asyncio
from contextlib import AsyncExitStack

from support.processes.listening import listening
from support.processes.servers import free_port

_CLOSED = (ConnectionError, OSError)


class Relay:
    """Stands between two processes. `target_port`: where it connects, once there is one."""

    def __init__(self):
        self.port = free_port()
        self.target_port = 0
        self.is_down = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._links = set()
        self._listening = AsyncExitStack()

    async def __aenter__(self):
        await self._listening.enter_async_context(listening(self._serve, self.port))
        return self

    async def __aexit__(self, *_):
        await self._listening.aclose()

    def stall(self):
        """Carry nothing in either direction until `resume`."""
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
        self.is_down = True
        await self.cut()

    def come_up(self):
        self.is_down = False

    async def _serve(self, reader, writer):
        self._links.add(asyncio.current_task())
        try:
            if self.is_down or not self.target_port:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, far_writer))
                    group.create_task(self._carry(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except* _CLOSED:
            pass
        finally:
            writer.transport.abort()
            self._links.discard(asyncio.current_task())

    async def _carry(self, reader, writer):
        while data := await reader.read(1 << 16):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
