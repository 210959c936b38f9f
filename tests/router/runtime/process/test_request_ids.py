"""Ids of a request: taken over where they are fit, made where not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.runtime.process.request_ids import RequestIds, TraceParent, ids_of, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_example_of_the_standard():
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01") == TraceParent(TRACE, SPAN, "01")


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01 ",
        f"00-{TRACE}-{SPAN}-1",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN[:-1]}g-01",
        f"cc-{TRACE}-{SPAN}-01more",
    ],
)
def test_invalid_traceparent_is_ignored(header):
    assert parse_traceparent(header) is None
    ids = RequestIds(traceparent=header)
    assert (ids.span, ids.answered()) == (None, {})


def test_later_traceparent_version_may_have_more_fields():
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what") == TraceParent(TRACE, SPAN, "01")


@given(st.text(max_size=80))
def test_any_text_is_read(header):
    assert parse_traceparent(header) is None or header[3:35] in str(parse_traceparent(header))


def test_our_span_is_a_child_in_the_same_trace():
    ids = ids_of({"traceparent": f"00-{TRACE}-{SPAN}-01"})
    span = ids.span
    assert (span.trace_id, span.flags) == (TRACE, "01")
    assert span.span_id != SPAN
    assert ids.answered() == {"traceparent": str(span)}
    assert parse_traceparent(str(span)) == span
    assert ids.parent == TraceParent(TRACE, SPAN, "01")


def test_the_callers_id_is_kept_and_answered():
    ids = ids_of({"x-request-id": "r-1"})
    assert (ids.request_id, ids.answered()) == ("r-1", {"x-request-id": "r-1"})


@pytest.mark.parametrize("header", [None, "", "a b", "a\nb", "ü", "x" * 257])
def test_an_unfit_id_is_replaced_and_not_answered(header):
    ids = RequestIds(header)
    assert ids.request_id == ids.request_id != header
    assert len(ids.request_id) == 16
    assert ids.answered() == {}
