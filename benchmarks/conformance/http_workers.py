"""Workers for routers that can only be asked by sending them a request."""

import asyncio
from contextlib import suppress

REPLY = (
    b'{"object":"text_completion","data":[],"choices":[{"index":0,"text":"x","finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(REPLY)}\r\n\r\n"


class HttpWorkers:
    """Servers that answer everything at once, and alike."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._clients: set[asyncio.StreamWriter] = set()

    async def start(self, count: int) -> list[str]:
        """Start `count` servers. Returns their URLs."""
        self._servers = [
            await asyncio.start_server(self._serve, "127.0.0.1", 0) for _ in range(count)
        ]
        ports = [server.sockets[0].getsockname()[1] for server in self._servers]
        return [f"http://127.0.0.1:{port}" for port in ports]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for client in list(self._clients):
            client.close()
            with suppress(ConnectionError):
                await client.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, length = head.partition(b"content-length:")
                await reader.readexactly(int(length.split(b"\r\n")[0] or 0))
                writer.write(HEAD.encode() + REPLY)
                await writer.drain()
        self._clients.discard(writer)
        writer.close()
