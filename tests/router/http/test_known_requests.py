"""Heads that came before are not parsed again, and mean what they meant."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.exchange import Head
from router.http.hot import HotRoute
from router.http.known_requests import MOST_HEADS, KnownRequests

ROUTE = HotRoute("/select", lambda _: None)
HEAD = Head.of("POST", "/select", b"", [(b"content-type", b"application/json")])
SINGLE = Head.of("POST", "/select", b"", [(b"x-dynamo-session-id", b"a")])


def request(body=b"{}", length=None, name="content-length", more=""):
    length = len(body) if length is None else length
    return f"POST /select HTTP/1.1\r\nhost: x\r\n{name}: {length}\r\n{more}\r\n".encode() + body


def knowing(*requests, head=HEAD):
    heads = KnownRequests()
    for each in requests:
        heads.remember(each, ROUTE, head)
    return heads


@pytest.mark.parametrize("name", ["content-length", "Content-Length"])
def test_another_body_of_any_length_is_found_under_the_same_head(name):
    heads = knowing(request(name=name))
    for body in (b"", b"{}", b"x" * 100_000):
        assert heads.find(request(body, name=name)) == (ROUTE, HEAD, body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        request()[:-1],
        request() + b"G",
        request(length="+2"),
        request(length=" 2"),
        request(length="2 "),
        request(length="²"),
        request(length="0x2"),
        request(length="1_0"),
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
def test_what_is_not_the_same_but_for_its_length_is_not_known(data):
    heads = knowing(request())
    assert heads.find(data) is None
    assert heads.find(request()) is not None
    assert heads.find(data) is None  # nor where the head has just been found


def test_what_speaks_of_a_single_request_is_not_remembered():
    assert knowing(request(), head=SINGLE).find(request()) is None


def identified(said, body=b"{}", more=""):
    return request(body, more=f"x-request-id: {said}\r\n{more}"), body


def head_of(said, *more):
    return Head.of("POST", "/select", b"", [(b"host", b"x"), (b"x-request-id", said), *more])


@pytest.mark.parametrize("is_first", [False, True])
def test_another_id_is_found_under_the_same_head(is_first):
    def asked(said, body):
        lines = [f"x-request-id: {said}\r\n", f"content-length: {len(body)}\r\n"]
        lines = lines if is_first else lines[::-1]
        return f"POST /select HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body

    heads = knowing(asked("first", b"{}"), head=head_of(b"first"))
    for said in ("second", "!", "x" * 256):
        for body in (b"", b"x" * 100_000):
            found = heads.find(asked(said, body))
            assert found == (ROUTE, head_of(said.encode()), body)
            assert found[1].plain_id == said


@pytest.mark.parametrize("said", ["", " a", "a ", "a b", "a\tb", "ä", "x" * 257, "a\r\n b"])
def test_an_id_that_is_not_fit_is_not_known(said):
    whole, _ = identified(said)
    heads = knowing(identified("a")[0], head=head_of(b"a"))
    assert heads.find(whole) is None
    assert heads.find(identified("b")[0]) is not None
    assert heads.find(whole) is None
    assert knowing(whole, head=head_of(said.encode())).find(whole) is None


def test_who_says_two_ids_is_not_remembered():
    twice, _ = identified("a", more="x-request-id: b\r\n")
    assert knowing(twice, head=head_of(b"a", (b"x-request-id", b"b"))).find(twice) is None


def test_an_id_that_goes_on_in_the_next_line_is_not_remembered():
    whole, _ = identified("a", more=" b\r\n")
    assert knowing(whole, head=head_of(b"a b")).find(whole) is None
    assert knowing(whole, head=head_of(b"ab")).find(whole) is None


def test_of_too_many_all_are_forgotten():
    heads = knowing(*(request(more=f"user-agent: {n}\r\n") for n in range(MOST_HEADS + 1)))
    assert heads.find(request(more="user-agent: 0\r\n")) is None
    assert heads.find(request(more=f"user-agent: {MOST_HEADS}\r\n")) is not None


@settings(max_examples=200)
@given(data=st.data())
def test_a_cut_or_altered_request_is_known_only_where_its_bytes_are(data):
    """Whatever is found is a known head with another number in it, and a body of that length."""
    whole = bytearray(request(b"abcdefghij"))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    found = knowing(request()).find(bytes(whole))
    if found is not None:
        assert bytes(whole) == request(found[2])


async def test_requests_under_ids_are_booked_and_answered_under_them(router):
    await router.worker(1)
    for said in ("a", "b", "c", "a"):
        answer = await router.client.post(
            "/select_and_reserve", json={"token_ids": [1]}, headers={"x-request-id": said}
        )
        assert answer.headers["x-request-id"] == said
        if answer.status_code == 200:
            assert answer.json()["request_id"] == said
    assert answer.json()["code"] == "duplicate_reservation"


async def test_requests_in_the_same_words_get_answers_of_their_own(router):
    await router.worker(1)
    answers = [
        (await router.post("/select", json.loads(body))).json()
        for body in (b'{"token_ids":[1]}', b'{"token_ids":[1,2,3]}', b'{"token_ids":[1]}')
    ]
    assert [each["isl_tokens"] for each in answers] == [1, 3, 1]
