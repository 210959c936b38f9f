"""The messages: do they come, under which topic, in order, in which form?"""

from collections.abc import Iterator

from router.tools.doctor.advice import events_flag, name_of
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong
from router.tools.doctor.messages import Sequences

_ARRAYS_SINCE = {6: "0.9", 7: "0.10", 8: "0.12", 9: "0.16"}
"""vLLM: elements of a stored event, and the version that made it so long."""

_LAST_ARRAYS, _FIRST_MAPS = "0.23", "0.24"


def stream_findings(seen: EngineSeen) -> Iterator[Finding]:
    """In the order in which a message is read."""
    yield _liveness(seen)
    if seen.live.losses:
        yield _losses(seen)
    yield from _frames(seen)
    yield from _topic(seen)
    if seen.live.sequences.count:
        yield order_finding("sequence", "while watching", seen.live.sequences)
    yield from _form(seen)
    yield from _ranks(seen)
    yield from _unknowns(seen)


def _liveness(seen: EngineSeen) -> Finding:
    live, config = seen.live, seen.config
    heard = f"{live.sequences.count} batches in {live.watched_s:.0f} s"
    if live.frame_counts:
        return ok("live events", heard)
    if not live.is_connected:
        why = "a subscription is refused, so nothing will ever arrive"
        fix = events_flag(seen.engine, config.zmq, config.replay)
        return wrong("live events", "a subscription gets no connection", why, fix)
    if _is_silent_although_probed(seen):
        return wrong(
            "live events",
            f"{heard}, although requests were served",
            "the router would take every cache to be empty",
            events_flag(seen.engine, config.zmq, config.replay)
            + "; is this the port of the rank that --url is served by?",
        )
    return unknown(
        "live events",
        f"{heard}; an engine only publishes in a scheduler step",
        "send it a request while this runs, or let --url … --probe do so",
    )


def _is_silent_although_probed(seen: EngineSeen) -> bool:
    requests = seen.probe.requests.values() if seen.probe else ()
    return any(request.problem is None for request in requests)


def _losses(seen: EngineSeen) -> Finding:
    return warning(
        "connection",
        f"lost {seen.live.losses} times while watching",
        "each time the router has to ask for a replay, or doubts what it holds",
        "see whether the engine restarts, and what lies between it and here",
    )


def _frames(seen: EngineSeen) -> Iterator[Finding]:
    counts, garbage = seen.live.frame_counts, seen.live.garbage
    odd = sorted(count for count in counts if count != 3)
    if odd or garbage:
        shape = f"messages of {odd[0]} frames" if odd else "a sequence that has not 8 bytes"
        yield wrong(
            "frames",
            f"{shape}, not [topic][sequence, 8 bytes][payload]",
            "such messages are passed over",
            "give the socket of the engine's own event publisher",
        )
    elif counts:
        yield ok("frames", "three: topic, sequence, payload")


def _topic(seen: EngineSeen) -> Iterator[Finding]:
    asked = seen.config.topic
    topics = sorted((seen.live.topics | (seen.replay.topics if seen.replay else {})).keys())
    shown = ", ".join(repr(topic) for topic in topics[:4])
    if not topics:
        if asked:
            yield unknown("topic", f"no message to compare {asked!r} with")
    elif all(topic.startswith(asked) for topic in topics):
        yield ok("topic", f"{shown}; what is asked for ({asked!r}) matches")
    else:
        yield wrong(
            "topic",
            f"published under {shown}; {asked!r} is no prefix of " +
            ("it" if len(topics) == 1 else "all of them"),
            "ZMQ drops what no prefix matches, silently",
            f"register with topic {topics[0]!r}, or with none, which matches everything",
        )  # fmt: skip


def order_finding(check: str, when: str, sequences: Sequences) -> Finding:
    """Do numbers follow one another?"""
    span = f"{sequences.first} to {sequences.last}"
    if sequences.returns:
        text = f"numbers went back {when} ({span})"
        why = "numbers begin at 0 with every start: the engine restarted, or two publish here"
        return warning(check, text, why, "see whether the engine restarts; one engine a port")
    if sequences.first_gap is not None:
        before, after = sequences.first_gap
        text = (
            f"{sequences.missing} batches missing {when}, the first after {before} (then {after})"
        )
        why = "what they said is lost, unless a replay fills it"
        return warning(check, text, why, 'raise "hwm" and "max_queue_size" in kv-events-config')
    return ok(check, f"contiguous {when}: {span}")


def _form(seen: EngineSeen) -> Iterator[Finding]:
    forms, engine = seen.forms, seen.engine
    if forms.maps and forms.arrays:
        why = "one engine sends one of them: two versions publish here"
        yield warning("wire version", "maps and arrays", why, "one engine a port")
    elif forms.maps:
        sender = {
            "sglang": "SGLang (late 2026 on)",
            "trtllm": "TensorRT-LLM, in vLLM's form",
        }.get(engine or "", f"vLLM {_FIRST_MAPS} or later, or TensorRT-LLM")
        yield ok("wire version", f"maps: {sender}")
    elif forms.longest_array:
        length = forms.longest_array
        since = _ARRAYS_SINCE.get(length, "0.17") if length >= 6 else "an unknown version"
        sender = f"vLLM {since} or later, at most {_LAST_ARRAYS}"
        if engine == "sglang":
            sender = "SGLang before its maps of late 2026"
        yield ok("wire version", f"arrays of {length} elements: {sender}")
    elif seen.contents.batches and not seen.contents.unreadable_batches:
        yield unknown("wire version", "no stored event yet", "send a request of several blocks")
    if seen.contents.unreadable_batches:
        yield wrong(
            "batches",
            f"{seen.contents.unreadable_batches} of {seen.contents.batches} are none: "
            + "; ".join(seen.contents.malformed[:1]),
            "nothing of such a batch can be used, and the rank is degraded",
            f"give the event socket of {name_of(engine)}; no other publisher may use this port",
        )


def _ranks(seen: EngineSeen) -> Iterator[Finding]:
    ranks = sorted(seen.contents.dp_ranks)
    if len(ranks) > 1:
        yield wrong(
            "rank",
            f"ranks {', '.join(map(str, ranks))} publish on this socket",
            "one rank is read from one socket; batches of others are dropped",
            "one port a rank: engines add the rank to the port by themselves",
        )
    elif ranks:
        yield ok("rank", f"dp_rank {ranks[0]}")
    elif seen.contents.batches and seen.forms.batches_without_rank:
        yield ok("rank", "batches name no rank: they count for the rank that is registered")


def _unknowns(seen: EngineSeen) -> Iterator[Finding]:
    contents, fields = seen.contents, seen.forms.unknown_fields
    if contents.unknown_types:
        names = ", ".join(sorted(contents.unknown_types))
        why = "they are passed over; if they say what is cached, that is missing"
        yield warning("event types", f"unknown: {names}", why, "look for a newer kv-router")
    if fields:
        text = f"unknown, and passed over: {', '.join(sorted(fields))}"
        why = "if they set blocks apart, equal tokens would be taken for equal blocks"
        yield warning("fields", text, why, "look for a newer kv-router")
    if contents.malformed_events:
        yield wrong(
            "events",
            f"{contents.malformed_events} cannot be read: {'; '.join(contents.malformed)}",
            "each is dropped, and the rank is degraded until its cache is cleared",
            f"report it, with the version of {name_of(seen.engine)}",
        )
