"""Logins to a real nats-server, by every way it knows, and TLS."""

import asyncio
import logging

import nkeys
import pytest
from nats.js.errors import NotFoundError

from router.runtime.bus.connection import connection
from router.runtime.security.config import NatsConfig
from router.runtime.security.nats_access import NatsAccess, nats_access
from support.processes.certificates import Authority
from support.processes.guarded_nats import GuardedNats

SECRET = "a-secret-of-the-bus"


async def is_let_in(url, access, within_s=60.0):
    """Whether a connection comes to be on which something can be asked."""
    try:
        async with asyncio.timeout(within_s), connection(url, "t", lambda _: None, access) as bus:
            with pytest.raises(NotFoundError):
                await bus.js.stream_info("none")
            return True
    except TimeoutError:
        return False


def written(path, text):
    path.write_text(text)
    return str(path)


async def test_user_and_password(tmp_path):
    config = f'authorization {{user: router, password: "{SECRET}"}}'
    with GuardedNats(tmp_path, config) as server:
        password_file = tmp_path / "password"
        access = NatsAccess(user="router", password_file=written(password_file, f"{SECRET}\n"))
        assert await is_let_in(server.url, access)
        assert not await is_let_in(server.url, NatsAccess(), 2.5)
        password_file.write_text("another")
        assert not await is_let_in(server.url, access, 2.5)
        password_file.write_text(SECRET)  # read at every connection
        assert await is_let_in(server.url, access)


async def test_nats_token_is_used_and_never_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with GuardedNats(tmp_path, f'authorization {{token: "{SECRET}"}}') as server:
        access = NatsAccess(token_file=written(tmp_path / "token", SECRET))
        assert await is_let_in(server.url, access)
        in_url = server.url.replace("//", f"//{SECRET}@")
        assert await is_let_in(in_url, NatsAccess())
        assert not await is_let_in(server.url, NatsAccess(), 2.5)
    assert SECRET not in caplog.text
    assert "no NATS at" in caplog.text


async def test_an_nkey(tmp_path):
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    other = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER)
    with GuardedNats(tmp_path, f"authorization {{users: [{{nkey: {public}}}]}}") as server:
        nkey_file = written(tmp_path / "seed", seed.decode())
        assert await is_let_in(server.url, NatsAccess(nkey_file=nkey_file))
        wrong = NatsAccess(nkey_file=written(tmp_path / "other", other.decode()))
        assert not await is_let_in(server.url, wrong, 2.5)


async def test_tls_with_certificates_of_both(tmp_path):
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("nats")
    config = (
        f'tls {{cert_file: "{cert_file}", key_file: "{key_file}", '
        f'ca_file: "{authority.path}", verify: true}}'
    )
    client = authority.issue("client")
    folder = tmp_path / "others"
    folder.mkdir()
    stranger = Authority(folder, "stranger")
    with GuardedNats(tmp_path, config, "tls") as server:
        ca_file = str(authority.path)
        assert await is_let_in(server.url, NatsAccess("", "", "", "", "", ca_file, *client))
        assert not await is_let_in(server.url, NatsAccess(tls_ca_file=ca_file), 2.5)
        untrusting = NatsAccess("", "", "", "", "", str(stranger.path), *client)
        assert not await is_let_in(server.url, untrusting, 2.5)


async def test_without_tls_no_login_is_sent(tmp_path):
    """A login would otherwise be sent in the clear to any server that answers."""
    with GuardedNats(tmp_path, f'authorization {{token: "{SECRET}"}}') as server:
        token_file = written(tmp_path / "token", SECRET)
        url = server.url.replace("nats://", "tls://")
        assert not await is_let_in(url, NatsAccess(token_file=token_file), 2.5)


def test_credentials_files_are_handed_over_as_they_are(tmp_path):
    creds_file = written(tmp_path / "creds", "JWT and seed")
    url = "nats://127.0.0.1:4222"
    config = NatsConfig(nats_creds_file=creds_file)
    assert nats_access(config, url).options(url) == {
        "inbox_prefix": "_INBOX",
        "user_credentials": creds_file,
    }
