"""Real routers without a bus: what one books weighs at the others, come what may."""

import asyncio
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from random import Random

import httpx
import msgspec
import pytest

from router.protocol.replicas import Progress, SharedReservation
from support.processes.certificates import Authority
from support.processes.processes import Process
from support.processes.relays import Relay
from support.processes.running import RunningRouter, RunningService
from support.processes.servers import eventually, free_port
from support.values.token_files import token_lines, token_of

PROMPT = list(range(40))
WORKER = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}


class Peers:
    """Routers that know each other's addresses; a link in each direction between any two."""

    def __init__(self, names):
        self._stack = AsyncExitStack()
        self.links = {pair: Relay() for pair in permutations(names, 2)}
        self.routers = {}

    async def __aenter__(self):
        for link in self.links.values():
            await self._stack.enter_async_context(link)
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    async def start(self, name, **fields):
        """Start a router that knows the worker, and wait until it is ready."""
        return await self._stack.enter_async_context(self.running(name, **fields))

    @asynccontextmanager
    async def running(self, name, **fields):
        links = {to: link for (of, to), link in self.links.items() if of == name}
        addresses = ",".join(f"127.0.0.1:{link.port}" for link in links.values())
        router = made(name, **{"router_peers": addresses, **fields})
        async with router.running():
            self.routers[name] = router
            for (_, to), link in self.links.items():
                if to == name:
                    link.target_port = router.config.http.http_port
            assert (await router.post("/workers", WORKER)).status_code == 201
            await eventually(router.is_ready)
            yield router
        self.routers.pop(name)

    async def part(self, *names):
        """Cut these routers off from the others."""
        for pair, link in self.links.items():
            if len({*pair} & {*names}) == 1:
                await link.go_down()

    def heal(self):
        for link in self.links.values():
            link.come_up()
            link.resume()

    async def until_equal(self):
        """Wait until each router has exactly what every other has booked."""

        def are_equal():
            routers = self.routers.values()
            return all(theirs(one, other) == own(other) for one, other in permutations(routers, 2))

        await eventually(are_equal)


def made(name, **fields):
    return RunningRouter("", name=name, use_kv_events=False, **fields)


def own(router) -> dict[str, SharedReservation]:
    tracker = router.service.host.core.tracker
    return {each.request_id: each for each in tracker.all_shared()}


def theirs(router, other) -> dict[str, SharedReservation]:
    replicas = router.service.host.core.foreign.replicas
    return {
        each.request_id: each
        for mirror in replicas
        if mirror.router_id == other.config.router_id
        for each in mirror.reservations
    }


class OtherRouter(RunningService):
    """A router in a process of its own."""

    def __init__(self, port):
        super().__init__(None, port)


async def load(router):
    (view,) = (await router.client.get("/loads")).json()[0]["loads"]
    return view["potential_prefill_tokens"], view["potential_decode_blocks"]


async def book(router, request_id, tokens=PROMPT):
    body = {"token_ids": tokens, "request_id": request_id}
    answer = await router.post("/select_and_reserve", body)
    assert answer.status_code == 200, answer.text


async def until_loaded(router, expected):
    async def is_loaded():
        return await load(router) == expected

    await eventually(is_loaded)


async def until_shown(router, state, **client):
    """Wait until a router's one other address is in this state; return why."""

    async def seen():
        (peer,) = (await router.client.get("/ready?verbose", **client)).json()["peers"]
        return peer if peer["state"] == state else None

    return (await eventually(seen))["problem"]


async def test_bookings_of_one_router_count_at_the_others_and_at_a_late_one():
    async with Peers("abc") as peers:
        first, second = await asyncio.gather(*map(peers.start, "ab"))
        await book(first, "x")
        await until_loaded(second, (40, 10))
        await second.post("/reservations/x/prefill_complete", {})
        await until_loaded(first, (0, 10))
        await until_loaded(second, (0, 10))
        await second.client.delete("/reservations/x")
        await until_loaded(first, (0, 0))
        await until_loaded(second, (0, 0))
        assert await second.metric("kv_router_replica_differences_total") == 0

        await book(first, "y", [99] * 21)
        third = await peers.start("c")
        assert await load(third) == (21, 6)
        await peers.until_equal()
        shown = (await third.client.get("/ready?verbose")).json()["peers"]
        assert {each["name"]: each["state"] for each in shown} == dict.fromkeys("ab", "connected")
        routers = (await third.client.get("/routers")).json()
        assert [each["name"] for each in routers] == ["c", "a", "b"]
        others = (await third.client.get("/replica_sync/peers")).json()
        assert others == [each["address"] for each in shown]
        assert await third.metric('kv_router_replica_peers{state="connected"}') == 2


