"""A TensorRT-LLM server's `/kv_cache_events`: a real HTTP server that returns each event once."""

import json
import threading
from http.server import BaseHTTPRequestHandler

from support.processes.http_server import LocalHttpServer


def block(block_hash, tokens):
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": block_hash, "tokens": unique,
            "cache_level": 0, "priority": 35}  # fmt: skip


class TrtllmServer(LocalHttpServer):
    """Numbers events from 0 in every life, by rank; a life begins with `created`. `garbage` is
    answered once, in place of the events that are then lost.
    """

    def __init__(self, ranks=(None,)):
        super().__init__()
        self.status = 200
        self.garbage = None
        self._ranks = ranks
        self._lock = threading.Lock()
        self._unread = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/kv_cache_events"

    def start(self):
        """Begin a life."""
        self._unread, self._next = [], dict.fromkeys(self._ranks, 0)
        for rank in self._ranks:
            self.publish({"type": "created", "num_blocks_per_cache_level": [100]}, rank)
        return super().start()

    def store(self, first, last, rank=None):
        """One block of four equal tokens each."""
        for n in range(first, last):
            blocks = [block(100 + n, [n] * 4)]
            self.publish({"type": "stored", "parent_hash": None, "blocks": blocks}, rank)

    def remove(self, n, rank=None):
        self.publish({"type": "removed", "block_hashes": [100 + n]}, rank)

    def publish(self, data, rank=None):
        with self._lock:
            event = {"event_id": self._next[rank], "data": data, "window_size": 4096}
            self._next[rank] += 1
            self._unread.append(event if rank is None else {**event, "attention_dp_rank": rank})

    def skip(self, count, rank=None):
        """Let another reader take `count` events."""
        self._next[rank] += count

    def forget(self):
        """What was not asked for yet is lost."""
        self.take_events()

    def take_events(self):
        with self._lock:
            taken, self._unread = self._unread, []
            return taken

    def _handler(self):
        said = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.dumps(said.take_events() if said.status == 200 else []).encode()
                body, said.garbage = said.garbage or body, None
                self.send_response(said.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler
