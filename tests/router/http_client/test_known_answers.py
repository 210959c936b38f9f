"""Heads that came before are not parsed again, and mean what they meant."""

import pytest

from router.http_client.known_answers import MOST_HEADS, Head, KnownAnswers

HEAD = Head(200, ((b"content-type", b"text/plain"),))


def answer(body=b"{}", length=None, name="content-length", more=""):
    length = len(body) if length is None else length
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n{name}: {length}\r\n{more}\r\n"
    return head.encode() + body


def knowing(*answers):
    known = KnownAnswers()
    for each in answers:
        known.remember(each, HEAD)
    return known


@pytest.mark.parametrize("name", ["content-length", "Content-Length"])
def test_another_body_of_any_length_is_found_under_the_same_head(name):
    known = knowing(answer(name=name))
    for body in (b"", b"{}", b"x" * 100_000, b"\r\n\r\n"):
        assert known.find(answer(body, name=name)) == (HEAD, body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        answer()[:-1],
        answer() + b"H",
        answer(length="+2"),
        answer(length=" 2"),
        answer(length="2 "),
        answer(length="²"),
        answer(length="0x2"),
        answer(b"ab", length="0000000002"),
        answer(name="Content-length"),
        answer(more="transfer-encoding: chunked\r\n"),
        answer(more="content-length: 2\r\n"),
        answer().replace(b"200", b"204"),
        answer().replace(b"1.1", b"1.0"),
        b"\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_what_is_not_the_same_but_for_its_length_is_not_known(data):
    known = knowing(answer())
    assert known.find(answer()) == (HEAD, b"{}")
    assert known.find(data) is None


@pytest.mark.parametrize(
    "data", [answer()[:-1], answer(more="x: " + "y" * 1024 + "\r\n"), b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_what_is_not_whole_or_too_long_is_not_remembered(data):
    assert knowing(data).find(data) is None


def test_no_more_are_kept_than_may_be():
    many = [answer(more=f"x: {number}\r\n") for number in range(MOST_HEADS + 1)]
    known = knowing(*many)
    assert (known.find(many[0]), known.find(many[-1])) == (None, (HEAD, b"{}"))
