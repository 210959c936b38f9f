"""Two engines' halves that share blocks: whatever happens to the one that has them, the other gets
right bytes, or is told which blocks to compute, and waits for a bounded time.
"""

import asyncio
import base64
import copy
import secrets
import socket
import ssl
import time
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from msgspec.structs import replace

from router.errors import ConfigError
from support.blocks.vllm_halves import (
    FACTS,
    HYBRID,
    Halves,
    Request,
    computed,
    hybrid_computed,
)
from support.processes.certificates import Authority
from support.processes.servers import eventually, free_port, until
from worker_agent.blocks.descriptors import BlockDescriptorList, Mutability
from worker_agent.bridge import engine_tiers
from worker_agent.bridge.engine_tiers import (
    MAX_BLOCKSET_BYTES,
    MAX_REPLY_BYTES,
    EngineTiers,
    EngineTiersError,
)
from worker_agent.bridge.metrics import bridge_metrics
from worker_agent.connector.vllm_parts.engine import tiers_of
from worker_agent.connector.vllm_parts.peer_sharing import peer_token
from worker_agent.connector.vllm_parts.remote_lookups import LOOK_S
from worker_agent.connector.vllm_parts.scheduler_side import START_S
from worker_agent.connector.vllm_parts.settings import connector_settings
from worker_agent.operations.messages import (
    BODY_LIMIT_BYTES,
    MAX_NAMED_PEERS,
    AnnouncedBlockset,
)
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_finder import FIND_S

TOKENS = list(range(10))
LOADED_S = 5.0


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    path.chmod(0o600)
    return str(path)


@contextmanager
def opened(key, facts=FACTS, **said):
    """An engine with these settings; its tiers have started."""
    common = {"host_cache_blocks": 32, "onboard_always": True, "block_key_file": key}
    halves = Halves(connector_settings(common | said), facts)
    try:
        halves.started()
        yield halves
    finally:
        halves.worker.close()


