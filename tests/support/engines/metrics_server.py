"""An engine's metrics endpoint: a small real HTTP server with the text that a test sets."""

import threading
from http.server import BaseHTTPRequestHandler

from support.processes.http_server import LocalHttpServer


def vllm_metrics(
    *, block_size=4, num_gpu_blocks=1000, model_name="tiny", running=0, waiting=0, ranks=(0,)
):
    """Metrics as vLLM 0.32 writes them; `running` and `waiting` are the first rank's."""
    lines = [
        f'vllm:cache_config_info{{block_size="{block_size}",engine="{ranks[0]}",'
        f'num_gpu_blocks="{num_gpu_blocks}"}} 1.0'
    ]
    for place, rank in enumerate(ranks):
        labels = f'{{engine="{rank}",model_name="{model_name}"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running + place}.0",
            f"vllm:num_requests_waiting{labels} {waiting}.0",
            f"vllm:kv_cache_usage_perc{labels} 0.5",
            f"vllm:prompt_tokens_total{labels} 1000.0",
            f"vllm:prefix_cache_hits_total{labels} 400.0",
        ]
    return "\n".join([*lines, ""])


class MetricsServer(LocalHttpServer):
    """What it answers may be changed while it runs; while it `hangs`, it answers nothing."""

    def __init__(self, text, port=None):
        super().__init__(port)
        self.text = text
        self.status = 200
        self._answers = threading.Event()
        self.hangs = False
        self.requests = 0

    @property
    def hangs(self):
        return not self._answers.is_set()

    @hangs.setter
    def hangs(self, does):
        (self._answers.clear if does else self._answers.set)()

    def wait_to_answer(self):
        self._answers.wait(60.0)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/metrics"

    def _handler(self):
        said = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                said.requests += 1
                said.wait_to_answer()
                body = said.text if isinstance(said.text, bytes) else said.text.encode()
                self.send_response(said.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_):
                pass

        return Handler
