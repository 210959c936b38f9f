"""The token parser against msgspec, on bodies made to be odd.

    PYTHONPATH=.:tests python tests/support/chaos/token_fuzz.py [--inputs 10000000] [--seed 0]

With `atheris` (3.0.0) installed, `--atheris` has libFuzzer choose the inputs, from the same seeds,
guided by the coverage of the Python around the parser and by how the kernel answers; without, they
are mutations of real bodies. What follows `--atheris` is libFuzzer's: `-runs=10000000`.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from router.api.rpc.codecs import JSON
from router.api.token_requests import TokenRequests
from router.errors import KvRouterError
from router.protocol.commands import Command
from router.protocol.requests import SelectRequest
from router.runtime.kernels._json_tokens import find_tokens
from router.runtime.process.json_bodies import JsonReader, KnownFields, decode_now
from router.runtime.process.msgpack_bodies import PackedFields

MANY = [token * 7919 % 10 ** (token % 9 + 1) for token in range(60)]
"""Enough tokens to be read 64 bytes at a time."""

PIECES = [
    b'"token_ids"',
    b'"token_ids":',
    b'"token_ids":[1,2,3]',
    b'"token_ids":[',
    b'"token_\\u0069ds":[1]',
    b'"model_name":"m"',
    b'"request_id":"r1"',
    b'"request_id":"',
    b'"x":{"request_id":"r2"}',
    b'"request_id":"~request id~"',
    b'"cache_salt":"',
    b'"x":{"token_ids":[7]}',
    b'"x":[[],{}]',
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b'"',
    b"\\",
    b'\\"',
    b" ",
    b"\n",
    b"\t",
    b"\r",
    b"0",
    b"00",
    b"-",
    b"1.0",
    b"1e3",
    b"4294967295",
    b"4294967296",
    b"12345678",
    b"123456789",
    b"99999999999999999999",
    b"null",
    b"true",
    b"false",
    b"NaN",
    b"Infinity",
    b"\xff",
    b"\xc3\xa9",
    b"\x00",
    b"\x7f",
    b"/",
    b";",
    b"\xef\xbb\xbf",
]

SEEDS = [
    b'{"token_ids":[1,22,333,4444,55555,666666,7777777,88888888,999999999,4294967295],"model_name":"m"}',
    b'{ "model_name" : "m" , "token_ids" : [ 1 , 2 ,\n3 ] , "explain" : true }',
    b'{"x":{"token_ids":[7],"y":"]}"},"token_ids":[0,10,100],"cache_salt":"a\\"b\\\\"}',
    b'{"token_ids":[1,2],"request_id":"0f-1.a:b_c","model_name":"m"}',
    b'{"token_ids":[],"allowed_worker_ids":[1,2],"pinned_worker":{"worker_id":1}}',
    b'{"token_ids":%b,"model_name":"m"}' % json.dumps(MANY).encode(),
    b'{"token_ids":%b,"explain":true}' % json.dumps(MANY, separators=(",", ":")).encode(),
]


def agree(decoder, body, body_type=SelectRequest):
    """Whether a body is decoded to the same request, or refused with the same words."""
    strict = JsonReader(body_type).read_now
    return outcome(decoder.decode, body) == outcome(strict, body)


def strictly(codec):
    """A decoder of the commands of the bus without kernels and known names."""
    if codec is JSON:
        return JsonReader(Command).read_now
    decode, known = msgspec.msgpack.Decoder(Command).decode, PackedFields(Command)

    def read(body, unknown):
        command = decode_now(decode, body, "valid application/msgpack")
        unknown += decode_now(known.unknown, body, "valid application/msgpack")
        return command

    return read


def mutated(rng, noise=b""):
    """A body, changed in a few places."""
    body = bytearray(rng.choice(SEEDS))
    if noise:
        at = rng.randrange(len(body))
        body[at : at + rng.choice((0, 1, len(noise)))] = noise
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(body) + 1)
        how = rng.randrange(5)
        if how == 0:
            body[at : at + rng.choice((0, 0, 1, 8))] = rng.choice(PIECES)
        elif how == 1 and at < len(body):
            body[at] = rng.randrange(256)
        elif how == 2:
            del body[at : at + rng.randrange(1, 6)]
        elif how == 3:
            other = rng.choice(SEEDS)
            start = rng.randrange(len(other))
            body[at:at] = other[start : start + rng.randrange(1, 30)]
        else:
            del body[at:]
        if not body:
            return b""
    return bytes(body)


def outcome(decode, body):
    """What a body is decoded to, or the words with which it is refused."""
    try:
        request = decode(body, unknown := [])
    except KvRouterError as error:
        return error.body(), error.http_status
    tokens = getattr(request, "token_ids", None)
    if tokens is None:
        return request, None, unknown
    return msgspec.structs.replace(request, token_ids=None), list(map(int, tokens)), unknown


def _mutate_many(inputs, seed):
    decoder, rng, start_s = TokenRequests(SelectRequest), random.Random(seed), time.monotonic()
    strict = JsonReader(SelectRequest).read_now
    accepted = 0
    for _ in range(inputs):
        body = mutated(rng)
        ours = outcome(decoder.decode, body)
        if ours != outcome(strict, body):
            sys.exit(f"they differ: {body!r}")
        accepted += isinstance(ours[0], SelectRequest)
    elapsed_s = time.monotonic() - start_s
    print(f"{inputs:,} inputs, {accepted:,} of them accepted, in {elapsed_s:.0f} s: all alike")


def _guided(arguments):
    import atheris

    seen = ((TokenRequests, "decode"), (JsonReader, "read_now"), (KnownFields, "unknown"))
    for kind, name in seen:
        setattr(kind, name, atheris.instrument_func(getattr(kind, name)))
    decoder, look = TokenRequests(SelectRequest), atheris.instrument_func(_look)

    def one(body):
        look(body)
        if not agree(decoder, body):
            raise AssertionError(f"they differ: {body!r}")

    def mutate(body, max_size, seed):
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return atheris.Mutate(body, max_size)
        return mutated(rng, body if rng.random() < 0.5 else b"")[:max_size]

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *arguments, corpus], one, custom_mutator=mutate)
        atheris.Fuzz()


def _look(body):
    """A branch for each answer of the kernel, which has none that libFuzzer sees."""
    room = np.empty(len(body) // 2 + 1, np.uint32)
    count, *_ = find_tokens(np.frombuffer(body, np.uint8), room)
    for known in range(-2, 16):
        if count == known:
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's own arguments")
    chosen = parser.parse_args()
    if chosen.atheris is None:
        _mutate_many(chosen.inputs, chosen.seed)
    else:
        _guided(chosen.atheris)
