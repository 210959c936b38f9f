"""The batches: in which version's form, of which rank, and what of them nobody here can read."""

from collections.abc import Iterator

from router.publisher.metrics_dialects import EngineKind
from router.tools.doctor.advice import name_of
from router.tools.doctor.engine_seen import EngineSeen
from router.tools.doctor.findings import Finding, ok, unknown, warning, wrong

_ARRAYS_SINCE = {6: "0.9", 7: "0.10", 8: "0.12", 9: "0.16"}
"""vLLM: elements of a stored event, and the version that made it so long."""

_LONGER_SINCE, _LAST_ARRAYS, _FIRST_MAPS = "0.17", "0.23", "0.24"


def form_findings(seen: EngineSeen) -> Iterator[Finding]:
    """In the order in which a batch is read."""
    yield from _version(seen)
    yield from _ranks(seen)
    yield from _unknowns(seen)
    yield from _unreadable(seen)


def _version(seen: EngineSeen) -> Iterator[Finding]:
    forms, check = seen.forms, "wire version"
    if forms.maps and forms.arrays:
        why = "one engine sends one of them: two versions publish here"
        yield warning(check, "maps and arrays", why, "one engine a port")
    elif forms.maps:
        yield ok(check, f"maps: {_sender_of_maps(seen.engine)}")
    elif forms.longest_array:
        sender = _sender_of_arrays(seen.engine, forms.longest_array)
        yield ok(check, f"arrays of {forms.longest_array} elements: {sender}")
    elif seen.contents.batches > seen.contents.unreadable_batches:
        yield unknown(check, "no stored event yet", "send a request of several blocks")


def _sender_of_maps(engine: EngineKind | None) -> str:
    if engine == "sglang":
        return "SGLang (late 2026 on)"
    if engine == "trtllm":
        return "TensorRT-LLM, in vLLM's form"
    return f"vLLM {_FIRST_MAPS} or later, or TensorRT-LLM"


def _sender_of_arrays(engine: EngineKind | None, elements: int) -> str:
    if engine == "sglang":
        return "SGLang before its maps of late 2026"
    if elements < min(_ARRAYS_SINCE):
        return "nobody that is known"
    return f"vLLM {_ARRAYS_SINCE.get(elements, _LONGER_SINCE)} or later, at most {_LAST_ARRAYS}"


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


def _unreadable(seen: EngineSeen) -> Iterator[Finding]:
    contents, name = seen.contents, name_of(seen.engine)
    first = "; ".join(contents.malformed)
    if contents.unreadable_batches:
        yield wrong(
            "batches",
            f"{contents.unreadable_batches} of {contents.batches} are none: {first}",
            "nothing of such a batch can be used, and the rank is degraded",
            f"give the event socket of {name}; no other publisher may use this port",
        )
    if contents.malformed_events:
        yield wrong(
            "events",
            f"{contents.malformed_events} cannot be read: {first}",
            "each is dropped, and the rank is degraded until its cache is cleared",
            f"report it, with the version of {name}",
        )
