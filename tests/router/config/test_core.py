"""Policies that real, if small, packages install."""

import sys
from random import Random

import pytest

from router.config.core import installed_policies
from router.errors import ConfigError
from router.scheduler.settings import PolicySettings
from support.values.terms import candidate, table

MODULE = """
import numpy as np
from router.scheduler.selector import Policy

class First(Policy):
    name = "first"

    def score(self, table, settings):
        return np.arange(len(table), dtype=np.float64)

def last():
    class Last(First):
        name = "last"

        def pick(self, costs, table, settings, rng):
            return len(costs) - 1

    return Last()

class NotOne:
    pass
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with these entry points."""
    module = f"fast_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def install(*entry_points):
        info = tmp_path / "fast-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fast\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{made}" for name, made in entry_points]
        (info / "entry_points.txt").write_text("\n".join(["[kv_router.policies]", *lines]))

    yield install
    sys.modules.pop(module, None)


def test_without_entry_points_there_are_no_policies():
    assert installed_policies() == []


def test_classes_and_functions_make_policies(install):
    install(("z", "First"), ("a", "last"))
    policies = installed_policies()
    assert [policy.name for policy in policies] == ["last", "first"]
    three = table(candidate(), candidate(), candidate())
    chosen = [policy.choose(three, PolicySettings(), Random(0)).index for policy in policies]
    assert chosen == [2, 0]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("Missing", "cannot be made: AttributeError"),
        ("NotOne", "makes a NotOne"),
        ("MODULE.x", "cannot be made: AttributeError"),
    ],
)
def test_bad_policy_is_refused_with_its_entry_point(install, made, reason):
    install(("broken", made))
    with pytest.raises(ConfigError) as refused:
        installed_policies()
    assert refused.value.key.startswith("entry point broken (fast_")
    assert refused.value.key.endswith("of kv_router.policies")
    assert reason in refused.value.reason


def test_a_package_that_is_gone_is_named(install, tmp_path):
    install(("broken", "First"))
    next(tmp_path.glob("fast_*.py")).unlink()
    with pytest.raises(ConfigError, match="cannot be made: ModuleNotFoundError"):
        installed_policies()
