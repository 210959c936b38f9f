"""How long the body of an HTTP message is, for those who know its head by heart but for the number.

[start]content-length: 212[rest][the body]
"""

HEAD_END = b"\r\n\r\n"
LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")

_MOST_DIGITS = 9


def body_behind(data: bytes, start: bytes, rest: bytes) -> bytes | None:
    """The body, if these bytes are `start`, a length, `rest`, and a body that is so long."""
    if not data.startswith(start):
        return None
    at = len(start)
    stop = data.find(b"\r", at, at + _MOST_DIGITS + 1)
    body = stop + len(rest)
    if stop < 0 or not data.startswith(rest, stop) or data[at:stop] != b"%d" % (len(data) - body):
        return None
    return data[body:]


def says(digits: bytes, number: int) -> bool:
    """Whether these are digits, and this number."""
    return digits.isdigit() and len(digits) <= _MOST_DIGITS and int(digits) == number
