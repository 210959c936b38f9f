import json

import pytest

from router.simulator.mooncake import read_mooncake
from router.simulator.traces import TraceError, spread_arrivals


def line(timestamp=0, input_length=1100, output_length=5, hash_ids=(1, 2, 3), **others):
    fields = {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }
    return json.dumps(fields | others).encode() + b"\n"


def test_full_blocks_have_names_and_equal_prefixes_equal_ones():
    trace = read_mooncake("t", [line(), b"\n", line(1500, 1024, 7, [1, 4]), line(1500, 10, 1, [9])])
    first, second, third = trace.requests
    assert (first.arrival_s, second.arrival_s, third.arrival_s) == (0, 1.5, 1.5)
    assert (first.isl_tokens, first.osl_tokens, trace.block_size) == (1100, 5, 512)
    assert len(first.sequence_hashes) == len(second.sequence_hashes) == 2
    assert first.sequence_hashes[0] == second.sequence_hashes[0]
    assert first.sequence_hashes[1] != second.sequence_hashes[1]
    assert third.sequence_hashes == []


def test_other_block_sizes():
    trace = read_mooncake("t", [line(hash_ids=range(69))], 16)
    assert len(trace.requests[0].sequence_hashes) == 68


@pytest.mark.parametrize(
    ("lines", "number", "field", "said"),
    [
        ([], 1, "file", "no requests"),
        ([line(), b'{"timestamp": 1\n'], 2, "line", "truncated"),
        ([line(), line(input_length=0, hash_ids=[])], 2, "line", "$.input_length"),
        ([line(), line(output_length=0)], 2, "line", "$.output_length"),
        ([line(timestamp=-1)], 1, "line", "$.timestamp"),
        ([line(), line(hash_ids=[1, 2])], 2, "hash_ids", "2 ids for 1100 tokens"),
        ([line(5), line(6), line(3)], 3, "timestamp", "before the line above"),
        ([line(), line(hash_ids=[1, 3, 2])], 2, "hash_ids", "block 3 after 1, and before after 2"),
        ([line(hash_ids=[1, 1, 2])], 1, "hash_ids", "block 1 after 1"),
        ([b"\xff\xfe\n"], 1, "line", ""),
    ],
)
def test_malformed_line_is_named(lines, number, field, said):
    with pytest.raises(TraceError) as raised:
        read_mooncake("t", lines)
    assert (raised.value.line, raised.value.field) == (number, field)
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"line {number}: ")


def test_rounded_moments_can_be_spread():
    ids = iter(range(100))
    moments = [0, 0, 0, 3000, 3000, 6000, 6000]
    lines = [line(moment, 512, hash_ids=[next(ids)]) for moment in moments]
    trace = read_mooncake("t", lines)
    spread = spread_arrivals(trace)
    assert [r.arrival_s for r in spread.requests] == [0, 1, 2, 3, 4.5, 6, 6]
    assert [r.sequence_hashes for r in spread.requests] == [
        r.sequence_hashes for r in trace.requests
    ]
