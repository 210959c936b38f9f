"""Real Dynamo fleets; `make test-dynamo` runs the tests here."""

import os

import pytest

from support.fleets.dynamo_processes import DynamoFleet


@pytest.fixture
def fleet(nats_server, tmp_path, request):
    """Makes a fleet of a version."""
    made = []

    def make(version):
        python = os.environ.get(f"DYNAMO_PYTHON_{version.replace('.', '_')}")
        if python is None:
            pytest.fail(f"no Python that has Dynamo {version}; `make test-dynamo` names it")
        made.append(DynamoFleet(python, nats_server.url, tmp_path))
        return made[-1]

    yield make
    report = getattr(request.node, "report", None)
    for each in made if report is not None and report.failed else ():
        for name, log in each.logs().items():
            report.sections.append((name, log))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.when == "call":
        item.report = report
    return report