@pytest.mark.long
async def test_bookings_of_a_killed_router_are_forgotten_and_its_next_life_is_known(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("router.sequence.replicas.replica_set.SILENCE_S", 1.0)
    port, own_port = free_port(), free_port()
    (tmp_path / "b.toml").write_text(
        f'name = "b"\nhttp_port = {port}\nrouter_peers = "{addresses(own_port)}"\n'
        'namespace = "test"\nuse_kv_events = false\ncheck_workers = false\npolicy = "dynamo-1.0"\n'
    )
    process = Process(tmp_path, "b", "router", "serve", config=tmp_path / "b.toml")
    other = OtherRouter(port)
    try:
        async with made("a", http_port=own_port, router_peers=addresses(port)).running() as router:
            for each in (router, other):
                await eventually(each.is_up)
                assert (await each.post("/workers", WORKER)).status_code == 201
                await eventually(each.is_ready)
            await book(other, "x")
            await until_loaded(router, (40, 10))
            process.kill()
            await until_loaded(router, (0, 0))
            assert await router.metric("kv_router_replica_gone_total") == 1
            await book(router, "y", [99] * 40)
            process.start()
            await eventually(other.is_up)
            assert (await other.post("/workers", WORKER)).status_code == 201
            await eventually(other.is_ready)
            assert await load(other) == (40, 10)
            await other.client.delete("/reservations/y")
            await until_loaded(router, (0, 0))
    finally:
        process.end()
        await other.client.aclose()


async def test_a_router_that_stops_leaves_its_requests_to_another(monkeypatch):
    monkeypatch.setattr("router.ingest.replica_sync.GIVE_S", 60.0)
    async with Peers("ab") as peers:
        staying = await peers.start("a")
        async with peers.running("b") as leaving:
            await book(leaving, "x")
            await until_loaded(staying, (40, 10))
        assert await staying.metric("kv_router_replica_inherited_total") == 1
        assert await load(staying) == (40, 10)
        assert (await staying.client.delete("/reservations/x")).is_success
        assert await load(staying) == (0, 0)


async def test_a_partition_heals_exactly(monkeypatch):
    monkeypatch.setattr("router.sequence.replicas.replica_set.SILENCE_S", 1.0)
    async with Peers("abc") as peers:
        first, second, third = await asyncio.gather(*map(peers.start, "abc"))
        for number, router in enumerate((first, second, third)):
            await book(router, f"before {number}")
        await peers.until_equal()
        await peers.part("a")
        await first.client.delete("/reservations/before 0")
        await book(first, "within")
        await second.client.delete("/reservations/before 1")
        await third.post("/reservations/before 2/prefill_complete", {})
        await eventually(lambda: theirs(second, third)["before 2"].progress != Progress())
        await eventually(lambda: not theirs(first, second))
        peers.heal()
        await peers.until_equal()
        assert await load(first) == await load(second) == await load(third)


@pytest.mark.long
async def test_a_router_that_reads_nothing_for_a_while_has_all_in_the_end(monkeypatch):
    """What exceeds its queue is dropped, and a snapshot has it."""
    monkeypatch.setattr("router.ingest.peer_streams.MOST_WAITING_BYTES", 4096)
    monkeypatch.setattr("router.sequence.replicas.replica_set.SILENCE_S", 60.0)
    monkeypatch.setattr("router.ingest.peer_reader.SILENT_S", 60.0)
    async with Peers("ab") as peers:
        first, second = await asyncio.gather(*map(peers.start, "ab"))
        link = peers.links["b", "a"]
        link.stall()
        long = list(range(400_000))

        async def has_overflown():
            await book(first, f"x{len(own(first))}", long)
            return await first.metric("kv_router_replica_peer_overflows_total")

        await eventually(has_overflown)
        await first.client.delete("/reservations/x0")
        link.resume()
        await peers.until_equal()
        assert await second.metric("kv_router_replica_catch_ups_total")


@pytest.mark.long
async def test_whatever_is_cut_and_stalled_all_routers_agree_in_the_end(monkeypatch):
    """Silences included: what each router has of another is what that one has booked."""
    monkeypatch.setattr("router.sequence.replicas.replica_set.SILENCE_S", 1.0)
    random = Random(7)
    async with Peers("abc") as peers:
        routers = [await peers.start(name) for name in "abc"]
        for number in range(40):
            link = random.choice([*peers.links.values()])
            await random.choice([link.cut, link.go_down, async_(link.stall)])()
            for step in range(random.randrange(12)):
                router = random.choice(routers)
                live = [*own(router)]
                if live and random.random() < 0.5:
                    await router.client.delete(f"/reservations/{random.choice(live)}")
                else:
                    await book(router, f"{number} {step}", random.choices(range(9), k=24))
            await asyncio.sleep(random.random() * 0.6)
            if random.random() < 0.3:
                peers.heal()
            if number % 10 == 9:
                peers.heal()
                await peers.until_equal()
        assert len({await load(each) for each in routers}) == 1


def async_(call):
    async def called():
        call()

    return called


# ── Who shares, and who does not ─────────────────────────────────────────────────────────────────


def addresses(*ports):
    return ",".join(f"127.0.0.1:{port}" for port in ports)


async def greet(router, **fields):
    """The answer to a stranger that asks for a stream, within its head."""
    greeting = {"router_id": 5, "incarnation": 1, "name": "five", "namespace": "test",
                "scheme": router.config.naming.booking_scheme, **fields}  # fmt: skip
    stream = router.client.stream("POST", "/replica_sync/stream", json=greeting)
    async with stream as answer:
        if answer.status_code == 200:
            return answer, b""
        return answer, await answer.aread()


async def test_a_router_shares_with_others_of_its_fleet_alone():
    """Ids are made of names; the ports are the same on two machines."""
    port = free_port()
    async with made("a", http_port=port, router_peers=addresses(port)).running() as router:
        await until_shown(router, "itself")
        assert (await router.client.get("/replica_sync/peers")).json() == []
        for fields, error in [
            ({"namespace": "other"}, "namespace: 'other' there, 'test' here (allowed: the same in"),
            ({"scheme": "keyed"}, "block_key_file: blocks are named by keyed there, by "),
            ({"router_id": router.config.router_id}, "name: 'a' with the same HTTP port is the "),
        ]:
            answer, body = await greet(router, **fields)
            assert answer.status_code == 409
            assert msgspec.json.decode(body)["error"].startswith(error)
        assert (await greet(router, name=""))[0].status_code == 422
        assert (await greet(router))[0].status_code == 200


async def test_a_router_with_other_settings_is_named_where_it_is_refused():
    port = free_port()
    other = made("a", http_port=port, router_peers=addresses(1), namespace="one")
    router = made("b", router_peers=addresses(port), namespace="two")
    async with other.running(), router.running():
        problem = await until_shown(router, "refused")
        assert problem.startswith("409: namespace: 'two' there, 'one' here")
        degraded = (await router.client.get("/ready?verbose")).json()["degraded"]
        assert f"127.0.0.1:{port} shares no reservations: {problem}" in degraded
        assert await router.metric('kv_router_replica_peers{state="refused"}') == 1


async def test_a_router_without_peers_has_no_streams():
    async with made("a").running() as router:
        answer, body = await greet(router)
        assert answer.status_code == 409
        assert msgspec.json.decode(body)["code"] == "no_replica_stream"


@pytest.fixture
def secured(tmp_path):
    """Settings of routers with certificates of one authority, and tokens."""
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("router")
    names = {"router": ["replicas"], "caller": ["route", "metrics"], "operator": ["admin", "route"]}
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        "".join(token_lines(name, " ".join(scopes)) for name, scopes in names.items())
    )
    for name in names:
        (tmp_path / name).write_text(token_of(name))
    return {
        "token_file": str(tokens),
        "tls_cert_file": cert_file,
        "tls_key_file": key_file,
        "tls_client_ca_file": str(authority.path),
        "router_peers_ca_file": str(authority.path),
        "router_peers_token_file": str(tmp_path / "router"),
    }


