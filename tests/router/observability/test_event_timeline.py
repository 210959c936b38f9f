from types import SimpleNamespace

from router.observability.event_timeline import AGAIN_S, FAULTS, OTHERS, EventTimeline


def timeline():
    clock = SimpleNamespace(at=1_000.0)
    return EventTimeline(lambda: clock.at), clock


def test_repeated_event_is_one_entry_with_a_count():
    events, clock = timeline()
    for _ in range(3):
        clock.at += 1.0
        events.note("resync", "warning", "1.0", "digest differs", 2)
    (entry,) = events.since(0)
    assert (entry.count, entry.at, entry.about) == (6, 1_003.0, "1.0")
    clock.at += AGAIN_S
    events.note("resync", "warning", "1.0", "digest differs")
    (again,) = events.since(0)
    assert (again.count, again.entry_id == entry.entry_id) == (1, False)


def test_since_returns_only_new_or_changed_events():
    events, _ = timeline()
    events.note("a", "note", "", "one")
    events.note("b", "fault", "7", "two")
    seen = max(each.revision for each in events.since(0))
    assert events.since(seen) == []
    events.note("a", "note", "", "one")
    assert [(each.kind, each.count) for each in events.since(seen)] == [("a", 2)]
    assert [each.kind for each in events.since(0)] == ["b", "a"]


def test_the_oldest_entries_leave_and_others_displace_no_faults():
    events, _ = timeline()
    for number in range(FAULTS + 10):
        events.note("k", "fault", number, "t")
    for number in range(OTHERS + 20):
        events.note("k", "good", number, "t")
    assert len(events) == FAULTS + OTHERS
    left = events.since(0)
    assert next(each.about for each in left if each.severity == "fault") == "10"
    assert next(each.about for each in left if each.severity == "good") == "20"
