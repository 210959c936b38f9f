"""The index alone beside a real worker, as processes of their own."""

import httpx

from support.processes.processes import Process
from support.processes.servers import eventually, free_port

PROMPT = list(b"Once upon a time there was a prompt, long enough to be cached in several blocks.")


async def test_indexer_follows_a_worker_and_stops_cleanly(fleet, tmp_path, nats_server):
    port = free_port()
    indexer = Process(
        tmp_path, "indexer", "router", "indexer",
        **{"nats-url": nats_server.url, "http-port": port, "drain-s": 0},
    )  # fmt: skip
    try:
        await fleet.start(workers=1)
        await fleet.ask(PROMPT)
        url = f"http://127.0.0.1:{port}"

        async def scores():
            try:
                answer = await fleet.client.post(f"{url}/query", json={"token_ids": PROMPT})
            except httpx.HTTPError:
                return False
            return answer.json().get("scores") == {"1": {"0": len(PROMPT) // 16 * 16}}

        await eventually(scores)
        workers = (await fleet.client.get(f"{url}/workers")).json()
        assert [(w["instance_id"], w["status"]) for w in workers] == [(1, "active")]
        assert indexer.stop() == 0
        assert "Traceback" not in indexer.log.read_text()
    finally:
        if indexer.popen.poll() is None:
            indexer.kill()