@asynccontextmanager
async def secured_router(name, settings, port, peer):
    router = made(name, http_port=port, router_peers=addresses(peer), **settings)
    context = ssl.create_default_context(cafile=settings["tls_client_ca_file"])
    context.load_cert_chain(settings["tls_cert_file"], settings["tls_key_file"])
    headers = {"authorization": f"Bearer {token_of('operator')}"}
    url = f"https://127.0.0.1:{port}"
    router.client = httpx.AsyncClient(base_url=url, verify=context, headers=headers)
    async with router.running():
        yield router
        await router.client.aclose()  # an open connection would wait for its end of TLS


async def test_routers_with_certificates_and_tokens_share_and_strangers_do_not(secured, tmp_path):
    ports = free_port(), free_port()
    async with (
        secured_router("a", secured, *ports) as first,
        secured_router("b", secured, *reversed(ports)) as second,
    ):
        for router in (first, second):
            assert (await router.post("/workers", WORKER)).status_code == 201
        await until_shown(first, "connected")
        await book(first, "x")
        await until_loaded(second, (40, 10))

        del first.client.headers["authorization"]
        assert (await greet(first))[0].status_code == 401
        first.client.headers["authorization"] = f"Bearer {token_of('caller')}"
        answer, body = await greet(first)
        assert answer.status_code == 403
        assert b"lacks the scope replicas" in body

        await until_shown(second, "connected")
        (tmp_path / "tokens.toml").write_text(token_lines("operator", "admin route"))
        first.service.reloaded("unchanged")
        assert (await until_shown(second, "refused")).startswith("401: authorization: unknown")
