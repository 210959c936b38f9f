"""Routers of a Service find each other, and share what they book."""

from contextlib import asynccontextmanager

import httpx

from support.processes.api_server import FakeApiServer, endpoint_slice
from support.processes.running import RunningRouter
from support.processes.servers import NO_TLS, eventually, free_port

ROUTERS = "kubernetes.io/service-name=routers"
SLICES = "endpointslices.discovery.k8s.io"
WORKER = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}


@asynccontextmanager
async def running(server, name, host, port):
    """The router of a pod. All listen on one port."""
    router = RunningRouter(
        "",
        name=name,
        host=host,
        http_port=port,
        use_kv_events=False,
        router_service="llm/routers",
        discovery_api_url=server.url,
        discovery_token_file="",
    )
    router.client = httpx.AsyncClient(base_url=f"http://{host}:{port}", verify=NO_TLS)
    async with router.running():
        assert (await router.post("/workers", WORKER)).status_code == 201
        yield router


async def peers_of(router):
    ready = (await router.client.get("/ready?verbose")).json()
    return {each["address"]: each["state"] for each in ready.get("peers", ())}, ready["degraded"]


async def test_routers_of_a_service_share_their_bookings():
    port = free_port()
    here, there = ("a", "127.0.0.1", False), ("b", "127.0.0.2", True)  # one is not ready yet
    with FakeApiServer() as server:
        server.denied.add(SLICES)
        server.put(endpoint_slice("routers-x", here, labels=ROUTERS))
        server.put(endpoint_slice("others-x", ("c", "127.0.0.3", True)))
        async with running(server, "a", here[1], port) as first:

            async def is_denied():
                return "of Service llm/routers may be others by now" in (await peers_of(first))[1]

            await eventually(is_denied)
            server.denied.clear()
            async with running(server, "b", there[1], port) as second:
                server.put(endpoint_slice("routers-x", here, there, labels=ROUTERS))

                async def are_connected():
                    expected = ({f"http://127.0.0.2:{port}": "connected"}, None)
                    return await peers_of(first) == expected

                await eventually(are_connected)
                assert list((await peers_of(second))[0]) == [f"http://127.0.0.1:{port}"]
                body = {"token_ids": list(range(40)), "request_id": "x"}
                assert (await second.post("/select_and_reserve", body)).is_success

                async def is_known():
                    return await first.metric("kv_router_replica_reservations") == 1

                await eventually(is_known)
            server.delete("routers-x", SLICES)

            async def is_alone():
                return await peers_of(first) == ({}, None)

            await eventually(is_alone)
