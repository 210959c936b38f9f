"""Which engines' sockets may be read."""

import pytest

from router.discovery.registration import check_endpoints
from router.errors import InvalidFieldError
from router.protocol.workers import WorkerRegistration


async def check(endpoint, **fields):
    registration = WorkerRegistration(worker_id=1, kv_events_endpoints={0: endpoint}, **fields)
    await check_endpoints(registration, allow_public=False)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5557", "tcp://10.1.2.3:5557", "tcp://192.168.0.7:1", "tcp://100.64.0.1:1",
        "tcp://[::1]:5557", "tcp://[fd00::7]:5557", "tcp://[fe80::1%eth0]:5557",
        "tcp://localhost:5557", "tcp://nobody.invalid:5557", "ipc:///tmp/engine", "",
    ],
)  # fmt: skip
async def test_private_and_unknown_addresses_are_accepted(endpoint):
    await check(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://8.8.8.8:5557", "is public"),
        ("tcp://[2001:4860:4860::8888]:5557", "is public"),
        ("tcp://0.0.0.0:5557", "an address to listen on"),
        ("tcp://[::]:5557", "an address to listen on"),
        ("tcp://*:5557", "is no endpoint"),
        ("tcp://10.0.0.1", "is no endpoint"),
        ("tcp://10.0.0.1:0", "port 0"),
        ("udp://10.0.0.1:1", "is no endpoint"),
        ("inproc://engine", "is no endpoint"),
    ],
)
async def test_public_addresses_are_refused_with_the_reason(endpoint, reason):
    with pytest.raises(InvalidFieldError) as refused:
        await check(endpoint)
    assert refused.value.field == "kv_events_endpoints.0"
    assert reason in refused.value.reason
    assert refused.value.allowed


async def check_blocks_at(address):
    await check("tcp://10.0.0.1:1", block_addresses={2: [address]})


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:7700", "unix:///run/kv/a", "vllm-p2p://10.0.0.1:5710"]
)
async def test_places_that_give_blocks_are_accepted(address):
    await check_blocks_at(address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("vllm-p2p://8.8.8.8:5710", "blocks are its prompts"),
        ("vllm-p2p://0.0.0.0:5710", "an address to listen on"),
        ("tcp://8.8.8.8:7700", "is public"),
        ("vllm-p2p://10.0.0.1", "is no address"),
        ("vllm-p2p://[::1]:5710", "is no address"),
        ("10.0.0.1:5710", "is no address"),
    ],
)
async def test_places_that_give_no_blocks_are_refused_with_the_reason(address, reason):
    with pytest.raises(InvalidFieldError) as refused:
        await check_blocks_at(address)
    assert refused.value.field == "block_addresses.2"
    assert reason in refused.value.reason


@pytest.mark.parametrize("field", ["replay_endpoints", "load_endpoints"])
async def test_every_socket_address_is_checked(field):
    with pytest.raises(InvalidFieldError) as refused:
        await check("tcp://10.0.0.1:1", **{field: {3: "tcp://8.8.8.8:1"}})
    assert refused.value.field == f"{field}.3"
