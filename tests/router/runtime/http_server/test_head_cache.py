"""Heads of earlier requests are found by their bytes, and mean what they meant when parsed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.runtime.http_server.exchange import MOST_HEADS, HotRoute, RequestHeads, split

ROUTE = HotRoute("/select", lambda _: None)
LINES = ((b"host", b"x"), (b"content-type", b"application/json"))


def request(body=b"{}", length=None, name="content-length", more=""):
    length = len(body) if length is None else length
    return f"POST /select HTTP/1.1\r\nhost: x\r\n{name}: {length}\r\n{more}\r\n".encode() + body


def knowing(*requests, headers=LINES, times=2, route=ROUTE):
    """The cache, after each of these requests was parsed with these headers."""
    heads = RequestHeads()
    shared, values = split(headers)
    for number, each in enumerate(requests):
        pairs = (*shared, (b"n", b"%d" % number))
        for _ in range(times):
            head = heads.parsed(route, "POST", "/select", b"", pairs)
            heads.remember(each, head, values)
    return heads


def found_in(heads, data):
    """The id, the length and the body so far."""
    found = heads.find(data)
    return found and found[1:]


@pytest.mark.parametrize("name", ["content-length", "Content-Length"])
def test_another_body_of_any_length_is_found_under_the_same_head(name):
    heads = knowing(request(name=name))
    for body in (b"", b"{}", b"x" * 100_000):
        assert found_in(heads, request(body, name=name)) == (b"", len(body), body)


def test_a_head_is_found_before_its_body_has_come():
    heads = knowing(request(b"", length=2))
    assert found_in(heads, request(b"", length=700)) == (b"", 700, b"")
    assert found_in(heads, request(b"a", length=700)) == (b"", 700, b"a")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        request(b"")[:-1],
        request() + b"G",
        request(length="+2"),
        request(length=" 2"),
        request(length="2 "),
        request(length="²"),
        request(length="0x2"),
        request(length="1_0"),
        request(length=""),
        request(b"ab", length="0000000002"),
        request(name="Content-length"),
        request(more="transfer-encoding: chunked\r\n"),
        request(more="content-length: 2\r\n"),
        request(more="x-request-id: a\r\n"),
        request().replace(b"/select", b"/other"),
        request().replace(b"1.1", b"1.0"),
        b"\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_head_that_differs_beyond_its_length_is_not_found(data):
    heads = knowing(request())
    assert heads.find(data) is None
    assert heads.find(request()) is not None
    assert heads.find(data) is None  # nor where the head has just been found


def test_a_head_is_remembered_from_its_second_request_on():
    assert knowing(request(), times=1).find(request()) is None


def test_a_trace_is_not_remembered():
    headers = (*LINES, (b"traceparent", b"a"))
    assert knowing(request(), headers=headers).find(request()) is None


def test_a_path_of_one_request_is_not_remembered():
    route = HotRoute("/reservations/{request_id}", lambda _: None, "r")
    assert knowing(request(), route=route).find(request()) is None


def identified(said, body=b"{}", more=""):
    return request(body, more=f"x-request-id: {said}\r\n{more}"), body


def with_ids(*ids):
    return (*LINES, *((b"x-request-id", said) for said in ids))


@pytest.mark.parametrize("is_first", [False, True])
def test_another_id_is_found_under_the_same_head(is_first):
    def asked(said, body):
        lines = [f"x-request-id: {said}\r\n", f"content-length: {len(body)}\r\n"]
        lines = lines if is_first else lines[::-1]
        return f"POST /select HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body

    heads = knowing(asked("first", b"{}"), headers=with_ids(b"first"))
    for said in ("second", "!", "x" * 256):
        for body in (b"", b"x" * 100_000):
            assert found_in(heads, asked(said, body)) == (said.encode(), len(body), body)


@pytest.mark.parametrize("said", ["", " a", "a ", "a b", "a\tb", "ä", "x" * 257, "a\r\n b"])
def test_an_id_that_is_not_fit_is_not_known(said):
    whole, _ = identified(said)
    heads = knowing(identified("a")[0], headers=with_ids(b"a"))
    assert heads.find(whole) is None
    assert heads.find(identified("b")[0]) is not None
    assert heads.find(whole) is None
    assert knowing(whole, headers=with_ids(said.encode())).find(whole) is None


def test_a_head_with_two_ids_is_not_remembered():
    twice, _ = identified("a", more="x-request-id: b\r\n")
    assert knowing(twice, headers=with_ids(b"a", b"b")).find(twice) is None


def test_folded_id_header_is_not_cached():
    whole, _ = identified("a", more=" b\r\n")
    assert knowing(whole, headers=with_ids(b"a b")).find(whole) is None
    assert knowing(whole, headers=with_ids(b"ab")).find(whole) is None


def test_beyond_the_limit_all_are_dropped():
    heads = knowing(*(request(more=f"user-agent: {n}\r\n") for n in range(MOST_HEADS + 1)))
    assert heads.find(request(more="user-agent: 0\r\n")) is None
    assert heads.find(request(more=f"user-agent: {MOST_HEADS}\r\n")) is not None


@settings(max_examples=200)
@given(data=st.data())
def test_a_cut_or_altered_request_is_known_only_where_its_bytes_are(data):
    """Whatever is found is a known head with another number in it, and at most such a body."""
    whole = bytearray(request(b"abcdefghij"))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    found = found_in(knowing(request()), bytes(whole))
    if found is not None:
        _, length, body = found
        assert bytes(whole) == request(body, length=length)
