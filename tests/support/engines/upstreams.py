"""Servers that do with each request whatever a test wants, byte by byte."""

import asyncio
import json
from contextlib import asynccontextmanager

from support.processes.listening import listening
from support.processes.servers import eventually, free_port


class Upstream:
    """`script(upstream, writer)` answers each request; what came is in `requests`, as (head,
    body). Connections that are gone are counted.
    """

    def __init__(self, script):
        self.script = script
        self.port = free_port()
        self.requests = []
        self.connections = 0
        self.gone = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self):
        async with listening(self._serve, self.port, backlog=4096):
            yield self

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while await self.read_request(reader):
                await self._until_gone_or_answered(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.gone += 1
            writer.close()

    async def _until_gone_or_answered(self, reader, writer):
        """A client that hangs up ends the script, too."""
        script = asyncio.create_task(self.script(self, writer))
        gone = asyncio.create_task(_until_closed(reader))
        try:
            await asyncio.wait((script, gone), return_when=asyncio.FIRST_COMPLETED)
            if script.done():
                script.result()
        finally:
            for task in (script, gone):
                task.cancel()
            await asyncio.wait((script, gone))

    async def read_request(self, reader):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = await reader.readline()
            if not line:
                return False
            head += line
        lengths = [
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"-length:" in line
        ]
        self.requests.append((head.decode("latin-1"), await reader.readexactly(sum(lengths))))
        return True


async def _until_closed(reader):
    """No client sends a second request before the first is answered."""
    await eventually(reader.at_eof)


def response(body=b"{}", status="200 OK", *headers, length=None):
    """Bytes of an answer."""
    length = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {length}", "", ""]
    return "\r\n".join(lines).encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"


def chunk(data):
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body):
    """One event of a stream, as a piece of a chunked body."""
    return chunk(
        b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
    )


def says(*pieces, then_close=False):
    """A script that writes these."""

    async def script(_, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if then_close:
            writer.close()

    return script


async def hangs(_, __):
    """A script that never answers."""
    await asyncio.Event().wait()


async def hangs_up(_, writer):
    """A script that closes the connection instead of answering."""
    writer.close()
