import pytest

from router.message_lengths import body_behind, says

START, REST = b"POST / HTTP/1.1\r\ncontent-length: ", b"\r\n\r\n"


@pytest.mark.parametrize("body", [b"", b"{}", b"\r\n\r\n", b"x" * 100_000])
def test_a_body_is_found_behind_a_head_that_tells_its_length(body):
    assert body_behind(b"%b%d%b%b" % (START, len(body), REST, body), START, REST) == body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        START,
        START + b"2",
        START + b"2" + REST + b"{",
        START + b"2" + REST + b"{}G",
        START + b"2\r\nx: y" + REST + b"{}",
        START + b"0000000002" + REST + b"{}",
        b"GET" + START + b"2" + REST + b"{}",
    ],
)
def test_nothing_else_is_a_body(data):
    assert body_behind(data, START, REST) is None


@pytest.mark.parametrize("digits", [b"", b"+2", b" 2", b"2 ", b"0x2", b"2_", "²".encode()])
def test_only_digits_say_a_number(digits):
    assert says(b"2", 2)
    assert not says(digits, 2)
