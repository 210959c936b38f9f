"""Names of blocks under a fleet's secret: SipHash-2-4, the same wherever they appear."""

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.values import SCHEME
from router.publisher.journal.held_blocks import path_heads
from router.runtime.kernels.hash_key import BlockKey, derive
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying

U64 = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1


def siphash_2_4(key, message):
    """The definition (Aumasson and Bernstein), for any message."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def rotated(value, bits):
        return ((value << bits) | (value >> (64 - bits))) & MASK

    def rounds(count):
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK
            v[1] = rotated(v[1], 13) ^ v[0]
            v[0] = rotated(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK
            v[3] = rotated(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK
            v[3] = rotated(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK
            v[1] = rotated(v[1], 17) ^ v[2]
            v[2] = rotated(v[2], 32)

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_the_definition_gives_the_published_vectors():
    """Of the reference implementation, key 00 … 0f: no message, one of 8 and one of 15 bytes."""
    key, message = bytes(range(16)), bytes(range(15))
    assert siphash_2_4(key, b"") == 0x726FDB47DD0E0E31
    assert siphash_2_4(key, message[:8]) == 0x93F5F5799A932462
    assert siphash_2_4(key, message) == 0xA129CA6149BE45E5


@given(U64, U64, st.lists(U64, max_size=70))
def test_names_are_siphash_of_hashes(low, high, hashes):
    naming, key = HashKeying(BlockKey(low, high, "")), struct.pack("<QQ", low, high)
    expected = [siphash_2_4(key, struct.pack("<Q", each)) for each in hashes]
    assert naming.names(np.array(hashes, np.uint64)).tolist() == expected
    assert [naming.name(each) for each in hashes] == expected
    assert list(naming.listed(hashes)) == expected


def test_heads_of_paths_keep_their_places_and_name_their_parents():
    naming = HashKeying(derive(b"a secret of the fleet"))
    heads = path_heads([2, 3], [7, None])
    named = naming.heads(heads).reshape(-1, 3)
    assert named[:, 0].tolist() == heads.reshape(-1, 3)[:, 0].tolist()
    assert named[:, 2].tolist() == heads.reshape(-1, 3)[:, 2].tolist()
    assert named[0, 1] == naming.name(7)


def test_without_a_key_nothing_is_copied():
    hashes = np.arange(5, dtype=np.uint64)
    assert PLAIN.names(hashes) is hashes
    assert PLAIN.heads(hashes) is hashes
    assert PLAIN.scheme == SCHEME


def test_scheme_distinguishes_secrets_without_showing_them():
    one, other = derive(b"a secret of the fleet"), derive(b"another of the fleet")
    assert HashKeying(one).scheme == HashKeying(derive(b"a secret of the fleet")).scheme
    assert HashKeying(one).scheme != HashKeying(other).scheme
    assert HashKeying(one).scheme.startswith(f"{SCHEME}+siphash-2-4:")
    assert f"{one.low:x}" not in repr(one) + HashKeying(one).scheme
    assert derive(b"a secret of the fleet", "loads") != one
