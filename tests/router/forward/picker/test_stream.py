"""The state of a stream: tables of GIE's and llm-d's own picker tests, and bodies cut at random."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forward.errors import GatewayModeError
from router.forward.picker.answers import CHUNK_BYTES, Refusal, Route, body_chunks
from router.forward.picker.stream import GatewayResponse, PickerStream, StreamLimits
from router.forward.picker.wire.kv_router_picker_pb2 import ProcessingRequest, ProcessingResponse
from router.runtime.http_server.limits import HeadersTooLargeError, HttpLimits
from router.runtime.process.errors import BodyTooLargeError, MalformedBodyError
from support.fleets.gateways import (
    DESTINATION,
    answer_body,
    answer_head,
    body,
    chunks,
    head,
    headers,
    kinds,
    metadata,
    refusal,
    removed_headers,
    set_headers,
    trailers,
)

LIMITS = StreamLimits(1_000_000, HttpLimits(max_connections=1, max_headers=40))
ROUTE = Route("10.0.0.1:8080", booking="abc")
AT = {DESTINATION: "10.0.0.1:8080"}


def fed(*messages, limits=LIMITS):
    """A stream after these messages, and its answers so far."""
    stream, answers = PickerStream(limits), []
    for each in messages:
        answers += stream.receive(each.SerializeToString())
    return stream, read(answers)


def read(answers):
    return [ProcessingResponse.FromString(each) for each in answers]


def test_headers_wait_for_the_body_and_both_are_answered_in_order():
    stream, answers = fed(head())
    assert (answers, stream.is_complete, stream.is_waiting) == ([], False, True)
    assert (stream.head.method, stream.head.path) == ("POST", "/v1/completions")
    assert stream.receive(body(b'{"a": 1}').SerializeToString()) == []
    assert (stream.is_complete, stream.body) == (True, b'{"a": 1}')
    first, second = read(stream.route(ROUTE))
    assert (kinds([first, second]), set_headers(first)) == (["request_headers", "request_body"], AT)
    assert metadata(first) == {**AT, "x-kv-router-booking": "abc"}
    assert first.request_headers.response.clear_route_cache
    assert chunks([second]) == [(b'{"a": 1}', True)]
    assert not set_headers(second)


def test_request_without_body_gets_one_answer():
    stream, _ = fed(head("/v1/models", "GET", eos=True))
    (answer,) = read(stream.route(ROUTE))
    assert (kinds([answer]), set_headers(answer)) == (["request_headers"], AT)


@given(st.lists(st.binary(max_size=200), max_size=6), st.booleans())
def test_body_cut_anywhere_is_complete_at_its_end_alone(parts, has_trailers):
    stream, answers = fed(head(), *(body(each, eos=False) for each in parts))
    assert (answers, stream.is_complete) == ([], False)
    assert stream.held_bytes == sum(map(len, parts))
    stream.receive((trailers() if has_trailers else body()).SerializeToString())
    assert stream.body == b"".join(parts)
    sent = read(stream.route(ROUTE))
    found = chunks(sent)
    assert b"".join(data for data, _ in found) == b"".join(parts)
    assert [eos for _, eos in found].count(True) == (not has_trailers)
    assert kinds(sent)[0] == "request_headers"
    assert ("request_trailers" in kinds(sent)) == has_trailers
    assert kinds(sent)[-1] == ("request_trailers" if has_trailers else "request_body")
    assert stream.held_bytes == 0


@pytest.mark.parametrize(
    ("size_bytes", "count"),
    [(0, 1), (61_000, 1), (62_000, 1), (62_001, 2), (63_000, 2), (125_000, 3)],
)
@pytest.mark.parametrize("of_response", [False, True])
def test_chunks_are_bounded_and_the_last_alone_ends_the_body(size_bytes, count, of_response):
    field = "response_body" if of_response else "request_body"
    found = chunks(read(body_chunks(bytes(size_bytes), of_response=of_response)), field)
    assert [eos for _, eos in found] == [False] * (count - 1) + [True]
    assert sum(len(data) for data, _ in found) == size_bytes
    assert max(len(data) for data, _ in found) <= CHUNK_BYTES


def test_second_end_of_a_body_is_ignored():
    """Envoy 1.35 to 1.37 repeats it behind long bodies (envoy#46237)."""
    stream, answers = fed(head(), body(b"{}"), body())
    assert (answers, stream.body) == ([], b"{}")
    stream.route(ROUTE)
    assert stream.receive(body().SerializeToString()) == []


@pytest.mark.parametrize(
    ("given", "length_bytes"), [("12", 12), ("", 0), ("-1", 0), ("1e3", 0), ("9" * 19, 0)]
)
def test_announced_length_of_a_body_is_read(given, length_bytes):
    stream, _ = fed(head(content_length=given))
    assert stream.head.length_bytes == length_bytes


def test_other_body_replaces_the_clients():
    stream, _ = fed(head(), body(b"{}"))
    sent = read(stream.route(Route("10.0.0.1:80", body=b'{"model":"m"}')))
    assert chunks(sent) == [(b'{"model":"m"}', True)]


def test_upgrade_does_not_wait_for_a_body_that_never_comes():
    stream, _ = fed(head(method="GET", upgrade="websocket"))
    assert stream.is_complete


def test_buffered_headers_are_answered_at_once_and_the_body_is_routed():
    stream, answers = fed(head(mode=2))
    assert (kinds(answers), set_headers(answers[0])) == (["request_headers"], {})
    assert stream.receive(body(b"{}").SerializeToString()) == []
    (answer,) = read(stream.route(ROUTE))
    assert (kinds([answer]), set_headers(answer)) == (["request_body"], AT)
    assert metadata(answer)[DESTINATION] == "10.0.0.1:8080"
    assert not answer.request_body.response.HasField("body_mutation")


def test_buffered_body_is_replaced_whole():
    stream, _ = fed(head(mode=2), body(b"{}"))
    (answer,) = read(stream.route(Route("10.0.0.1:80", body=b"[]")))
    assert answer.request_body.response.body_mutation.body == b"[]"


@pytest.mark.parametrize("mode", [0, 1, 3, 5])
def test_mode_without_whole_bodies_is_refused(mode):
    with pytest.raises(GatewayModeError, match="FULL_DUPLEX_STREAMED"):
        fed(head(mode=mode))


def test_gateway_that_names_no_mode_is_taken_as_full_duplex():
    message = head()
    message.ClearField("protocol_config")
    stream, _ = fed(message, body(b"{}"))
    assert kinds(read(stream.route(ROUTE))) == ["request_headers", "request_body"]


@pytest.mark.parametrize(
    ("raw", "text", "expected"), [(b"raw", "text", b"raw"), (b"", "text", b"text"), (b"", "", b"")]
)
def test_header_value_is_the_raw_one_first(raw, text, expected):
    message = head()
    message.request_headers.headers.headers.add(key="X-Some", raw_value=raw, value=text)
    stream, _ = fed(message, body())
    assert (b"x-some", expected) in stream.head.headers


def test_duplicate_headers_are_kept_in_order():
    message = ProcessingRequest(
        request_headers=headers(
            [(":method", "POST"), (":path", "/"), ("cookie", "a"), ("x", "1"), ("cookie", "b")],
            eos=True,
        )
    )
    stream, _ = fed(message)
    assert stream.head.headers == ((b"cookie", b"a"), (b"x", b"1"), (b"cookie", b"b"))
    (answer,) = read(stream.route(ROUTE))
    assert (set_headers(answer).keys(), removed_headers(answer)) == ({DESTINATION}, set())


def test_steering_headers_are_removed_and_those_set_here_are_not():
    stream, _ = fed(head(), body())
    removed = (DESTINATION, "x-data-parallel-rank", "x-slo-ttft-ms")
    route = Route("10.0.0.1:80", [("x-data-parallel-rank", b"3")], removed)
    first = read(stream.route(route))[0]
    assert removed_headers(first) == {"x-slo-ttft-ms"}
    assert set_headers(first) == {DESTINATION: "10.0.0.1:80", "x-data-parallel-rank": "3"}


@pytest.mark.parametrize(
    ("status", "sent"), [(503, 503), (429, 429), (400, 400), (412, 412), (529, 429), (599, 500)]
)
def test_refusal_has_a_status_that_gateways_send(status, sent):
    stream, _ = fed(head(), body())
    refused = Refusal(status, b'{"error": {"code": "c"}}', "c", [(b"retry-after", b"1")])
    (answer,) = read(stream.refuse(refused))
    assert refusal([answer]) == (sent, {"code": "c"})
    assert answer.immediate_response.details == "kv_router_c"
    given = {
        e.header.key: e.header.raw_value for e in answer.immediate_response.headers.set_headers
    }
    assert given == {"content-type": b"application/json", "retry-after": b"1"}
    assert stream.receive(body().SerializeToString()) == []


def test_answers_begin_is_noted_and_nothing_of_it_is_changed():
    stream, _ = fed(head(), body())
    stream.route(ROUTE)
    answers = read(stream.receive(answer_head(200, "10.0.0.2:80").SerializeToString()))
    assert answers == [ProcessingResponse.FromString(b"\x12\x00")]
    assert stream.response == GatewayResponse(200, "10.0.0.2:80")


def test_address_of_the_upstream_stands_in_for_the_served_endpoint():
    message = answer_head(502)
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.3:80"})
    stream, _ = fed(message)
    assert stream.response == GatewayResponse(502, "10.0.0.3:80")


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_answers_body_is_echoed_chunk_by_chunk(parts):
    stream, _ = fed(head(answers=4), body())
    stream.route(ROUTE)
    stream.receive(answer_head().SerializeToString())
    events = [answer_body(each) for each in parts] + [answer_body(eos=True)]
    answers = [a for each in events for a in read(stream.receive(each.SerializeToString()))]
    assert chunks(answers, "response_body") == [(e, False) for e in parts] + [(b"", True)]


def test_trailers_of_an_answer_are_answered():
    stream, _ = fed(head(answers=4), body())
    stream.route(ROUTE)
    message = ProcessingRequest(response_trailers={})
    assert kinds(read(stream.receive(message.SerializeToString()))) == ["response_trailers"]


def test_limits_refuse_long_heads_and_bodies():
    with pytest.raises(HeadersTooLargeError):
        fed(head(**{f"x-{number}": "v" for number in range(60)}))
    with pytest.raises(HeadersTooLargeError):
        fed(head(long="v" * 100_000))
    with pytest.raises(BodyTooLargeError):
        fed(head(), body(bytes(600_000), eos=False), body(bytes(600_000)))


def test_unreadable_message_is_refused():
    with pytest.raises(MalformedBodyError, match="ext_proc"):
        PickerStream(LIMITS).receive(b"\xff\xff\xff")


@given(st.binary(max_size=60))
def test_any_bytes_are_answered_or_refused(data):
    stream = PickerStream(LIMITS)
    try:
        stream.receive(data)
    except (MalformedBodyError, GatewayModeError, BodyTooLargeError):
        return
    assert stream.held_bytes <= len(data)


@given(st.permutations([head(), body(b"{}"), trailers(), answer_head(), answer_body(b"x")]))
def test_messages_in_any_order_break_nothing(messages):
    stream, routed = PickerStream(LIMITS), False
    for each in messages:
        with suppress(MalformedBodyError):  # of what comes before the headers
            stream.receive(each.SerializeToString())
        if stream.is_complete and not routed:
            stream.route(ROUTE)
            routed = True
