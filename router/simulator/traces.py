"""What is asked of a fleet, and when."""

from collections.abc import Sequence

from msgspec import Struct


class TraceRequest(Struct, frozen=True, gc=False):
    """One request: `sequence_hashes` name the full blocks of its prompt."""

    arrival_s: float
    isl_tokens: int
    osl_tokens: int
    sequence_hashes: list[int]


class Trace(Struct, frozen=True):
    """Requests in order of arrival, all in blocks of one size."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
