"""Servers of a test's own loop, which leave no connection open."""

import asyncio
from contextlib import asynccontextmanager


@asynccontextmanager
async def listening(serve, port=0, **options):
    """Answer each connection by `serve(reader, writer)`. Yields the port.

    At the end every connection is closed, also one that `serve` or its client left open: it would
    warn when it is collected, in another test. An error of `serve` that is not one of a connection
    is raised then.
    """
    connections = _Connections(serve)
    server = await asyncio.start_server(connections.begin, "127.0.0.1", port, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await connections.end()


class _Connections:
    def __init__(self, serve):
        self._serve = serve
        self._writers, self._tasks = [], set()
        self._is_over = False

    def begin(self, reader, writer):
        """Serve a new connection."""
        self._writers.append(writer)
        if self._is_over:
            writer.transport.abort()
        else:
            self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def end(self):
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        await _turns(4)  # a connection that the loop is accepting begins
        for writer in self._writers:
            writer.transport.abort()
        await _turns(2)  # and transports close
        errors = [end for end in ends if isinstance(end, Exception) and not _is_of_connection(end)]
        if errors:
            raise ExceptionGroup("connections", errors)


def _is_of_connection(error):
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_connection, error.exceptions))
    return isinstance(error, OSError | asyncio.IncompleteReadError)


async def _turns(count):
    for _ in range(count):
        await asyncio.sleep(0)
