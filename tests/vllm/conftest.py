"""Two real engines for the tests of each file here; `make test-vllm` runs them."""

import os

import pytest

from support.engines.tiny_llama import write_tiny_llama
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
