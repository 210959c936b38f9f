"""What pages of other sites, open in a browser, can make a server do: nothing."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from router.forward.apis.passed import PASSED
from router.runtime.security.errors import CrossSiteError
from router.runtime.security.guarded import refuse_other_sites
from router.runtime.security.route_scopes import ROUTE_SCOPES
from support.fleets.agents import RunningAgent
from support.fleets.direct import DirectRouter
from support.fleets.forwarding import Scene
from support.values.indexing import RunningIndex

CHANGING = [
    (method, path.replace("{request_id}", "x").replace("{worker_id}", "1"))
    for method, path in (route.split(" ", 1) for route in ROUTE_SCOPES)
    if method not in ("GET", "NATS")
]
"""Every route of any server that may change something: a test checks that the table is whole."""

FORMS = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)


@asynccontextmanager
async def client_of(server, url):
    if server == "forwarder":
        async with Scene.of(url, {}) as scene:
            yield scene.forward.client
        return
    made = {"router": DirectRouter, "indexer": RunningIndex, "agent": RunningAgent}[server]
    async with made("" if server == "router" else url).running() as running:
        yield running.client


async def expect_refusals(client, server, method, path):
    takes_forms = path in PASSED and PASSED[path].is_form and server == "forwarder"
    for kind in FORMS[:-1] if takes_forms else FORMS:
        said = {"content-type": kind}
        answer = await client.request(method, path, content=b"{}", headers=said)
        assert answer.status_code == 415, (method, path, kind)
    for said in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ):
        answer = await client.request(method, path, headers=said)
        assert (answer.status_code, "cross_site" in answer.text) == (403, True), path


@pytest.mark.parametrize("server", ["router", "indexer", "agent", "forwarder"])
async def test_a_page_of_another_site_changes_nothing(nats_server, server):
    async with client_of(server, nats_server.url) as client:
        await asyncio.gather(*(expect_refusals(client, server, *route) for route in CHANGING))
        assert (await client.get("/health", headers={"sec-fetch-site": "cross-site"})).is_success


async def test_a_request_without_a_body_needs_no_content_type(nats_server):
    async with RunningAgent(nats_server.url).running() as agent:
        own = {"origin": str(agent.client.base_url).rstrip("/")}
        for said in ({}, own, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
            answer = await agent.client.post("/reset_prefix_cache", headers=said)
            assert answer.status_code == 200, said
        untyped = await agent.client.post("/reset_prefix_cache", content=b"{}")
        assert untyped.status_code == 415


def test_a_caller_with_a_bearer_token_may_serve_any_page():
    page = [(b"host", b"router"), (b"origin", b"http://ui.example")]
    refuse_other_sites([*page, (b"authorization", b"Bearer x")])
    for added in ([], [(b"authorization", b"Basic eDp5")]):
        with pytest.raises(CrossSiteError, match=r"origin: 'http://ui.example' is a page"):
            refuse_other_sites([*page, *added])
