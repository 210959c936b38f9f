"""What is read plainly is what is read the general way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import KvRouterError
from router.http.exchange import BINARY, JSON, Exchange, Head
from router.http.plain_selects import PlainSelects
from router.http.token_requests import TokenRequests
from router.plain import plain_request
from router.process.bodies import THREAD_BYTES
from router.protocol.requests import SelectRequest


def head(media_type=JSON, query=b""):
    pairs = [(b"content-type", media_type.encode())]
    return Head.of("POST", "/select", query, pairs)


async def never():
    raise AssertionError("the body is here")


class Reader:
    """Both ways, on one memory of words."""

    def __init__(self):
        self._requests = TokenRequests(SelectRequest)
        self._plain = PlainSelects(self._requests)

    def general(self, head, body):
        exchange = Exchange(head, "", body, never, unknown=[])
        return self._requests.read(exchange), exchange.unknown

    def plain(self, head, body):
        """What is asked, as a tuple, and the tokens."""
        found = self._plain.read(head, body)
        if found is None:
            return None
        asked = found[0]
        fields = (asked.scope, asked.seed, asked.expected_output_tokens, asked.request_id)
        return fields, found[1].tolist()

    def both(self, head, body):
        """The same words plainly, once they are known."""
        request, unknown = self.general(head, body)
        return request, unknown, self.plain(head, body)


def assert_same(request, plain):
    asked = plain_request(request)
    fields = (asked.scope, asked.seed, asked.expected_output_tokens, asked.request_id)
    assert plain == (fields, np.asarray(request.token_ids).tolist())


VALUES = [b"1", b"-1", b"1.5", b"007", b"null", b'"m"', b'"\xff"']
FIELDS = [b'"token_ids":[1,2,3]', b'"cache_salt":"s"', b'"nobody":1', b'"explain":true']
KEYS = [b'"token_ids":', b'"model_name":', b'"request_id":']
words = st.sampled_from([*(bytes([each]) for each in b'{}[],: "\\'), *VALUES, *FIELDS, *KEYS])


@given(st.lists(words, max_size=12), st.integers(0, 12))
def test_bodies_are_read_alike_or_not_plainly(pieces, place):
    body = b"{%b}" % b"".join([*pieces[:place], b'"token_ids":[15, 8,1024]', *pieces[place:]])
    reader = Reader()
    assert reader.plain(head(), body) is None  # nobody has said it before
    try:
        request, unknown, plain = reader.both(head(), body)
    except KvRouterError:
        assert reader.plain(head(), body) is None
        return
    if plain is not None:
        assert unknown == []
        assert_same(request, plain)


@pytest.mark.parametrize(
    ("media_type", "query", "body"),
    [
        (JSON, b"", b'{"token_ids":[1,2],"model_name":"m","cache_salt":"s"}'),
        (JSON, b"", b'{"request_id":"r","token_ids":[],"expected_output_tokens":9}'),
        (BINARY, b"model_name=m&expected_output_tokens=9", b"\1\0\0\0\2\0\0\0"),
        (BINARY, b"", b""),
    ],
)
def test_plain_words_are_known_the_second_time(media_type, query, body):
    request, _, plain = Reader().both(head(media_type, query), body)
    assert_same(request, plain)


@pytest.mark.parametrize(
    ("media_type", "query", "body"),
    [
        (JSON, b"", b'{"token_ids":[1],"nobody":1}'),
        (JSON, b"", b'{"token_ids":[1],"explain":true}'),
        (JSON, b"", b'{"sequence_hashes":[1],"isl_tokens":16}'),
        (JSON, b"answer=headers", b'{"token_ids":[1]}'),
        (JSON, b"", b'{"token_ids":[%b1]}' % (b"1," * (THREAD_BYTES // 2))),
        (BINARY, b"answer=headers&model_name=m", b"\1\0\0\0"),
        (BINARY, b"session_id=s", b"\1\0\0\0"),
    ],
)
def test_what_asks_for_more_is_never_plain(media_type, query, body):
    assert Reader().both(head(media_type, query), body)[2] is None


def test_words_of_one_form_are_not_known_in_the_other():
    reader, body = Reader(), b"\1\0\0\0"
    reader.general(head(BINARY, b"model_name=m"), body)
    assert reader.plain(head(JSON, b"model_name=m"), body) is None
    assert reader.plain(head("text/plain", b"model_name=m"), body) is None
