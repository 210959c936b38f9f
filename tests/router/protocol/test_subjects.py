"""Names on the bus."""

import pytest

from router.errors import WireError
from router.protocol.subjects import Subjects, rank_of
from router.protocol.values import Rank

S = Subjects("prod")


def test_subjects_have_their_documented_form():
    rank = Rank(7, 1)
    assert S.events(rank) == "kv.prod.events.7.1"
    assert S.load(rank) == "kv.prod.load.7.1"
    assert S.checkpoint_wanted(rank) == "kv.prod.worker.7.1.checkpoint"
    assert S.ping(7) == "kv.prod.worker.7.ping"
    assert S.router == "kv.prod.router"
    assert (S.all_reservations, S.reservations(7)) == ("kv.prod.sequences.*", "kv.prod.sequences.7")
    assert S.to_replica(7) == "kv.prod.sequences.7.inbox"
    assert S.index_queries == "kv.prod.indexer.query"
    assert (S.event_stream, S.bucket) == ("kv-prod-events", "kv-prod-workers")
    assert (S.all_events, S.all_loads) == ("kv.prod.events.*.*", "kv.prod.load.*.*")


def test_subjects_name_their_rank():
    assert rank_of(S.events(Rank(2**64 - 1, 3))) == Rank(2**64 - 1, 3)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "1",
        "kv.prod.events",
        "kv.prod.events.a.0",
        "x.1.-2",
        "x.²",
        f"x.{2**64}.0",
        "x.1.65536",
        f"x.{'9' * 5000}.0",
    ],
)
def test_other_subjects_name_no_rank(subject):
    with pytest.raises(WireError):
        rank_of(subject)


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", "a*", ">", "x" * 65])
def test_a_namespace_is_one_token(namespace):
    with pytest.raises(ValueError, match="namespace"):
        Subjects(namespace)
