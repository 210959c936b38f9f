"""Sessions that routers share in Redis: a real server, and none."""

import asyncio

import pytest
from redis.asyncio import Redis

from router.api.redis_sessions import RedisSessions
from router.api.sessions import LocalSessions
from router.errors import ConfigError
from router.observability.metrics import RouterMetrics
from router.protocol.values import Scope
from router.scheduler.affinity import AffinityTable, Session
from support.processes.listening import listening
from support.processes.servers import equals, free_port
from support.values.builders import rank

SESSION = Session(Scope("meta/llama:8b", "g"), "conversation 1")
KEY_OF_SCOPE = "kv:test:session:meta%2Fllama%3A8b:g:"
KEY = KEY_OF_SCOPE + "conversation%201"
ONE, TWO = rank(1), rank(2, 3)


def sessions_of_a_router(port, ttl_s=60.0, timeout_s=5.0, namespace="test"):
    metrics = RouterMetrics()
    local = LocalSessions(AffinityTable(ttl_s, 100))
    url = f"redis://127.0.0.1:{port}/0"
    return RedisSessions(url, namespace, ttl_s, timeout_s, local, metrics), metrics


def failures(metrics, operation):
    value = metrics.registry.get_sample_value(
        "kv_router_session_store_failures_total", {"operation": operation}
    )
    return value or 0


@pytest.fixture
async def routers(redis_port):
    pair = [sessions_of_a_router(redis_port)[0] for _ in range(2)]
    yield pair
    for each in pair:
        await each.close()


@pytest.fixture
async def redis(redis_port):
    async with Redis(port=redis_port) as client:
        yield client


async def test_concurrent_bindings_agree_on_one_rank(routers):
    a, b = routers
    assert await a.find(SESSION) is None
    found = await asyncio.gather(a.bind(SESSION, ONE, None), b.bind(SESSION, TWO, None))
    assert found[0] == found[1]
    assert found[0] in (ONE, TWO)
    assert await a.find(SESSION) == await b.find(SESSION) == found[0]


async def test_a_rank_that_is_gone_gives_way_once(routers):
    a, b = routers
    await a.bind(SESSION, ONE, None)
    assert await b.bind(SESSION, TWO, gone=ONE) == TWO
    assert await a.bind(SESSION, rank(3), gone=ONE) == TWO
    assert await a.find(SESSION) == TWO


async def test_a_released_session_is_unbound_everywhere(routers):
    a, b = routers
    await a.bind(SESSION, ONE, None)
    await b.bind(SESSION, TWO, None)
    await b.release(SESSION)
    assert await a.find(SESSION) == ONE, "its own, which expires"
    assert await b.find(SESSION) is None
    assert await b.bind(SESSION, TWO, None) == TWO
    assert await a.find(SESSION) == TWO


async def test_names_of_scopes_and_sessions_are_kept_apart(routers):
    a, _ = routers
    await a.bind(Session(Scope("m:g", "x"), "s"), ONE, None)
    assert await a.find(Session(Scope("m", "g:x"), "s")) is None


async def test_a_session_is_forgotten_when_idle(redis, redis_port, eventually):
    sessions, other = (sessions_of_a_router(redis_port, ttl_s=60.0)[0] for _ in range(2))
    await sessions.bind(SESSION, ONE, None)
    for _ in range(2):
        assert 0 < await redis.pttl(KEY) <= 60_000
        await redis.pexpire(KEY, 600_000)
        assert await sessions.bind(SESSION, TWO, None) == ONE
    await redis.pexpire(KEY, 1)
    await eventually(lambda: equals(other.find(SESSION), None))
    for each in (sessions, other):
        await each.close()


async def test_bindings_lost_by_redis_are_restored_from_routers(routers, redis):
    """It came back empty, or evicted the key."""
    a, b = routers
    await a.bind(SESSION, ONE, None)
    await b.bind(SESSION, TWO, None)
    await redis.delete(KEY)
    assert await a.find(SESSION) == await b.find(SESSION) == ONE


NO_RANKS = [
    b"everywhere", b"", b"\xff\xfe\x00", "٣.٠".encode(), "².0".encode(), b"9" * 5_000 + b".0",
    b"1" * 20 + b".0", b"1.123456", b"01.0", b"1.00", b" 1.0", b"1.0\n", b"1.0.0", b"-1.0",
]  # fmt: skip


async def test_foreign_session_values_bind_nothing_and_are_replaced(routers, redis):
    a, b = routers
    for number, said in enumerate(NO_RANKS):
        session = Session(SESSION.scope, f"{number}")
        await redis.set(KEY_OF_SCOPE + session.session_id, said)
        assert await a.find(session) is None
        assert await a.bind(session, ONE, None) == ONE
        assert await b.bind(session, TWO, None) == await b.find(session) == ONE


async def test_a_key_of_another_kind_is_no_failure_of_redis(redis, redis_port):
    here, metrics = sessions_of_a_router(redis_port)
    await redis.lpush(KEY, "x")
    assert await here.find(SESSION) is None
    assert await here.bind(SESSION, ONE, None) == ONE
    assert await redis.get(KEY) == b"1.0"
    assert failures(metrics, "find") == failures(metrics, "bind") == 0
    await here.close()


HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"


@pytest.mark.parametrize("said", [b":1\r\n", b"*1\r\n:1\r\n", b"$x\r\n", b"+\xff\r\n"])
async def test_server_that_is_not_redis_is_not_used(said):
    asked, done = [], asyncio.Event()

    async def talk(reader, writer):
        while command := await reader.read(1000):
            asked.append(command)
            greets = b"HELLO" in command or b"CLIENT" in command
            answers = command.count(b"CLIENT\r\n") * b"+OK\r\n"
            writer.write((HELLO * (b"HELLO" in command) + answers) if greets else said)
        writer.close()
        await writer.wait_closed()
        done.set()

    async with listening(talk) as port:
        sessions, _ = sessions_of_a_router(port)
        assert await sessions.find(SESSION) is None
        assert b"GET" in asked[-1]
        assert await sessions.bind(SESSION, ONE, None) == ONE
        await sessions.close()
        await done.wait()


async def test_a_redis_that_does_not_answer_is_not_waited_for(redis, redis_port, eventually):
    """It is stalled; then it is back, and knows better."""
    here, metrics = sessions_of_a_router(redis_port, timeout_s=1.0)
    other, _ = sessions_of_a_router(redis_port)
    await other.bind(SESSION, ONE, None)
    assert await here.bind(SESSION, TWO, None) == ONE
    await redis.client_pause(2500)
    assert await here.find(SESSION) == ONE
    assert failures(metrics, "find") == 1
    assert await here.bind(SESSION, TWO, None) == ONE
    assert failures(metrics, "bind") == 0, "it is not asked again at once"
    await other.bind(SESSION, TWO, gone=ONE)

    async def is_back():
        return await here.find(SESSION) == TWO

    await eventually(is_back)
    for each in (here, other):
        await each.close()


async def test_without_redis_local_sessions_are_used():
    sessions, metrics = sessions_of_a_router(free_port())
    assert await sessions.find(SESSION) is None
    assert failures(metrics, "find") == 1
    assert await sessions.bind(SESSION, ONE, None) == ONE
    assert await sessions.bind(SESSION, TWO, None) == ONE
    assert await sessions.bind(SESSION, TWO, gone=ONE) == TWO
    assert await sessions.find(SESSION) == TWO
    await sessions.close()


def test_a_url_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="redis_url"):
        RedisSessions(
            "http://x", "n", 1.0, 1.0, LocalSessions(AffinityTable(1, 1)), RouterMetrics()
        )
