"""Every route of a router as a `curl` command, with the response of a real router.

`PYTHONPATH=.:tests python tests/support/values/curl_examples.py` writes `EXAMPLES.md` of
`router/api/http`.
"""

import asyncio
import json
import re
import shlex
from pathlib import Path

import numpy as np

from router.api.http.openapi import EXAMPLES
from router.config.router import RouterConfig
from router.runtime.process.settings import configured
from router.service.router import RouterService
from support.processes.running import RunningService
from support.processes.servers import free_port

FILE = Path(__file__).parents[3] / "router/api/http/EXAMPLES.md"
HEAD = """# Every route, with curl

What a router answers that was started with `kv-router serve --no-use-kv-events`, and asked in this
order. `…` stands for what is different each time, and for the rest of what is long. A test holds
this page against what routers answer; after a change,
`PYTHONPATH=.:tests python tests/support/values/curl_examples.py` writes it anew. What the routes
are for: [README.md](README.md#routes).
"""

HOST = "localhost:8092"
PROMPT = {"model_name": "llama", "token_ids": [*range(1, 18)]}
SHORT = {"model_name": "llama", "token_ids": [1, 2, 3]}
ELSEWHERE = {"model_name": "mistral", "token_ids": [1, 2]}
PEER = {"endpoint": "tcp://10.0.0.8:9000"}
FILES = {"@tokens.u32": np.arange(1, 18, dtype="<u4").tobytes()}
SHOWN = 480
"""Characters of an answer."""


def ask(path, body=None, method=None, pipe=None, head=""):
    """A command as a user types it; `head`: what stands before the rest."""
    url = f"'{HOST}{path}'" if "?" in path else f"{HOST}{path}"
    said = "" if body is None else f" -H 'content-type: application/json' -d '{json.dumps(body)}'"
    method = "" if method is None else f" -X {method}"
    return f"curl -s{head}{method} {url}{said}" + (f" | {pipe}" if pipe else "")


def worker(worker_id, **fields):
    """What registers one."""
    endpoint = f"http://10.0.0.{worker_id}:8000"
    named = {"worker_id": worker_id, "model_name": "llama", "endpoint": endpoint}
    return {**named, "block_size": 16, **fields}


SECTIONS = {
    "Workers": [
        ask("/workers", worker(7, total_kv_blocks=4096)),
        ask("/workers", worker(8), pipe="jq -c .name"),
        ask(
            "/workers/8",
            {"lifecycle": "cordoned"},
            method="PATCH",
            pipe="jq -c .not_schedulable_reasons",
        ),
        ask("/workers?model_name=llama", pipe="jq -c '.[0].ranks'"),
        ask("/workers/7", pipe="jq -c .lifecycle"),
        ask("/workers/8", method="DELETE", pipe="jq -c .worker_id"),
        ask("/workers/8"),
    ],
    "Choose": [
        ask("/select", {**PROMPT, "selection_id": "s-1"}),
        f"curl -s '{HOST}/select?model_name=llama' -H 'content-type: application/octet-stream'"
        " --data-binary @tokens.u32 | jq -c .isl_tokens",
        ask("/select?answer=headers", SHORT, head=" -i"),
        ask("/select", {**SHORT, "explain": True}, pipe="jq -c '.candidates[0].predicted'"),
        ask("/select:batch", {"requests": [ELSEWHERE, SHORT]}),
    ],
    "Book": [
        ask("/reservations", {"model_name": "llama", "selection_id": "s-1"}),
        ask("/select_and_reserve", {**SHORT, "request_id": "r-2"}),
        ask("/reservations", {**SHORT, "request_id": "r-3", "worker_id": 7}),
        ask(
            "/reservations/s-1/prefill_complete",
            {"usage": {"prompt_tokens": 17, "cached_tokens": 0}},
        ),
        ask("/reservations/s-1/output_block", {"decay_fraction": 0.5}),
        ask("/reservations/s-1", method="DELETE"),
        ask(
            "/reservations:batch",
            {
                "steps": [
                    {"request_id": "r-2", "step": "prefill_complete"},
                    {"request_id": "r-9", "step": "free"},
                ]
            },
        ),
    ],
    "Look": [
        ask("/loads"),
        ask("/capacity?model_name=llama", pipe="jq -c '.[0].workers'"),
        ask("/potential_loads", SHORT),
        ask("/overlap_scores", PROMPT),
        ask("/dump"),
        ask("/blocks/16863443419780771464"),
        ask("/busy_threshold"),
        ask("/busy_threshold", {"model": "llama", "active_decode_blocks_threshold": 0.9}),
        ask("/config", pipe="jq -c .router_temperature"),
        ask("/recording"),
        ask("/recording", {"recording": True}, pipe="jq -c .code"),
        ask("/routers"),
        ask("/predictions"),
        ask("/shadow"),
        ask("/replica_sync/peers"),
        ask("/replica_sync/register_peer", PEER),
        ask("/replica_sync/deregister_peer", PEER, pipe="jq -c .code"),
        ask("/replica_sync/stream", EXAMPLES["replica_stream"], pipe="jq -c .code"),
        ask("/health"),
        ask("/ready"),
        ask("/ready?verbose", pipe="jq -c .degraded"),
        ask("/metrics", pipe="grep kv_router_decisions_total"),
        ask("/openapi.json", pipe="jq -c .info.title"),
    ],
    "What is refused": [
        ask("/select", {**SHORT, "token_ids": [1, -2]}),
        ask("/select", ELSEWHERE),
        ask("/select", {**SHORT, "fancy": 1}, pipe="jq -c .warnings"),
        f"curl -s {HOST}/select -H 'content-type: text/plain' -d '{{}}'",
        ask("/select", method="PUT"),
        ask("/selects"),
    ],
}

