"""Mutations of valid inputs: of their bytes, and of the values in JSON and msgpack."""

import struct
from random import Random

import msgspec
from msgspec import Raw

MAX_BYTES = 1 << 16

_NUMBERS = (
    0, 1, 2, 3, 7, 8, 15, 16, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -128, -(2**31), -(2**63),
)  # fmt: skip
_VALUES = (
    *_NUMBERS, None, True, False, 0.0, -0.5, 0.5, 1e308, -1e308, 5e-324, "", "a", "x" * 300, "\0",
    "é", "\ud7ff", "\U0001f600", "9" * 5000, "null", "default", [], {}, [[]], [{}], {"a": {}},
    {"type": "x"}, [0, 0], ["a"], [None],
)  # fmt: skip
_JSON_VALUES = tuple(
    Raw(raw)
    for raw in (
        b"18446744073709551616", b"-9223372036854775809", b"1e400", b"-0", b"1.0", b"NaN",
        b'"\xff"',
        b'"\\ud800"', b"9" * 5000, b"-" + b"9" * 5000, b'{"a":1,"a":2}', b"[" * 300 + b"]" * 300,
        b"[" * 5000 + b"]" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b" ", b"",
    )
)  # fmt: skip
_MSGPACK_VALUES = (
    b"", b"1", b"1234567", bytes(8), bytes(16), bytes(32), b"\xff" * 8, b"\xff" * 24,
    *(
        Raw(raw)
        for raw in (
            b"\xc1", b"\xa1\xff", b"\xd4\x01\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\x05",
            b"\x91" * 300 + b"\xc0", b"\x91" * 5000 + b"\xc0", b"\x81\xa1a" * 3000 + b"\xc0",
            b"\x81\x80\x01", b"\x81\x90\x01", b"\x82\xa1a\x01\xa1a\x02", b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
            b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
            b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", b"",
        )
    ),
)  # fmt: skip
_PIECES = (
    b"\0", b"\xff", b"\r\n", b"\n", b"\n\n", b"\r\n\r\n", b'"', b"\\", b"{", b"}", b"[", b"]", b",",
    b":", b" ", b"null", b"true", b"-", b"0", b"00", b"1.0", b"1e999", b"9" * 400, b"9" * 5000,
    b"\\u0000", b"\\ud800", b"\xc3", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x90", b"\xc0", b"\xc1",
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdb\xff\xff\xff\xff", b"#", b"=",
)  # fmt: skip


