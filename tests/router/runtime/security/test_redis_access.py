"""Logins to a real Redis with an access list, and TLS before it."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from router.api.redis_sessions import RedisSessions
from router.api.sessions import LocalSessions
from router.config.load import load_router_config
from router.errors import ConfigError
from router.observability.metrics import RouterMetrics
from router.protocol.values import Scope
from router.runtime.security.redis_access import RedisAccess
from router.scheduler.affinity import AffinityTable, Session
from support.processes.certificates import Authority
from support.processes.listening import listening
from support.values.builders import rank

SECRET = "a-password-of-redis"
SESSION = Session(Scope("m", "g"), "s")


@asynccontextmanager
async def tls_before(port, authority):
    """TLS in front of a server that has none: what stunnel does; the port that it listens on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("redis"))

    async def copy(reader, writer):
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async with listening(serve, ssl=context) as tls_port:
        yield tls_port


async def failures_of(url, access):
    """How often Redis did not take a router's word."""
    metrics = RouterMetrics()
    local = LocalSessions(AffinityTable(60.0, 100))
    sessions = RedisSessions(url, "test", 60.0, 5.0, local, metrics, access)
    try:
        assert await sessions.bind(SESSION, rank(1), None) == rank(1)
        await sessions.find(SESSION)
    finally:
        await sessions.close()
    text = metrics.exposition().decode().splitlines()
    return sum(float(line.split()[1]) for line in text if "session_store_failures_total{" in line)


async def test_redis_acl_admits_the_right_password(redis_port, tmp_path, caplog):
    url = f"redis://127.0.0.1:{redis_port}/0"
    async with Redis.from_url(url) as redis:
        rules = ("on", f">{SECRET}", "~kv:*", "+get", "+set", "+evalsha", "+script", "+pexpire")
        await redis.execute_command("ACL", "SETUSER", "router", *rules)
    password_file = tmp_path / "password"
    password_file.write_text(f"{SECRET}\n")
    access = RedisAccess("router", str(password_file))
    assert await failures_of(url, access) == 0
    password_file.write_text("another")
    assert await failures_of(url, access) > 0
    in_url = url.replace("//", f"//router:{SECRET}@")
    assert await failures_of(in_url, RedisAccess()) == 0
    assert SECRET not in caplog.text


async def test_tls_by_the_right_authority_only(redis_port, tmp_path):
    authority = Authority(tmp_path)
    folder = tmp_path / "others"
    folder.mkdir()
    stranger = Authority(folder, "stranger")
    async with tls_before(redis_port, authority) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        assert await failures_of(url, RedisAccess(tls_ca_file=str(authority.path))) == 0
        assert await failures_of(url, RedisAccess(tls_ca_file=str(stranger.path))) > 0
        assert await failures_of(url, RedisAccess()) > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"redis_username": "u", "redis_url": "redis://h"}, "redis_password_file"),
        ({"redis_password_file": "/dev/null", "redis_url": "redis://u:p@h"}, "redis_url"),
        ({"redis_password_file": "/dev/null"}, "redis_url"),
        ({"redis_tls_ca_file": "/dev/null", "redis_url": "redis://h"}, "redis_url"),
        ({"redis_tls_cert_file": "/x", "redis_url": "rediss://h"}, "redis_tls_key_file"),
    ],
)
def test_contradictions_name_both(settings, named):
    environment = {f"KV_ROUTER_{name.upper()}": value for name, value in settings.items()}
    environment["KV_ROUTER_SESSION_AFFINITY_TTL_S"] = "60"
    with pytest.raises(ConfigError, match=named) as refusal:
        load_router_config([], environment)
    assert refusal.value.key in settings
    assert "u:p" not in str(refusal.value)
