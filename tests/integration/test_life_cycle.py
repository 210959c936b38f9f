"""Signals and logs of a real router process."""

import asyncio
import json
import re
import signal
from contextlib import ExitStack

import httpx
import pytest

from router.cli import main
from support.processes.processes import Process
from support.processes.servers import NO_TLS, eventually, free_port

PASSWORD, TOKEN = "pass-w0rd-of-nats", "secret-token-of-a-caller"


class Router:
    """A process, and a client of it."""

    def __init__(self, directory, label, command="serve", **options):
        self.port = free_port()
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=NO_TLS
        )
        self.process = Process(
            directory,
            label,
            "router",
            command,
            **{"http-port": self.port, "name": label, **options},
        )

    async def is_up(self):
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def get(self, path):
        return (await self.client.get(path)).json()

    def lines(self):
        return [json.loads(line) for line in self.process.log.read_text().splitlines()]

    def said(self, text):
        return [line["message"] for line in self.lines() if text in line["message"]]


@pytest.fixture
async def start(tmp_path):
    with ExitStack() as stack:
        clients = []

        async def start(label, **options):
            router = Router(tmp_path, label, **options)
            stack.callback(router.process.end)
            clients.append(router.client)
            await eventually(router.is_up)
            return router

        yield start
        for client in clients:
            await client.aclose()


async def test_sighup_applies_live_settings_and_names_the_others(start, tmp_path):
    file = tmp_path / "router.toml"
    file.write_text("body_limit_bytes = 1024\nreservation_ttl_s = 5\n")
    router = await start("r", config=file)

    async def status():
        return (await router.client.post("/select", json={"token_ids": [1] * 1000})).status_code

    assert await status() == 413

    file.write_text("body_limit_bytes = 9000\nreservation_ttl_s = 6\nlog_level = 'debug'\n")
    router.process.popen.send_signal(signal.SIGHUP)
    await eventually(lambda: router.said("reload: reservation_ttl_s"))
    await eventually(lambda: len(router.said("reload")) == 3)
    assert sorted(router.said("reload")) == [
        "reload: body_limit_bytes: 1024 is now 9000",
        "reload: log_level: 'info' is now 'debug'",
        "reload: reservation_ttl_s: 5.0 is now 6.0; takes effect at a restart",
    ]
    assert await status() == 503
    config = await router.get("/config")
    assert config["body_limit_bytes"] == {
        "value": 9000, "source": f"file {file}: body_limit_bytes",
    }  # fmt: skip
    assert config["reservation_ttl_s"]["value"] == 5
    assert router.said("refused (no_endpoints)")

    kept = "body_limit_bytes = 9000\nlog_level = 'debug'\n"
    file.write_text(f"{kept}default_requests_per_s = 0.001\n")
    router.process.popen.send_signal(signal.SIGHUP)
    await eventually(lambda: router.said("reload: default_requests_per_s: 0.0 is now 0.001"))
    assert await status() == 503
    assert await status() == 429

    file.write_text(kept)
    router.process.popen.send_signal(signal.SIGHUP)
    await eventually(lambda: router.said("reload: default_requests_per_s: 0.001 is now 0.0"))

    file.write_text("body_limit_bytes = 'many'\nlog_level = 'error'\n")
    router.process.popen.send_signal(signal.SIGHUP)
    (said,) = await eventually(lambda: router.said("no setting changed"))
    assert "body_limit_bytes: 'many'" in said
    assert await status() == 503
    metrics = (await router.client.get("/metrics")).text
    assert 'kv_router_config_reloads_total{outcome="applied"} 3.0' in metrics
    assert 'kv_router_config_reloads_total{outcome="refused"} 1.0' in metrics

    file.write_text("log_level = 'debug'\n")
    router.process.popen.send_signal(signal.SIGHUP)
    await eventually(lambda: router.said("body_limit_bytes: 9000 is now 33554432"))
    assert router.process.stop() == 0


