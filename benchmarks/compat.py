"""One client of Dynamo's selection service, one script of everything it offers, two servers.

    python benchmarks/compat.py            # installs the peer once, starts both, prints a table

The client is written from that service's interface: it knows nothing of this repository. A step
passes where status, fields and values are what a caller of the service relies on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import msgspec
import zmq

BLOCK_SIZE = 16
MODEL = {"model_name": "m", "routing_group": "g"}
PROMPT = list(range(1, 161))
OTHER = [7] * 40
JSON = {"content-type": "application/json"}

Check: TypeAlias = Callable[[Any], bool]


class Script:
    """Steps against one server; `results` says of each whether it went as it should."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)
        self.results: dict[str, str] = {}

    def close(self) -> None:
        """Ask nothing more."""
        self._http.close()

    def step(
        self,
        name: str,
        method: str,
        path: str,
        body: Any = None,
        status: int = 200,
        check: Check = lambda _: True,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Ask; note how it went; the answer."""
        if content is None and body is not None:
            content = json.dumps(body).encode()
        sent = (JSON if content is not None else {}) if headers is None else headers
        answer = self._http.request(method, path, content=content, headers=sent)
        said = answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        try:
            is_right = answer.status_code == status and check(said)
        except (KeyError, TypeError, IndexError):
            is_right = False
        self.results[name] = "ok" if is_right else f"{answer.status_code} {str(said)[:120]}"
        return said


class Engine:
    """An engine as a service sees it: block events over ZMQ."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._sequence = 0

    @property
    def endpoint(self) -> str:
        """Where it publishes."""
        return f"tcp://127.0.0.1:{self._port}"

    def store(self, tokens: list[int]) -> None:
        """The blocks of a prompt are cached."""
        hashes = list(range(101, 101 + len(tokens) // BLOCK_SIZE))
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
        }
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1

    def close(self) -> None:
        """Publish nothing more."""
        self._socket.close(0)


def worker(worker_id: int, endpoints: list[str]) -> dict[str, Any]:
    """A registration."""
    return {
        **MODEL,
        "worker_id": worker_id,
        "endpoint": f"http://w{worker_id}",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 8192,
        "total_kv_blocks": 1000,
        "data_parallel_start_rank": 0,
        "data_parallel_size": len(endpoints),
        "kv_events_endpoints": {str(rank): each for rank, each in enumerate(endpoints)},
    }


def run(url: str) -> dict[str, str]:
    """The whole script; how each step went."""
    script, engines = Script(url), [Engine() for _ in range(3)]
    try:
        _before(script)
        _workers(script, [engine.endpoint for engine in engines])
        _receive(script, engines[0])
        _select(script)
        _reserve(script)
        _refusals(script)
        _end(script)
    finally:
        script.close()
        for engine in engines:
            engine.close()
    return script.results


def _before(script: Script) -> None:
    step = script.step
    step("health", "GET", "/health", check=lambda said: said == {"status": "ok"})
    step("not ready without workers", "GET", "/ready", status=503, check=_says(ready=False))
    step("no workers", "GET", "/workers", check=lambda said: said == [])
    step("nobody to select", "POST", "/select", {**MODEL, "token_ids": PROMPT}, 503, _is_error)
    step("nobody's overlap", "POST", "/overlap_scores", {**MODEL, "token_ids": [1]}, 503, _is_error)
    step("nobody's load", "POST", "/potential_loads", {**MODEL, "token_ids": [1]}, 503, _is_error)


def _workers(script: Script, endpoints: list[str]) -> None:
    step = script.step
    one, two = worker(1, endpoints[:1]), worker(2, endpoints[1:])
    step("register", "POST", "/workers", one, 201, _says(worker_id=1, lifecycle="schedulable"))
    step("register again", "POST", "/workers", one, 201, _says(worker_id=1))
    step("register two ranks", "POST", "/workers", two, 201, _says(data_parallel_size=2))
    incomplete = _says(
        lifecycle="incomplete",
        not_schedulable_reasons=[
            "endpoint is required",
            "block_size must be greater than 0",
            "kv_events endpoint is required for dp_rank 0",
        ],
    )
    step("register without the rest", "POST", "/workers", {"worker_id": 4}, 201, incomplete)
    step("register a negative id", "POST", "/workers", {"worker_id": -1}, 422, _is_error)
    step("register no id", "POST", "/workers", {}, 422, _is_error)
    step("list", "GET", "/workers", check=lambda said: {w["worker_id"] for w in said} == {1, 2, 4})
    step("list a model", "GET", "/workers?model_name=m", check=lambda said: len(said) == 2)
    step("ready", "GET", "/ready", check=_says(ready=True, schedulable_workers=2))
    patch = {"max_num_batched_tokens": 4096}
    step("patch", "PATCH", "/workers/2", patch, check=_says(max_num_batched_tokens=4096))
    step("patch nobody", "PATCH", "/workers/99", patch, 404, _is_error)
    step("patch nonsense", "PATCH", "/workers/abc", patch, 400)


def _receive(script: Script, engine: Engine) -> None:
    """Publish until the service has received it; a late subscriber misses what was published."""

    def held(said: Any) -> bool:
        return bool(said["workers"][0]["device_blocks"] == 10)

    deadline_s = time.monotonic() + 20
    asked = {**MODEL, "token_ids": PROMPT}
    while time.monotonic() < deadline_s:
        engine.store(PROMPT)
        script.step("overlap of a cached prompt", "POST", "/overlap_scores", asked, check=held)
        if script.results["overlap of a cached prompt"] == "ok":
            break
        time.sleep(0.2)


def _select(script: Script) -> None:
    def step(name: str, check: Check, status: int = 200, **fields: Any) -> Any:
        body = {**MODEL, "token_ids": PROMPT, **fields}
        return script.step(name, "POST", "/select", body, status, check)

    cached = _says(worker_id=1, dp_rank=0, endpoint="http://w1", effective_prefill_tokens=0)
    said = step("select where it is cached", cached)
    overlap = {"longest_matched", "gpu", "dp", "cpu", "disk"}
    script.results["overlap in tokens"] = (
        "ok" if overlap <= said["overlap"].keys() and said["overlap"]["gpu"] == 160 else str(said)
    )
    step("select another prompt", _says(effective_prefill_tokens=40), token_ids=OTHER)
    step("select no tokens", _says(effective_prefill_tokens=0), token_ids=[])
    step("select under an id", _says(selection_id="s1"), selection_id="s1")
    step("select among some", _says(worker_id=2), allowed_worker_ids=[2])
    pinned = {"worker_id": 2, "dp_rank": 1}
    step("select where it is pinned", _says(**pinned), pinned_worker=pinned)
    step("select an unknown field", cached, foo=1)
    step("select a hint", cached, kv_hint={"a": 1}, session_id="x", policy_class="y")
    step("select with its load", lambda said: "worker_load" in said, advisory=True)
    override = {"router_config_override": {"router_temperature": 0.0}}
    step("select with settings", cached, **override)
    taints = {"required_taints": ["a100"]}
    step("select what nobody has", _is_error, 503, routing_constraints=taints)
    hashes = {"block_hashes": [1, -2], "sequence_hashes": [1, -2], "isl_tokens": 32}
    step("select by hashes", _says(effective_prefill_tokens=32), token_ids=None, **hashes)
    script.step(
        "potential loads",
        "POST",
        "/potential_loads",
        {**MODEL, "token_ids": PROMPT},
        check=lambda said: (
            {(r["worker_id"], r["dp_rank"]) for r in said} == {(1, 0), (2, 0), (2, 1)}
        ),
    )


def _reserve(script: Script) -> None:
    step = script.step
    prompt = {**MODEL, "token_ids": PROMPT}
    pending = {**MODEL, "selection_id": "s1"}
    step("reserve a selection", "POST", "/reservations", pending, 201, _says(worker_id=1))
    step("reserve it again", "POST", "/reservations", pending, 404, _is_error)
    elsewhere = {"selection_id": "s1"}
    step("reserve it elsewhere", "POST", "/reservations", elsewhere, 404, _is_error)
    booked = step(
        "select and reserve",
        "POST",
        "/select_and_reserve",
        {**prompt, "selection_id": "r1", "expected_output_tokens": 64},
        check=_says(selection_id="r1", isl_tokens=160, track_prefill_tokens=True),
    )
    hashes = {name: booked.get(name) for name in ("sequence_hashes", "isl_tokens")}
    script.results["hashes of a booking"] = (
        "ok" if len(hashes["sequence_hashes"] or ()) == 10 else str(booked)[:120]
    )
    again = {**prompt, "selection_id": "r1"}
    step("the same id again", "POST", "/select_and_reserve", again, 409, _is_error)
    named: Check = lambda said: bool(said["selection_id"])  # noqa: E731
    given = step("an id is given", "POST", "/select_and_reserve", prompt, check=named)
    step("free that", "DELETE", f"/reservations/{given.get('selection_id')}")
    active = lambda said: sum(r["active_requests"] for r in said[0]["loads"]) == 2  # noqa: E731
    step("loads", "GET", "/loads?model_name=m", check=active)
    step("prefill complete", "POST", "/reservations/r1/prefill_complete", check=_says(status="ok"))
    half = {"decay_fraction": 0.5}
    step("output block", "POST", "/reservations/r1/output_block", half, check=_says(status="ok"))
    step("output block, no fraction", "POST", "/reservations/r1/output_block", {})
    two = {"decay_fraction": 2}
    step("output block, two", "POST", "/reservations/r1/output_block", two, 400, _is_error)
    step("output block, no body", "POST", "/reservations/r1/output_block", None, 415, _is_error)
    chosen = {**prompt, "selection_id": "x1", "worker_id": 2, "dp_rank": 1}
    step("reserve a rank", "POST", "/reservations", chosen, 201, _says(worker_id=2, dp_rank=1))
    nobody = {**prompt, "selection_id": "x2", "worker_id": 77}
    step("reserve nobody", "POST", "/reservations", nobody, 404, _is_error)
    for name in ("s1", "r1", "x1"):
        step(f"free {name}", "DELETE", f"/reservations/{name}", check=_says(status="ok"))
    step("free again", "DELETE", "/reservations/r1", status=404, check=_is_error)
    step("progress of nobody", "POST", "/reservations/zz/prefill_complete", status=404)


def _refusals(script: Script) -> None:
    def step(name: str, content: bytes, status: int, **headers: str) -> None:
        sent = {**JSON, **headers}
        script.step(name, "POST", "/select", status=status, content=content, headers=sent)

    step("no prompt", b'{"model_name":"m","routing_group":"g"}', 400)
    step("block hashes alone", b'{"model_name":"m","routing_group":"g","block_hashes":[1]}', 400)
    step("a negative token", b'{"token_ids":[-1]}', 422)
    step("a token beyond 32 bits", b'{"token_ids":[4294967296]}', 422)
    step("a token that is none", b'{"token_ids":"abc"}', 422)
    step("not a number", b'{"token_ids":[NaN]}', 400)
    step("a field twice", b'{"model_name":"m","model_name":"m","token_ids":[1]}', 422)
    step("broken JSON", b'{"model_name":', 400)
    step("an empty body", b"", 400)
    step("a list", b"[1]", 422)
    step("another type", b'{"token_ids":[1]}', 415, **{"content-type": "text/plain"})
    script.step("another method", "GET", "/select", status=405, check=_is_error)
    script.step("no such path", "GET", "/nope", status=404, check=_is_error)


def _end(script: Script) -> None:
    step = script.step
    step("dump", "GET", "/dump", check=lambda said: said["m:g"]["block_size"] == BLOCK_SIZE)
    step("replica peers", "GET", "/replica_sync/peers", check=lambda said: said == [])
    peer = {"endpoint": "tcp://127.0.0.1:5555"}
    step("another replica", "POST", "/replica_sync/register_peer", peer, 409, _is_error)
    step("delete", "DELETE", "/workers/1", check=_says(worker_id=1, lifecycle="unschedulable"))
    step("delete again", "DELETE", "/workers/1", status=404, check=_is_error)


def _says(**fields: Any) -> Check:
    return lambda said: all(said[name] == value for name, value in fields.items())


def _is_error(said: Any) -> bool:
    return isinstance(said["error"], str) and bool(said["error"])


@contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """A server, from when it answers until it is not needed any more; its URL."""
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            _wait(url)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, limit_s: float = 120) -> None:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            httpx.get(f"{url}/health", timeout=1).raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return


def table(results: dict[str, dict[str, str]]) -> str:
    """Each step for each server."""
    names = list(results)
    steps = list(dict.fromkeys(step for each in results.values() for step in each))
    width = max(map(len, steps))
    rows = [["step", *names]]
    rows += [[step, *(results[name].get(step, "-") for name in names)] for step in steps]
    lines = [f"{row[0]:{width}}  " + "  ".join(f"{each:8}" for each in row[1:]) for row in rows]
    passed = {name: list(each.values()).count("ok") for name, each in results.items()}
    totals = ", ".join(f"{name} {passed[name]} of {len(results[name])}" for name in names)
    return "\n".join([*lines, "", totals])


def peer_command(python: str, port: int) -> list[str]:
    """How the peer is run."""
    return [python, "-m", "dynamo.select_service", "--port", str(port), "--threads", "2"]


def our_command(port: int) -> list[str]:
    """How ours is."""
    return [sys.executable, "-m", "router", "serve", "--http-port", str(port)]


def main() -> None:
    """Both servers, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer-python", help="an interpreter that has ai-dynamo-runtime")
    parser.add_argument("--port", type=int, default=18_480)
    parser.add_argument("--json", type=Path, help="write the results there")
    chosen = parser.parse_args()
    peer_python = chosen.peer_python
    if peer_python is None:
        from peer import REQUIREMENTS, VENV, python_of

        peer_python = str(python_of(VENV, REQUIREMENTS))
    results = {}
    commands = {
        "peer": peer_command(peer_python, chosen.port),
        "ours": our_command(chosen.port + 1),
    }
    for offset, (name, command) in enumerate(commands.items()):
        with serving(command, chosen.port + offset) as url:
            results[name] = run(url)
    print(table(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(set(each.values()) != {"ok"} for each in results.values()))


if __name__ == "__main__":
    main()