class Mutator:
    """A source of inputs, the same ones for the same seed."""

    __slots__ = ("_encode", "_odd", "_rng", "_seeds", "_trees")

    def __init__(self, seeds: list[bytes], form: str, rng: Random) -> None:
        self._rng = rng
        self._seeds = seeds or [b""]
        self._trees = []
        codec = {"json": msgspec.json, "msgpack": msgspec.msgpack}.get(form)
        if codec is not None:
            self._encode = codec.Encoder().encode
            self._odd = (*_VALUES, *(_JSON_VALUES if form == "json" else _MSGPACK_VALUES))
            self._trees = _decoded(self._seeds, codec.decode)

    def restart(self, rng: Random) -> None:
        """Continue with other random numbers."""
        self._rng = rng

    def next(self) -> bytes:
        """Return an input."""
        rng = self._rng
        if self._trees and rng.random() < 0.6:
            data = self._of_tree(rng.choice(self._trees))
            return self.changed(data) if rng.random() < 0.2 else data
        return self.changed(rng.choice(self._seeds))

    def changed(self, data: bytes) -> bytes:
        """Return these bytes, changed in a few places."""
        rng, changed = self._rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            _change_bytes(changed, rng, self._seeds)
        return bytes(changed[:MAX_BYTES])

    def _of_tree(self, tree: object) -> bytes:
        rng = self._rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            tree = self._changed_tree(tree)
        try:
            return self._encode(tree)[:MAX_BYTES]
        except (TypeError, OverflowError, UnicodeError):
            return rng.choice(self._seeds)

    def _changed_tree(self, tree: object) -> object:
        rng = self._rng
        if isinstance(tree, dict) and tree and rng.random() < 0.9:
            return self._changed_dict(tree)
        if isinstance(tree, list) and tree and rng.random() < 0.9:
            return self._changed_list(tree)
        if isinstance(tree, int) and rng.random() < 0.3:
            return tree + rng.choice((-1, 1))
        if isinstance(tree, bytes) and rng.random() < 0.7:
            changed = bytearray(tree)
            _change_bytes(changed, rng, self._seeds)
            return bytes(changed)
        return rng.choice(self._odd)

    def _changed_dict(self, tree: dict) -> dict:
        rng, changed = self._rng, dict(tree)
        key, how = rng.choice(list(tree)), rng.random()
        if how < 0.7:
            changed[key] = self._changed_tree(tree[key])
        elif how < 0.8:
            del changed[key]
        elif how < 0.9:
            changed[rng.choice(("x", "", "type", key[:-1] if isinstance(key, str) else "y"))] = (
                rng.choice(self._odd)
            )
        else:
            changed[key] = changed[rng.choice(list(tree))]
        return changed

    def _changed_list(self, tree: list) -> list:
        rng, changed = self._rng, list(tree)
        at, how = rng.randrange(len(tree)), rng.random()
        if how < 0.7:
            changed[at] = self._changed_tree(tree[at])
        elif how < 0.78:
            del changed[at]
        elif how < 0.86:
            changed.insert(at, rng.choice(self._odd))
        elif how < 0.94:
            changed[at:at] = [tree[at]] * rng.choice((1, 2, 70))
        else:
            other = rng.randrange(len(tree))
            changed[at], changed[other] = changed[other], changed[at]
        return changed


def _decoded(seeds: list[bytes], decode) -> list[object]:
    trees = []
    for seed in seeds:
        try:
            trees.append(decode(seed))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return trees


def _change_bytes(data: bytearray, rng: Random, seeds: list[bytes]) -> None:
    rng.choice(_CHANGES)(data, rng.randrange(len(data) + 1), rng, seeds)


def _flip_bit(data, at, rng, _):
    if at < len(data):
        data[at] ^= 1 << rng.randrange(8)


def _set_byte(data, at, rng, _):
    data[at : at + 1] = rng.randbytes(1)


def _delete(data, at, rng, _):
    del data[at : at + rng.choice((1, 1, 2, 4, 8, 30))]


def _cut_off(data, at, rng, _):
    del data[at:]


def _insert_piece(data, at, rng, _):
    data[at:at] = rng.choice(_PIECES)


def _insert_noise(data, at, rng, _):
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 16)))


def _repeat(data, at, rng, _):
    part = bytes(data[at : at + rng.choice((1, 4, 8, 30, 200))])
    data[at:at] = part * rng.choice((1, 1, 2, 20))


def _nest(data, at, rng, _):
    data[at:at] = rng.choice(_NESTING) * rng.choice((2, 60, 1500))


def _set_number(data, at, rng, _):
    width, order = rng.choice("BHIQ"), rng.choice("<>")
    most = 2 ** (8 * struct.calcsize(width)) - 1
    packed = struct.pack(order + width, rng.choice(_NUMBERS) & most)
    data[at : at + len(packed)] = packed


def _splice(data, at, rng, seeds):
    other = rng.choice(seeds)
    start = rng.randrange(len(other) + 1)
    end = start + rng.choice((1, 8, 40, 400))
    data[at : at + rng.choice((0, 0, end - start))] = other[start:end]


_NESTING = (b"\x91", b"[", b'{"a":', b"\x81\xa1a", b"0", b"a", b"\n")
_CHANGES = (
    _flip_bit, _set_byte, _delete, _cut_off, _insert_piece, _insert_noise, _repeat, _nest,
    _set_number, _splice,
)  # fmt: skip
