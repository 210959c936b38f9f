"""A small real HTTP server on a port of its own."""

import threading
from http.server import ThreadingHTTPServer

from support.processes.servers import free_port


class LocalHttpServer:
    """Started and stopped as often as a test likes; `_handler` makes the class that answers."""

    def __init__(self, port=None):
        self.port = port or free_port()
        self._server = None

    def start(self):
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()
