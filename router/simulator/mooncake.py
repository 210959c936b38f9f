"""Traces in the format of the Mooncake project: one JSON object a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, … 2353]}

`timestamp` is in ms from the start. There is one hash id for every block of the prompt, including
an incomplete last block, which cannot be shared. Equal ids name equal prefixes up to and including
that block.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct, json

from router.protocol.values import U64_MAX, UNREADABLE
from router.sequence.active.prompt import MAX_PROMPT_TOKENS
from router.sequence.hashing.block_hashes import chain
from router.simulator.traces import Trace, TraceError, TraceRequest

BLOCK_SIZE = 512
"""The block size of the traces that Mooncake published."""


class _Line(Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0, le=1e12)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    output_length: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]]


_decoder = json.Decoder(_Line)


def read_mooncake(name: str, lines: Iterable[bytes], block_size: int = BLOCK_SIZE) -> Trace:
    """Return the trace in these lines; empty lines are counted and skipped. O(bytes).

    Raises TraceError, which names the line, if the line is malformed, is earlier than the one above
    it, does not have one id for each block, or names a block after a different prefix than an
    earlier line.
    """
    parents: dict[int, int | None] = {}
    requests: list[TraceRequest] = []
    last_s = 0.0
    for number, raw in enumerate(lines, start=1):
        if raw.isspace():
            continue
        line = _decoded(number, raw)
        _check(number, line, last_s, parents, block_size)
        last_s = line.timestamp / 1e3
        requests.append(_request(line, block_size))
    if not requests:
        raise TraceError(1, "file", "no requests in it", "a JSON object a line")
    return Trace(name, block_size, requests)


def _decoded(number: int, raw: bytes) -> _Line:
    try:
        return _decoder.decode(raw)
    except UNREADABLE as error:
        allowed = "timestamp (ms), input_length, output_length (tokens, from 1), hash_ids"
        raise TraceError(number, "line", str(error), allowed) from error


def _check(
    number: int, line: _Line, last_s: float, parents: dict[int, int | None], block_size: int
) -> None:
    if line.timestamp / 1e3 < last_s:
        earlier = f"{line.timestamp:g}, before the line above"
        raise TraceError(number, "timestamp", earlier, f"from {last_s * 1e3:g}")
    blocks = -(-line.input_length // block_size)
    if len(line.hash_ids) != blocks:
        reason = f"{len(line.hash_ids)} ids for {line.input_length} tokens"
        raise TraceError(number, "hash_ids", reason, f"{blocks}: one for each {block_size} tokens")
    parent = None
    for hash_id in line.hash_ids:
        if parents.setdefault(hash_id, parent) != parent:
            reason = f"block {hash_id} after {parent}, and before after {parents[hash_id]}"
            raise TraceError(number, "hash_ids", reason, "equal ids only for equal prefixes")
        parent = hash_id


def _request(line: _Line, block_size: int) -> TraceRequest:
    full_blocks = line.input_length // block_size
    local = [hash_id * _ODD & U64_MAX for hash_id in line.hash_ids[:full_blocks]]
    hashes: list[int] = chain(local).tolist()
    return TraceRequest(line.timestamp / 1e3, line.input_length, line.output_length, hashes)


_ODD = 0x9E3779B97F4A7C15
"""A multiplier that maps each small id to a different 64-bit word, like a block hash."""
