"""Strangers at a worker's block server, over TCP."""

import os
from contextlib import ExitStack

import msgspec
import pytest

from attack.clients import connected, read_all, until_closed
from support.processes.servers import until
from worker_agent.sharing.peer_messages import Challenge, Proof

pytestmark = pytest.mark.attack

WORKER = "worker"
PLACES = 32
"""Connections of strangers that the block server holds."""


def counted(fleet, name):
    rows = [row for row in fleet.metrics(WORKER).splitlines() if row.startswith(name)]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def test_strangers_hold_few_places_for_a_short_time(fleet):
    """They learn a nonce, and no block."""
    before = fleet.descriptors(WORKER)
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(connected(fleet.share_ports[WORKER])) for _ in range(5 * PLACES)
        ]
        until(lambda: fleet.descriptors(WORKER) <= before + PLACES + 8)
        sizes = [len(read_all(stranger)) for stranger in strangers]
    assert max(sizes) < 500
    assert counted(fleet, "kv_agent_share_given_blocks_total") == 0


@pytest.mark.parametrize(
    "said",
    [b"\xff" * 4096, b"\x00\x00\x00\x80", b"\x00" * 65_536, b"GET / HTTP/1.1\r\n\r\n", b""],
    ids=["length", "2 GiB", "zeros", "http", "silence"],
)
def test_garbage_gets_no_block_and_costs_nothing(fleet, said):
    with connected(fleet.share_ports[WORKER]) as stranger:
        assert len(until_closed(stranger, more=said)) < 500
    assert counted(fleet, "kv_agent_share_given_blocks_total") == 0


def test_proof_of_another_secret_is_refused(fleet):
    """One that is well-formed, in the protocol's own words."""
    with connected(fleet.share_ports[WORKER]) as stranger:
        size = int.from_bytes(stranger.recv(4), "little")
        challenge = msgspec.msgpack.decode(stranger.recv(size), type=Challenge)
        assert challenge.nonce
        proof = msgspec.msgpack.encode(Proof(os.urandom(32), os.urandom(32)))
        stranger.sendall(len(proof).to_bytes(4, "little") + proof)
        answer = read_all(stranger)
    assert b"PeerRefused" in answer
    assert b"Welcome" not in answer