async def test_sighup_changes_policy_and_limits_for_the_next_request(start, tmp_path, capsys):
    file, recording = tmp_path / "router.toml", tmp_path / "recording.jsonl"
    kept = "check_workers = false\n"
    file.write_text(f"{kept}policy = 'round-robin'\n")
    router = await start("r", config=file, **{"record-to": recording})
    for worker_id in (1, 2):
        worker = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": 4}
        assert (await router.client.post("/workers", json=worker)).status_code == 201
    names = iter("abcdefgh")

    async def reload(text, said):
        file.write_text(kept + text)
        router.process.popen.send_signal(signal.SIGHUP)
        return await eventually(lambda: router.said(said))

    async def book(**fields):
        body = {"token_ids": [1] * 64, "request_id": next(names), "max_wait_s": 0.2, **fields}
        return await router.client.post("/select_and_reserve", json=body)

    async def policy():
        answer = await book()
        assert answer.status_code == 200, answer.text
        return answer.json()["policy"]

    assert await policy() == "round-robin"
    changed = "policy = 'least-loaded'\nmax_reservations = 2\n"
    await reload(changed, "reload: policy: 'round-robin' is now 'least-loaded'")
    assert router.said("reload: max_reservations: 1000000 is now 2")
    assert await policy() == "least-loaded"
    assert (await book()).status_code == 503
    config = await router.get("/config")
    assert config["policy"]["value"] == "least-loaded"
    await reload("policy = 'of nobody'\nmax_reservations = 9\n", "no setting changed: policy")
    await reload("overlap_score_weight = 0\n", "no setting changed: overlap_score_weight")
    assert (await book()).status_code == 503
    await reload("router_queue_threshold = 0\n", "reload: router_queue_threshold")
    assert (await book()).status_code == 529
    assert router.process.stop() == 0
    assert main(["replay", str(recording)]) == 0
    assert re.search(r"decisions: (\d+) of \1 equal", capsys.readouterr().out)


async def test_sighup_reloads_an_indexer(start, tmp_path):
    file = tmp_path / "indexer.toml"
    file.write_text("body_limit_bytes = 1024\n")
    index = await start("i", command="indexer", config=file)

    async def status():
        body = {"token_ids": [1] * 1000}
        return (await index.client.post("/query", json=body)).status_code

    assert await status() == 413
    file.write_text("body_limit_bytes = 9000\nmax_peers = 7\n")
    index.process.popen.send_signal(signal.SIGHUP)
    await eventually(lambda: len(index.said("reload: ")) == 2)
    assert index.said("max_peers: 64 is now 7; takes effect at a restart")
    assert await status() != 413
    assert index.process.stop() == 0


async def test_sigterm_finishes_requests_after_other_routers_took_over(start, nats_server):
    bus = {"nats-url": nats_server.url, "drain-s": 6}  # we may be late ourselves
    first, second = await start("first", **bus), await start("second", **bus)

    async def names():
        return [each["name"] for each in await second.get("/routers")]

    await eventually(lambda: _equals(names(), {"first", "second"}))
    reader, writer = await asyncio.open_connection("127.0.0.1", first.port)
    body = json.dumps({"token_ids": [1, 2, 3]}).encode()
    head = "POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:5])
    await writer.drain()

    first.process.popen.terminate()
    await eventually(lambda: _equals(names(), {"second"}))
    assert first.process.popen.poll() is None
    ready = await first.client.get("/ready")
    assert (ready.status_code, "draining" in ready.json()["reason"]) == (503, True)
    writer.write(body[5:])
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503")
    writer.close()
    assert await asyncio.to_thread(first.process.popen.wait) == 0


async def _equals(names, expected):
    return set(await names) == expected


async def test_secrets_are_never_logged(start, tmp_path, nats_server):
    """With everything logged, and everything going wrong that has a secret in it."""
    url = nats_server.url.replace("nats://", f"nats://user:{PASSWORD}@")
    file = tmp_path / "router.toml"
    file.write_text(f"nats_url = '{url}'\nlog_level = 'debug'\n")
    router = await start("r", config=file)
    await eventually(lambda: router.said("connected to NATS"))
    headers = {"authorization": f"Bearer {TOKEN}", "x-request-id": f"Bearer {TOKEN}"}
    for path in ("/select", f"/select?token={TOKEN}", "/nowhere"):
        await router.client.post(path, content=b"{", headers=headers)
    nats_server.kill()
    await eventually(lambda: router.said("lost the connection"))
    for other, said in (
        (f"{url}x", "no setting changed: nats_url"),
        (url[:-1], "reload: nats_url"),
    ):
        file.write_text(f"nats_url = '{other}'\nlog_level = 'debug'\n")
        router.process.popen.send_signal(signal.SIGHUP)
        await eventually(lambda said=said: router.said(said))
    shown = json.dumps(await router.get("/config"))
    log = router.process.log.read_text()
    for secret in (PASSWORD, TOKEN):
        assert secret not in log
        assert secret not in shown
    assert "nats://***@127.0.0.1" in log
    assert any("request_id" in line for line in router.lines())
