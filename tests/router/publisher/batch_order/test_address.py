"""Endpoints of engines, as operators write them."""

import pytest

from router.errors import InvalidFieldError
from router.publisher.batch_order.address import EngineAddress, engine_address, rank_endpoint


@pytest.mark.parametrize(
    ("endpoint", "dp_rank", "expected"),
    [
        ("tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557"),
        ("tcp://engine-0.pool:5557", 3, "tcp://engine-0.pool:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///tmp/engine", 0, "ipc:///tmp/engine"),
    ],
)
def test_a_rank_is_added_to_the_port(endpoint, dp_rank, expected):
    assert rank_endpoint(endpoint, dp_rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "dp_rank"),
    [
        ("", 0),
        ("tcp://*:5557", 0),
        ("tcp://host", 0),
        ("tcp://host:0", 0),
        ("tcp://host:65535", 1),
        ("tcp://host:70000", 0),
        ("tcp://a:1,b:2", 0),
        ("http://host:5557", 0),
        ("inproc://x", 0),
        ("ipc://", 0),
        ("ipc:///tmp/engine", 1),
    ],
)
def test_unconnectable_address_is_refused(endpoint, dp_rank):
    with pytest.raises(InvalidFieldError) as refused:
        rank_endpoint(endpoint, dp_rank, "replay_endpoint")
    assert refused.value.field == "replay_endpoint"
    assert refused.value.http_status == 422


def test_an_address_is_of_one_rank():
    address = engine_address("tcp://h:5557", "tcp://h:5657", "kv@", 2)
    assert address == EngineAddress("tcp://h:5559", "tcp://h:5659", "kv@")
    assert engine_address("tcp://h:5557", None).replay is None
