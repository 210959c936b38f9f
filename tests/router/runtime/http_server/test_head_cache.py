"""Heads of earlier requests are found by their bytes, and mean what they meant when parsed."""

from urllib.parse import unquote

import httptools
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
            head = heads.parsed(route, "POST", b"", pairs)
            heads.remember(each, head, "", values)
    return heads


def found_in(heads, data, recent=None):
    """The request id, the length and the body so far."""
    found = heads.find(data, {} if recent is None else recent)
    return found and (found[2], *found[4:])


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
    heads, recent = knowing(request()), {}
    assert heads.find(data, recent) is None
    assert heads.find(request(), recent) is not None
    assert heads.find(data, recent) is None  # nor where the head has just been found


def test_a_head_is_remembered_from_its_second_request_on():
    assert knowing(request(), times=1).find(request(), {}) is None


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
    heads, recent = knowing(identified("a")[0], headers=with_ids(b"a")), {}
    assert heads.find(whole, recent) is None
    assert heads.find(identified("b")[0], recent) is not None
    assert heads.find(whole, recent) is None
    assert knowing(whole, headers=with_ids(said.encode())).find(whole, {}) is None


def test_a_head_with_two_ids_is_not_remembered():
    twice, _ = identified("a", more="x-request-id: b\r\n")
    assert knowing(twice, headers=with_ids(b"a", b"b")).find(twice, {}) is None


def test_folded_id_header_is_not_cached():
    whole, _ = identified("a", more=" b\r\n")
    assert knowing(whole, headers=with_ids(b"a b")).find(whole, {}) is None
    assert knowing(whole, headers=with_ids(b"ab")).find(whole, {}) is None


def test_beyond_the_limit_all_are_dropped():
    heads = knowing(*(request(more=f"user-agent: {n}\r\n") for n in range(MOST_HEADS + 1)))
    assert heads.find(request(more="user-agent: 0\r\n"), {}) is None
    assert heads.find(request(more=f"user-agent: {MOST_HEADS}\r\n"), {}) is not None


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


# ── Against the parser ───────────────────────────────────────────────────────────────────────────

PROGRESS = HotRoute("/reservations/{request_id}/prefill_complete", lambda _: None)
FREE = HotRoute("/reservations/{request_id}", lambda _: None)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROUTES = {"/select": ROUTE, "/reservations/r1/prefill_complete": PROGRESS, "/reservations/r1": FREE}
HEADS = tuple(
    f"{method} {path} HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode()
    for method, path in zip(("POST", "POST", "DELETE"), ROUTES, strict=True)
    for lines in (
        "",
        "content-length: 2\r\n",
        "Content-Length: 0\r\nX-Request-ID: a\r\n",
        f"traceparent: {TRACE}\r\naccept: */*\r\n",
        f"x-request-id: a\r\ntraceparent: {TRACE}\r\ncontent-length: 2\r\n",
    )
)


class Parsed:
    """A head as the parser reads it. Raises httptools.HttpParserError."""

    def __init__(self, data):
        self.url, self.headers, self.body, self.is_whole = b"", [], b"", False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(data)

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_headers_complete(self):
        assert not self.is_whole  # one head
        self.is_whole = True
        self.method = self._parser.get_method().decode()

    def on_body(self, body):
        self.body += body

    def found(self):
        """The same as the cache finds, with the first words of the head in place of its value."""
        _, values = split(self.headers)
        path = unquote(self.url.decode("ascii"))
        step = "/prefill_complete" if path.endswith("/prefill_complete") else ""
        path_id = path.removeprefix("/reservations/").removesuffix(step)
        path_id = "" if path == "/select" else path_id
        request_id, trace = values.ids().given, values.ids().traceparent
        return path_id, request_id, trace, values.length_bytes, self.body


def knowing_all():
    """The cache after each of the heads was parsed twice."""
    heads = RequestHeads("/reservations/")
    for head in HEADS:
        parsed = Parsed(head)
        route = ROUTES[parsed.url.decode()]
        shared, values = split(parsed.headers)
        for _ in range(2):
            known = heads.parsed(route, parsed.method, b"", shared)
            heads.remember(head, known, route.id_in(parsed.url.decode()), values)
    return heads


def agree(heads, recent, data):
    """Whether the cache finds nothing, or what the parser reads."""
    found = heads.find(data, recent)
    if found is None:
        return True
    head, path_id, request_id, trace, length, body = found
    parsed = Parsed(data)
    ids = path_id.decode(), request_id.decode() or None, trace.decode() or None
    shared = [pair for pair in parsed.headers if pair in head.pairs]
    return (
        parsed.is_whole
        and (*ids, length, body) == parsed.found()
        and head.method == parsed.method
        and head.pairs == tuple(shared) == split(parsed.headers)[0]
    )


ID_BYTES = st.binary(min_size=1, max_size=300)
VALUES = st.one_of(ID_BYTES, st.from_regex(rb"[\x21-\x7e]{1,258}", fullmatch=True))
BITS = st.sampled_from(
    [b"\r\n", b"\r\n ", b" ", b"/", b"?", b"%2f", b"#", b"0", b":", b"\r\nexpect: 100-continue"]
)


@settings(max_examples=200)
@given(data=st.data())
def test_heads_with_any_values_mean_what_the_parser_reads(data):
    heads, recent = knowing_all(), {}
    for _ in range(3):
        said = data.draw(st.sampled_from(HEADS))
        said = said.replace(b"r1", data.draw(st.one_of(st.just(b"r2"), VALUES)))
        said = said.replace(b": a", b": " + data.draw(st.one_of(st.just(b"b"), VALUES)))
        said = said.replace(TRACE.encode(), data.draw(st.one_of(st.just(b"c"), VALUES)))
        body = data.draw(st.binary(max_size=5))
        said = said.replace(b": 2", b": %d" % data.draw(st.integers(0, 5))) + body
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(said)))
            said = said[:at] + data.draw(BITS) + said[at + data.draw(st.integers(0, 1)) :]
        assert agree(heads, recent, said)


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_other_ids_and_traces_are_found(head):
    heads, recent = knowing_all(), {}
    other = head.replace(b"r1", b"x-7:b").replace(b": a", b": bc").replace(b"-01", b"-00")
    for _ in range(2):
        assert heads.find(other, recent) is not None
        assert agree(heads, recent, other)


@pytest.mark.parametrize("path_id", ["a%20b", "a/b", "a?b", "a#b", "", "x" * 257, "ä", 'a"b'])
def test_ids_in_the_path_that_are_not_plain_are_parsed(path_id):
    heads, recent = knowing_all(), {}
    for head in HEADS[5:]:
        assert heads.find(head.replace(b"r1", path_id.encode("latin-1")), recent) is None


def test_heads_with_a_transfer_encoding_are_not_remembered():
    whole = request(name="transfer-encoding", length="chunked").replace(b"{}", b"0\r\n\r\n")
    headers = (*LINES, (b"transfer-encoding", b"chunked"))
    assert knowing(whole, headers=headers).find(whole, {}) is None
    assert knowing(whole[:-5], headers=headers).find(whole[:-5], {}) is None


def test_two_heads_that_begin_alike_are_both_tried_first():
    heads, recent = knowing_all(), {}
    progress = [head for head in HEADS if b"prefill" in head][:2]
    assert all(heads.find(head, recent) for head in progress)
    (tried,) = recent.values()
    assert all(heads.find(head, recent) for head in progress * 2)
    assert [*recent.values()] == [tried]
    assert len(tried) == 2
