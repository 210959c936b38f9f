"""What the documentation takes from the source is as the source is now."""

import re
from pathlib import Path

import made
import pytest

from router.protocol.subjects import Subjects
from router.protocol.values import Rank

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("path", made.PATHS)
def test_generated_file_is_up_to_date(path):
    assert (ROOT / path).read_text() == made.as_made(path), "`make docs` writes it anew"


def subjects():
    """Every name on the bus, with words where it has parameters."""
    sample = Subjects("NAMESPACE")
    yield from (getattr(sample, name) for name in dir(Subjects) if is_property(name))
    rank, worker = Rank(71, 0), 72
    for method, argument in (
        *((name, rank) for name in ("events", "load", "checkpoint_wanted")),
        *((name, rank) for name in ("load_wanted", "events_wanted")),
        *((name, worker) for name in ("reservations", "to_replica", "ping", "tiers")),
        ("key", "{key}"),
    ):
        yield getattr(sample, method)(argument)


def is_property(name):
    return isinstance(getattr(Subjects, name), property)


def test_every_subject_is_in_the_threat_model():
    asked = {name for name in vars(Subjects) if not name.startswith("_")} - {"namespace"}
    assert len(asked) == len(list(subjects()))
    for subject in subjects():
        assert named(subject) in {named(each) for each in re.findall(r"`([^`\s]+)`", SECURITY)}


def named(subject):
    """With `*` for every parameter."""
    words = subject.replace("NAMESPACE", "{namespace}").replace("71.0", "*").replace("72", "*")
    bare = re.sub(r"\{(rank|worker|router|key)\}", "*", words)
    return bare.replace("*.*", "*")
