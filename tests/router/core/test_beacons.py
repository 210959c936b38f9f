"""Marks in time, sent and carried back."""

from random import Random

from router.core.fleet import REMEMBERED, Beacons
from router.protocol.loads import Beacon
from router.publisher.load_publisher import KEPT_S, MAX_SOURCES, ReceivedBeacons
from support.values.builders import report


def carrying(*beacons, **fields):
    received = ReceivedBeacons()
    for beacon in beacons:
        received.record(beacon, 0.0)
    return report(1, heard=received.last(0.0), **fields)


def test_a_report_is_no_older_than_the_beacon_it_carries():
    beacons = Beacons(Random(1))
    beacon = beacons.next(5.0)
    beacons.next(6.0)
    assert beacons.fresh_at_s(carrying(beacon)) == 5.0


def test_waiting_changes_make_a_report_older():
    beacons = Beacons(Random(1))
    assert beacons.fresh_at_s(carrying(beacons.next(5.0), waiting_s=1.5)) == 3.5


def test_beacons_of_others_and_of_earlier_lives_prove_nothing():
    beacons, other = Beacons(Random(1)), Beacons(Random(2))
    beacons.next(5.0)
    assert beacons.fresh_at_s(carrying(other.next(5.0))) is None
    assert beacons.fresh_at_s(carrying()) is None
    source_id = beacons.next(6.0).source_id
    assert beacons.fresh_at_s(carrying(Beacon(source_id, 12345))) is None


def test_only_the_latest_are_remembered():
    beacons = Beacons(Random(1))
    sent = [beacons.next(float(t)) for t in range(REMEMBERED + 1)]
    assert beacons.fresh_at_s(carrying(sent[0])) is None
    assert beacons.fresh_at_s(carrying(sent[1])) == 1.0


def test_agents_keep_the_last_of_each_source():
    received = ReceivedBeacons()
    for source_id, beacon_id in [(1, 10), (2, 20), (1, 11)]:
        received.record(Beacon(source_id, beacon_id), 0.0)
    assert received.last(1.0) == {1: 11, 2: 20}


def test_agents_forget_silent_and_excess_sources():
    received = ReceivedBeacons()
    received.record(Beacon(1, 10), 0.0)
    received.record(Beacon(2, 20), 3.0)
    assert received.last(KEPT_S + 1.0) == {2: 20}
    for source_id in range(100, 100 + MAX_SOURCES):
        received.record(Beacon(source_id, 1), 9.0)
    assert 2 not in received.last(9.0)
    assert len(received.last(9.0)) == MAX_SOURCES