VARIES = re.compile(r'"((?:incarnation|potential_decode_blocks|[a-z_]+_s)":)[-0-9.e]+')
"""Decode blocks grow by the expected progress of answers, as time passes."""


def request_of(command):
    """What curl would send: method, path, headers and body; and whether it shows the head."""
    method, path, headers, body, shows_head = None, "", {}, None, False
    words = iter(shlex.split(command)[1:])
    for word in words:
        match word:
            case "-s":
                pass
            case "-i":
                shows_head = True
            case "-X":
                method = next(words)
            case "-H":
                name, _, value = next(words).partition(": ")
                headers[name] = value
            case "-d":
                body = next(words).encode()
            case "--data-binary":
                body = FILES[next(words)]
            case _:
                path = word.removeprefix(HOST)
    return method or ("GET" if body is None else "POST"), path, headers, body, shows_head


async def answer_to(client, line):
    """What a router answers to a command, as it is shown."""
    command, _, pipe = line.partition(" | ")
    method, path, headers, body, shows_head = request_of(command)
    answer = await client.request(method, path, headers=headers, content=body)
    text = _piped(answer.text, shlex.split(pipe)) if pipe else answer.text
    if shows_head:
        said = [f"{k}: {v}" for k, v in answer.headers.items() if k != "date"]
        text = "\n".join([f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}", *said, "", text])
    text = VARIES.sub(r'"\1…', text).strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _piped(text, words):
    if words[0] == "grep":
        return "\n".join(line for line in text.splitlines() if words[1] in line)
    value = json.loads(text)
    for name, index in re.findall(r"\.?([a-z_]+)|\[(\d+)\]", words[-1]):
        value = value[name] if name else value[int(index)]
    return json.dumps(value, separators=(",", ":"))


async def page():
    """The whole of it."""
    port = free_port()
    config = configured(
        RouterConfig, http_port=port, use_kv_events=False, check_workers=False, drain_s=0.0
    )
    lines = [HEAD]
    async with RunningService(RouterService(config), port).running() as router:
        for title, commands in SECTIONS.items():
            lines += [f"## {title}", "", "```console"]
            for command in commands:
                lines += [f"$ {command}", await answer_to(router.client, command)]
            lines += ["```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(asyncio.run(page()))