@contextmanager
def pair(key, between=None, serving=(), **said):
    """An engine that has the blocks of the prompt, and one that asks it, by this detour if any."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        giver = stack.enter_context(
            opened(key, share_listen=address, name="giver", **dict(serving))
        )
        stored = computed(giver)
        peer = address if between is None else stack.enter_context(between(address))
        yield giver, stack.enter_context(opened(key, share_peers=peer, **said)), stored


def matched(halves, request, now_s=0.0):
    """The tokens that can be loaded, once the lookup has ended; a step passes between the calls."""
    halves.scheduler.begin(request)
    answers = []

    def answered():
        found = halves.scheduler.matched(request.request_id, 0, now_s)
        halves.step()
        return answers.append(found) or found is not None

    until(answered)
    return answers[-1].tokens


def load(halves, request, tables, tokens=8):
    """What becomes of a load into these blocks, and which of them failed."""
    halves.scheduler.allocated(request.request_id, tables, tokens, halves.now_s)
    failed, over = set(), []

    def is_over():
        finished, errors = halves.step()
        failed.update(errors)
        return over.extend([finished] if finished.loaded else ()) or over

    until(is_over)
    return failed


def finish(halves, key):
    halves.scheduler.finished(key, halves.now_s)
    halves.step(finished=[key])
    assert len(halves.scheduler.slots) == 0
    assert not halves.scheduler.leader.counters.refused


@pytest.mark.parametrize("way", ["tcp", "tls", "unix", "mapped", "nixl"])
def test_blocks_of_another_engine_are_loaded(key, tmp_path, way):
    is_local = way in {"unix", "mapped"}
    address = f"unix://{tmp_path}/kv" if is_local else f"tcp://127.0.0.1:{free_port()}"
    memory = {"host_cache_dir": str(tmp_path)} if way == "mapped" else {}
    both = {"share_nixl": way == "nixl"}
    has_tls = way == "tls" or is_local  # which changes nothing on a Unix socket
    serving, asking = certified(Authority(tmp_path)) if has_tls else (both, both)
    with (
        opened(key, share_listen=address, **memory, **serving) as giver,
        opened(key, share_peers=[address], name="other", **asking) as here,
    ):
        stored = computed(giver)
        giver.worker.take_counted()
        here.worker.take_counted()
        request = Request("b", TOKENS)
        assert matched(here, request) == 8
        assert not load(here, request, [[7, 9]])
        for layer, before in zip(here.caches.values(), stored, strict=True):
            assert torch.equal(layer[[7, 9]], before[:2])
        finish(here, "b")
        pulled, given = here.worker.take_counted(), {}
        assert pulled["pulled_blocks"] == {"": 2}
        until(lambda: given.update(giver.worker.take_counted()) or "given_blocks" in given)
        assert given["given_blocks"] == {"": 2}
        assert ("mapped_blocks" in given) == (way == "mapped")
        assert ("nixl_given_blocks" in given) == (way == "nixl")
        assert ("nixl_pulled_blocks" in pulled) == (way == "nixl")


def test_blocks_of_all_groups_come_from_one_peer(key):
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        opened(key, HYBRID, share_listen=address) as giver,
        opened(key, HYBRID, share_peers=address) as here,
    ):
        stored = hybrid_computed(giver, "a", TOKENS)
        request = Request("b", TOKENS)
        assert matched(here, request) == 8
        assert not load(here, request, [[12, 13], [10, 11]])
        for layer, before in zip(here.caches.values(), stored, strict=True):
            assert torch.equal(layer[[12, 13, 10, 11]], before)
        finish(here, "b")


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────


def flipped(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@contextmanager
def detour(address, spoil):
    """An address that leads to another; whatever comes back as long as a block is spoilt: other
    bytes, or None to hang up, or a wait.
    """
    host, port = address.removeprefix("tcp://").split(":")
    with ExitStack() as opened_here, socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(source, target, change):
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    data = change(data) if len(data) > 150 else data
                    if data is None:
                        break
                    target.sendall(data)
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        def serve():
            with suppress(OSError):
                while True:
                    near = opened_here.enter_context(listener.accept()[0])
                    far = opened_here.enter_context(socket.create_connection((host, int(port))))
                    Thread(target=pump, args=(far, near, spoil), daemon=True).start()
                    Thread(target=pump, args=(near, far, bytes), daemon=True).start()

        server = Thread(target=serve, daemon=True)
        server.start()
        yield "tcp://{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        server.join(60)


@pytest.mark.parametrize("spoil", [flipped, lambda _: None], ids=["forged", "truncated"])
def test_blocks_changed_on_the_way_are_computed(key, spoil):
    with pair(key, lambda address: detour(address, spoil)) as (_, here, _):
        before = [layer.clone() for layer in here.caches.values()]
        request = Request("b", TOKENS)
        assert matched(here, request) == 8
        assert load(here, request, [[7, 9]]) == {7, 9}
        for layer, untouched in zip(here.caches.values(), before, strict=True):
            assert torch.equal(layer, untouched)
        assert here.scheduler.matched("b", 0, 0.0).tokens == 0, "a failed load is not tried again"
        finish(here, "b")
        assert here.worker.take_counted()["failed_pulls"] == {"": 1}


def test_blocks_that_are_gone_since_they_were_found_are_computed(key):
    with pair(key) as (giver, here, _):
        request = Request("b", TOKENS)
        assert matched(here, request) == 8
        giver.scheduler.rename("other weights")
        giver.quiesce()
        assert load(here, request, [[7, 9]]) == {7, 9}
        finish(here, "b")
        assert matched(here, Request("c", TOKENS)) == 0


def test_blocks_of_an_engine_that_is_gone_are_computed(key):
    with pair(key) as (giver, here, _):
        request = Request("b", TOKENS)
        assert matched(here, request) == 8
        giver.worker.close()
        assert load(here, request, [[7, 9]]) == {7, 9}
        finish(here, "b")
        assert matched(here, Request("c", TOKENS)) == 0


def test_a_slow_engine_delays_a_load_by_its_timeout(key):
    is_over = Event()

    def stalled(_):
        is_over.wait(60.0)

    with pair(key, lambda a: detour(a, stalled), onboard_timeout_s=0.2) as (_, here, _):
        request, began_s = Request("b", TOKENS), time.monotonic()
        assert matched(here, request) == 8
        here.now_s = time.monotonic()  # Loads end by the clock.
        assert load(here, request, [[7, 9]]) == {7, 9}
        assert time.monotonic() - began_s < 2.0
        is_over.set()
        finish(here, "b")


def test_a_silent_engine_delays_one_lookup_by_its_timeout(key):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "tcp://{}:{}".format(*silent.getsockname())
        with opened(key, share_peers=address) as here:
            began_s = time.monotonic()
            assert matched(here, Request("a", TOKENS)) == 0
            assert time.monotonic() - began_s >= FIND_S / 2
            again_s = time.monotonic()
            assert matched(here, Request("b", TOKENS)) == 0
            assert time.monotonic() - again_s < LOOK_S
            assert here.worker.take_counted()["unanswered_looks"] == {"": 2}


def test_a_scheduler_does_not_wait_for_workers_that_do_not_answer(key):
    with opened(key, share_peers=f"tcp://127.0.0.1:{free_port()}") as here:
        here.scheduler.begin(Request("a", TOKENS))
        assert here.scheduler.matched("a", 0, 0.0) is None
        assert here.scheduler.matched("a", 0, LOOK_S).tokens == 0
        assert here.scheduler.late_looks == 1


@pytest.mark.parametrize("facts", [replace(FACTS, model="other"), replace(FACTS, num_ranks=2)])
def test_engines_with_other_blocks_cannot_connect(key, facts):
    """Not even the other rank of the same engine: its part of a block has the same name."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with opened(key, share_listen=address) as giver, ExitStack() as stack:
        computed(giver)
        settings = {"share_peers": address, "host_cache_blocks": 32, "block_key_file": key}
        here = Halves(connector_settings(settings), facts)
        stack.callback(here.worker.close)
        here.scheduler.begin(Request("b", TOKENS))
        refused = {}
        for now_s in (0.0, START_S):  # of two ranks there is one
            assert here.scheduler.matched("b", 0, now_s) is None
        here.step()
        until(lambda: refused.update(giver.worker.take_counted()) or "refused_peers" in refused)


