"""The recipes for HAProxy and nginx, with real ones before real engines."""

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from support.fleets.systems import TEXTS, check_cached
from support.processes.servers import eventually, free_port

pytestmark = pytest.mark.systems

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRARIES = "usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"
TEMPORARY = "".join(
    f"    {kind}_temp_path {kind};\n"
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
)
BODY = {"model": "default", "max_tokens": 4}
STORY = "Once upon a time. " * 4


def unpacked():
    """The folder of Debian's packages."""
    root = os.environ.get("SYSTEMS_ROOT")
    if root is None:
        pytest.fail(
            "SYSTEMS_ROOT names no folder with HAProxy and nginx; `make test-integrations` does"
        )
    return Path(root)


def recipe(name, directory, replaced):
    """A copy of a recipe, with other addresses."""
    copy = directory / name
    shutil.copytree(EXAMPLES / name, copy)
    for file in copy.iterdir():
        text = file.read_text()
        for old, new in replaced.items():
            text = text.replace(old, new)
        file.write_text(text)
    return copy


def haproxy(directory, port, router, engine):
    copy = recipe("haproxy", directory, {"127.0.0.1:8080": f"127.0.0.1:{port}"})
    settings = {"KV_ROUTER_URL": f"http://{router}", "KV_TOKENIZER_URL": f"http://{engine}"}
    return [unpacked() / "usr/sbin/haproxy", "-f", "haproxy.cfg"], copy, settings


def nginx(directory, port, router, engine):
    modules, lua = unpacked() / "usr/lib/nginx/modules", unpacked() / "usr/share/lua/5.1"
    replaced = {
        "127.0.0.1:8080": f"127.0.0.1:{port}",
        "127.0.0.1:8092": router,
        "127.0.0.1:8000": engine,
        '"127.0.0.1", 8092': '"127.0.0.1", ' + router.partition(":")[2],
        "    access_log off;": f"    access_log off;\n{TEMPORARY}",  # by default in folders of root
        "load_module modules": f"load_module {modules}",
        "$prefix?.lua;;": f"$prefix?.lua;{lua}/?.lua;;",
    }
    copy = recipe("nginx", directory, replaced)
    options = ["-p", f"{copy}/", "-c", "nginx.conf", "-g", "daemon off;", "-e", "stderr"]
    return [unpacked() / "usr/sbin/nginx", *options], copy, {}


@asynccontextmanager
async def running(of, fleet, directory):
    """A proxy before a fleet; yields a client of it."""
    port = free_port()
    router, engine = urlsplit(fleet.url).netloc, urlsplit(fleet.endpoints[1]).netloc
    command, folder, settings = of(directory, port, router, engine)
    folders = [unpacked() / each for each in LIBRARIES]
    libraries = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    with (directory / "proxy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdout=log, stderr=log, env=os.environ | libraries | settings
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await eventually(lambda: _answers(client) if process.returncode is None else True)
            assert process.returncode is None, (directory / "proxy.log").read_text()
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(client):
    try:
        return await client.get("/nothing")
    except httpx.HTTPError:
        return None


@pytest.fixture(params=[haproxy, nginx], ids=lambda of: of.__name__)
async def proxy(request, fleet, tmp_path):
    async with running(request.param, fleet, tmp_path) as client:
        yield client


async def test_request_reaches_the_worker_that_the_router_names(fleet, proxy):
    for worker_id, text in TEXTS.items():
        for prompt in (text, list(text.encode())):
            named = await fleet.select(list(text.encode()))
            answer = await proxy.post("/v1/completions", json={**BODY, "prompt": prompt})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-worker-id"] == str(named["worker_id"]) == str(worker_id)
            check_cached(answer.json()["usage"], text)
    await fleet.until_load(0, 0)


async def test_stream_reports_its_first_token_and_its_end(fleet, proxy):
    body = {**BODY, "messages": [{"role": "user", "content": STORY}], "stream": True}
    async with proxy.stream("POST", "/v1/chat/completions", json=body) as answer:
        text = "".join([piece async for piece in answer.aiter_text()])
    assert text.rstrip().endswith("[DONE]")
    await fleet.until_load(0, 0)
    async with proxy.stream(
        "POST", "/v1/chat/completions", json={**body, "max_tokens": 1024}
    ) as answer:
        pieces = answer.aiter_bytes()  # kept, since a dropped iterator closes the connection
        await anext(pieces)
        await fleet.until_load(1, 0)
    await fleet.until_load(0, 0)  # also of a client that leaves


async def test_without_a_schedulable_worker_the_response_is_503(fleet, proxy):
    for worker_id in TEXTS:
        body = {"lifecycle": "cordoned"}
        await fleet.client.patch(f"{fleet.url}/workers/{worker_id}", json=body)
    answer = await proxy.post("/v1/completions", json={**BODY, "prompt": STORY})
    assert (answer.status_code, "error" in answer.json()) == (503, True)
