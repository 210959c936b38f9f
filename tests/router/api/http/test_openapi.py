"""What `/docs` says is true: schemathesis asks what it allows, and what it does not."""

import asyncio
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI

from router.api.http.index_api import INDEX_ROUTES
from router.api.http.openapi import EXAMPLES, document, extra
from router.api.http.openapi_texts import WORDS, structs_in
from router.api.http.routes import ROUTES, ErrorResponse
from router.protocol.batches import ReservationStep
from support.fleets.direct import DirectRouter

ROUNDS = int(os.environ.get("KV_FUZZ_EXAMPLES", 3))
COMMAND = (
    "run",
    f"--max-examples={ROUNDS}",
    "--seed=1",
    "--phases=examples,fuzzing",
    "--checks=all",
    # A schema takes 1.0 for an integer, and does not say that hashes must fit a length.
    "--exclude-checks=positive_data_acceptance",
    "--generation-database=none",
    "--no-color",
)
# Enough requests delete the only worker. A route may then answer 503 if its documentation says so,
# which another check holds; any other server error is a fault.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "503"]
"""


@pytest.mark.timeout(3600 if ROUNDS > 100 else 300)
async def test_schemathesis_finds_nothing(tmp_path):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    async with DirectRouter(use_kv_events=False).running() as router:
        worker = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}
        assert (await router.post("/workers", worker)).status_code == 201
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "schemathesis"),
            *COMMAND,
            f"{router.client.base_url}/openapi.json",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        report, _ = await process.communicate()
        assert process.returncode == 0, report.decode()
        assert "passed" in report.decode()
        assert (await router.post("/select", {"token_ids": [1]})).status_code in (200, 503)


@pytest.fixture(params=["router", "index"])
def described(request):
    """The routes of a process, and what its page says."""
    routes = ROUTES if request.param == "router" else INDEX_ROUTES
    app = FastAPI()
    document(app, routes)
    return routes, app.openapi()["components"]["schemas"]


def test_every_field_has_a_description(described):
    _, schemas = described
    silent = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, said in schema.get("properties", {}).items()
        if not said.get("description")
    ]
    assert silent == []


def test_documented_words_are_existing_fields():
    named = [t for route in (*ROUTES, *INDEX_ROUTES) for t in (route.body, route.answer)]
    fields = {
        field
        for struct in structs_in([*filter(None, named), ReservationStep, ErrorResponse]).values()
        for field in struct.__struct_fields__
    }
    assert set(WORDS) <= fields
    assert list(WORDS) == sorted(WORDS)


def test_examples_are_bodies(described):
    for route in described[0]:
        if route.body is not None:
            body = msgspec.json.encode(EXAMPLES[route.handler])
            assert msgspec.json.decode(body, type=route.body)
            assert "example" in str(extra(route)["requestBody"])


async def test_docs_page_names_every_route_and_loads_nothing():
    async with DirectRouter().running() as router:
        answer = await router.client.get("/docs")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        page = answer.text
        for route in ROUTES:
            assert f"<h2>{route.method} {route.path}</h2>" in page
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert re.findall(r"<script|<link|<img|<iframe|src=|@import|url[(]", page) == []
        assert re.findall(r'href="([^"]*)"', page) == ["openapi.json"]