def test_an_address_in_use_is_refused_at_start(key):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "tcp://{}:{}".format(*taken.getsockname())
        with (
            pytest.raises(ConfigError, match=r"share_listen: .*in use"),
            opened(key, share_listen=address),
        ):
            pass


async def test_peers_named_by_the_agent_are_asked_until_it_names_others(key, tmp_path):
    address, control = f"tcp://127.0.0.1:{free_port()}", f"unix://{tmp_path}/control"
    own = f"tcp://127.0.0.1:{free_port()}"
    with (
        opened(key, share_listen=address) as giver,
        opened(key, share_listen=own, control_listen=control, name="other") as here,
    ):
        computed(giver)
        request = Request("b", TOKENS)
        assert matched(here, request) == 0
        finish(here, "b")
        tiers = EngineTiers(8, {0: [control]})
        with pytest.raises(EngineTiersError, match="is no address"):
            await tiers.name_peers(0, [AnnouncedBlockset("http://a", 9, 0, {})])
        await tiers.name_peers(0, [AnnouncedBlockset(address, 9, 0, {})])
        assert matched(here, request) == 8
        assert not load(here, request, [[7, 9]])
        finish(here, "b")
        await tiers.name_peers(0, [])
        assert matched(here, request) == 0


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────


def certified(authority, name="worker"):
    """The settings of an engine that serves with a certificate, and of one that asks it."""
    certificate, key = authority.issue(name)
    trusted = {"share_ca_file": str(authority.path)}
    return {"tls_cert_file": certificate, "tls_key_file": key, **trusted}, trusted


@pytest.mark.parametrize("has_tls", [True, False])
def test_blocks_are_encrypted_on_the_way_with_tls_alone(key, tmp_path, has_tls):
    serving, asking = certified(Authority(tmp_path)) if has_tls else ({}, {})
    sent = []

    def seen(data):
        sent.append(data)
        return data

    with pair(key, lambda address: detour(address, seen), serving, **asking) as (_, here, stored):
        request = Request("b", TOKENS)
        assert matched(here, request) == 8
        assert not load(here, request, [[7, 9]])
        finish(here, "b")
        first = stored[0].numpy()[0]
        assert (first.tobytes() in b"".join(sent)) is not has_tls


@pytest.mark.parametrize(
    ("at_giver", "at_asker", "problem"),
    [
        ("a", None, "no greeting: it stalls, or demands TLS, which is not set here"),
        (None, "a", "it sends without TLS, which is demanded here"),
        ("b", "a", "its certificate is refused: "),
    ],
)
def test_engines_of_which_one_has_other_tls_compute_and_say_why(
    key, tmp_path, caplog, at_giver, at_asker, problem
):
    settings = {None: ({}, {})} | {
        name: certified(Authority(tmp_path, name), f"of-{name}") for name in "ab"
    }
    with pair(key, None, settings[at_giver][0], **settings[at_asker][1]) as (_, here, _):
        assert matched(here, Request("b", TOKENS)) == 0
        [line] = [each for each in caplog.messages if each.startswith("no blocks from")]
        assert problem in line
        finish(here, "b")


def test_a_changed_certificate_is_used_without_a_restart(key, tmp_path):
    authority, port = Authority(tmp_path), free_port()
    serving, _ = certified(authority)

    def is_presented():
        presented = ssl.get_server_certificate(("127.0.0.1", port), timeout=60)
        return presented == Path(serving["tls_cert_file"]).read_text()

    with opened(key, share_listen=f"tcp://127.0.0.1:{port}", **serving):
        assert is_presented()
        authority.issue("worker")
        assert is_presented()
        Path(serving["tls_key_file"]).write_text("torn")
        assert is_presented(), "the certificate before stays"


def test_a_certificate_that_is_none_is_refused_at_start(key, tmp_path):
    serving, _ = certified(Authority(tmp_path))
    Path(serving["tls_cert_file"]).write_text("nothing")
    with (
        pytest.raises(ConfigError, match=r"tls_cert_file: .*worker\.crt"),
        opened(key, share_listen=f"tcp://127.0.0.1:{free_port()}", **serving),
    ):
        pass


# ── Blocksets ────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def sharing(key, folder, worker_id, facts=FACTS, **said):
    """An engine that shares blocks, and its agent's way to it, which knows its blockset."""
    control, address = f"unix://{folder}/{worker_id}", f"tcp://127.0.0.1:{free_port()}"
    where = {"share_listen": address, "control_listen": control, "worker_id": worker_id}
    with opened(key, facts, **{**where, **said}) as halves:
        tiers = EngineTiers(worker_id, {0: [control]}, {0: "tcp://reached.as:7700"})
        asking = asyncio.create_task(tiers.run())
        await eventually(lambda: tiers.blocksets)
        asking.cancel()
        yield halves, tiers


async def blockset_of(key, folder, worker_id, facts=FACTS):
    async with sharing(key, folder, worker_id, facts) as (_, tiers):
        return tiers.blocksets[0]


@contextmanager
def listening():
    """A peer that only listens, and whether it is connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "tcp://{}:{}".format(*listener.getsockname()), lambda: has_come(listener)


def has_come(listener):
    listener.settimeout(0)
    with suppress(BlockingIOError):
        listener.accept()[0].close()
        return True
    return False


def reasons(report):
    return [(each.worker_id, each.reason.partition(":")[0]) for each in report.refused]


async def test_an_engine_exports_its_tiers_as_reached_by_others(key, tmp_path):
    disk = {"disk_cache_blocks": 16, "disk_cache_dir": str(tmp_path)}
    async with sharing(key, tmp_path, 7, **disk) as (_, tiers):
        [ours] = (await tiers.sharing()).exported
    assert (ours.worker_id, ours.dp_rank, ours.addresses) == (7, 0, ["tcp://reached.as:7700"])
    assert [(each.num_blocks, each.is_readable) for each in ours.sets.values()] == [
        (32, True), (16, False)
    ]  # fmt: skip


async def test_an_announced_blockset_like_ours_is_imported_and_its_engine_asked(key, tmp_path):
    async with sharing(key, tmp_path, 7) as (halves, tiers):
        theirs = await blockset_of(key, tmp_path, 8)
        former = await blockset_of(key, tmp_path, 9, replace(FACTS, model="before"))
        with listening() as (address, is_connected):
            peers = (9, former), (8, theirs)
            await tiers.name_peers(0, [AnnouncedBlockset(address, n, 0, each) for n, each in peers])
            halves.scheduler.begin(Request("a", TOKENS))
            halves.scheduler.matched("a", 0, 0.0)
            halves.step()
            until(is_connected)
        report = await tiers.sharing()
        assert [each.worker_id for each in report.imported[0]] == [8]
        assert reasons(report) == [(9, "fingerprint")]
        await tiers.name_peers(0, [])
        assert (await tiers.sharing()).imported == {0: []}


@asynccontextmanager
async def counted(address, folder):
    """Another way to a worker, and the lines that the agent sends on it."""
    lines, at = [], f"{folder}/counted"

    async def serve(reader, writer):
        lines.append(await reader.readline())
        far_reader, far_writer = await asyncio.open_unix_connection(
            address.removeprefix("unix://"), limit=MAX_REPLY_BYTES
        )
        with closing(writer), closing(far_writer):
            far_writer.write(lines[-1])
            writer.write(await far_reader.readline())
            await writer.drain()

    async with await asyncio.start_unix_server(serve, at, limit=BODY_LIMIT_BYTES):
        yield f"unix://{at}", lines


def announced_by(worker_id, blockset, **changed):
    """An engine's blockset, as another one would announce it."""
    found = copy.deepcopy(blockset) | {"worker_id": worker_id, **changed}
    for each in found["block_sets"].values():
        each["nixl_metadata"]["agent_name"] = f"{worker_id}"
    return AnnouncedBlockset(f"tcp://127.0.0.1:{worker_id}", worker_id, 0, found)


async def test_peers_are_named_when_they_change_or_the_engine_is_another(key, tmp_path):
    theirs = await blockset_of(key, tmp_path, 8)
    peers = [announced_by(100 + each, theirs) for each in range(MAX_NAMED_PEERS)]

    async def epochs(tiers):
        return {each.worker_id: each.epoch for each in (await tiers.sharing()).imported[0]}

    async with (
        sharing(key, tmp_path, 7) as (engine, direct),
        counted(engine.settings.control_listen, tmp_path) as (address, lines),
    ):
        tiers = EngineTiers(7, {0: [address]})
        await tiers.name_peers(0, peers)
        assert len(await epochs(direct)) == MAX_NAMED_PEERS
        lines.clear()
        await tiers.name_peers(0, peers)
        assert (len(lines), len(lines[0]) < 100) == (1, True)
        later = theirs["epoch"] + 1
        peers[5] = announced_by(105, theirs, epoch=later)
        await tiers.name_peers(0, peers)
        assert [each for each, epoch in (await epochs(direct)).items() if epoch == later] == [105]
        engine.worker.close()
        with closing(Halves(engine.settings)):
            await tiers.name_peers(0, peers)
            assert len(await epochs(direct)) == MAX_NAMED_PEERS
            lines.clear()
            await tiers.name_peers(0, peers)
            assert len(lines) == 1


async def test_refused_blocksets_are_counted_once(key, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_tiers, "INTERVAL_S", 0.02)
    others = [
        AnnouncedBlockset("tcp://127.0.0.1:1", worker_id, 0, theirs)
        for worker_id in (8, 9)
        for theirs in [await blockset_of(key, tmp_path, worker_id, replace(FACTS, model="other"))]
    ]
    async with sharing(key, tmp_path, 7) as (_, tiers):
        like = announced_by(10, tiers.blocksets[0])
        registry = bridge_metrics(lambda: "m", list, None, tiers)

        def value(name, **labels):
            return registry.get_sample_value(
                f"kv_agent_share_{name}", {"model_name": "m", **labels}
            )

        asking = asyncio.create_task(tiers.run())
        assert value("blocksets_refused_total") == 0
        for number in (1, 2):
            await tiers.name_peers(0, [like, *others[:number]])
            await eventually(lambda number=number: value("blocksets_refused_total") == number)
        assert value("blocksets_imported", dp_rank="0") == 1
        asking.cancel()


@pytest.mark.parametrize(
    ("facts", "changed", "reason"),
    [
        (replace(FACTS, model="other"), {}, "fingerprint"),
        (replace(FACTS, num_ranks=2), {}, "fingerprint"),
        (FACTS, {"dp_rank": 3}, "worker_id"),
        (FACTS, {"epoch": 5}, "epoch"),
        (FACTS, {"block_sets": {"1": {}}}, "bytes"),
        (FACTS, {"addresses": ["x" * MAX_BLOCKSET_BYTES]}, "bytes"),
    ],
    ids=["model", "ranks", "rank", "epoch", "no blockset", "size"],
)
async def test_an_engine_with_another_blockset_is_not_connected(
    key, tmp_path, facts, changed, reason
):
    async with sharing(key, tmp_path, 7) as (halves, tiers):
        theirs = await blockset_of(key, tmp_path, 8, facts)
        if "epoch" in changed:  # of the process before
            await tiers.name_peers(0, [AnnouncedBlockset("tcp://127.0.0.1:1", 8, 0, theirs)])
        with listening() as (address, is_connected):
            await tiers.name_peers(0, [AnnouncedBlockset(address, 8, 0, {**theirs, **changed})])
            assert matched(halves, Request("a", TOKENS)) == 0
            assert not is_connected()
        report = await tiers.sharing()
        assert (reasons(report), report.imported) == ([(8, reason)], {0: []})


async def test_what_the_first_worker_refuses_no_worker_asks(key, tmp_path):
    """A blockset is of the first worker's part of each block; the others have no like of it."""
    both = [replace(FACTS, num_ranks=2, rank=rank) for rank in range(2)]
    other, control = await blockset_of(key, tmp_path, 8), f"unix://{tmp_path}/both"
    shared = {
        "host_cache_blocks": 32, "block_key_file": key, "share_peers": f"unix://{tmp_path}/peer",
        "share_listen": f"unix://{tmp_path}/kv", "control_listen": control, "worker_id": 7,
    }  # fmt: skip
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in both]
        for peer, name in zip(peers, ("peer", "peer-1"), strict=True):
            peer.bind(f"{tmp_path}/{name}")
            peer.listen()
        halves = [Halves(connector_settings(shared), facts) for facts in both]
        for each in halves:
            stack.callback(each.worker.close)
        tiers = EngineTiers(7, {0: [control, f"{control}-1"]})
        announced = AnnouncedBlockset(f"unix://{tmp_path}/peer", 8, 0, other)
        await tiers.name_peers(0, [announced])
        for each in halves:
            each.scheduler.begin(Request("a", TOKENS))
            for now_s in (0.0, START_S):
                each.scheduler.matched("a", 0, now_s)
            each.step()
        assert not any(map(has_come, peers))
        assert reasons(await tiers.sharing()) == [(8, "fingerprint")]
        await tiers.name_peers(0, [])
        for each in halves:
            each.scheduler.begin(Request("b", TOKENS))
            each.scheduler.matched("b", 0, START_S)
            each.step()
        for peer in peers:  # named in `share_peers`, and not refused any more
            until(lambda peer=peer: has_come(peer))


async def test_no_peer_writes_blocks_that_the_engine_would_restore(key, tmp_path):
    """Not even one that is proven: names are of tokens, and say nothing about bytes."""
    async with sharing(key, tmp_path, 7) as (here, tiers):
        assert matched(here, Request("b", TOKENS)) == 0
        names = here.scheduler.slots.get_slot("b").names_behind(0, 0, 2)
        block_bytes = sum(layer[0].nbytes for layer in here.caches.values())
        model = tiers_of(here.settings, FACTS, block_bytes).model
        token = peer_token(here.settings.block_keys.read(), model)
        target = BlockDescriptorList(
            7, 0, Mutability.MUTABLE, (0, 1), "0" * 32, tiers.blocksets[0]["epoch"]
        )
        with closing(PeerClient(here.settings.share_listen, 7, token)) as proven:
            assert proven.find([each.identity for each in names]) == []
            assert rule(proven.reserve, names, model.fingerprint) == "no_receiver"
            assert rule(proven.put, [memoryview(bytes(block_bytes))] * 2, target) == "lease_unknown"
            assert rule(proven.complete, target.lease) == "no_receiver"
            assert proven.find([each.identity for each in names]) == []
        finish(here, "b")
        assert matched(here, Request("c", TOKENS)) == 0


def rule(call, *arguments):
    with pytest.raises(BlocksetError) as refused:
        call(*arguments)
    return refused.value.rule
