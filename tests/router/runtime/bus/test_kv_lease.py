"""Owners of a key, with a real server."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError

from router.protocol.subjects import Subjects
from router.runtime.bus import kv_lease as module
from router.runtime.bus.errors import LogConflictError, TwinError
from router.runtime.bus.kv_lease import KvLease
from support.processes.servers import equals, eventually

SUBJECTS = Subjects("test")


def announcer(bus, incarnation, key="worker.1", **options):
    return KvLease(bus.js, SUBJECTS, key, incarnation, **options)


def value(incarnation):
    return msgspec.json.encode({"incarnation": incarnation})


async def claimed(bus, incarnation, **options):
    ours = announcer(bus, incarnation, **options)
    await ours.look()
    await ours.claim(value(incarnation))
    return ours


async def stored(bus, key="worker.1"):
    try:
        store = await bus.js.key_value(SUBJECTS.bucket)
        return (await store.get(key)).value
    except NatsError as error:
        return type(error).__name__


async def test_claims_an_unowned_key(bus):
    await claimed(bus, 1)
    assert await stored(bus) == value(1)


async def test_claim_replaces_a_dead_owner(bus):
    await claimed(bus, 1)
    await claimed(bus, 2)
    assert await stored(bus) == value(2)


async def test_concurrent_claims_have_one_winner(bus):
    first, second = announcer(bus, 1), announcer(bus, 2)
    await first.look()
    await second.look()
    await first.claim(value(1))
    with pytest.raises(LogConflictError):
        await second.claim(value(2))
    assert await stored(bus) == value(1)


async def test_a_changed_value_is_written_at_once_and_kept(bus, monkeypatch):
    monkeypatch.setattr(module, "RENEW_S", 60.0)
    ours = await claimed(bus, 1)
    renewing = asyncio.create_task(ours.run())
    changed = msgspec.json.encode({"incarnation": 1, "more": 2})
    ours.change(changed)
    await eventually(lambda: equals(stored(bus), changed))
    await ours.verify()
    renewing.cancel()


async def test_replaced_owner_raises_twin_error(bus, monkeypatch):
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    ours = await claimed(bus, 1)
    await ours.verify()
    renewing = asyncio.create_task(ours.run())
    await claimed(bus, 2)
    with pytest.raises(TwinError):
        await renewing
    with pytest.raises(TwinError):
        await ours.verify()


async def test_renews_within_the_time_to_live_and_only_for_that_long(bus, monkeypatch, eventually):
    assert module.RENEW_S <= module.TTL_S / 3
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    monkeypatch.setattr(module, "TTL_S", 1)
    ours = await claimed(bus, 1)
    renewing = asyncio.create_task(ours.run())
    store = await bus.js.key_value(SUBJECTS.bucket)

    async def is_renewed():
        with suppress(KeyNotFoundError):  # on a busy machine a second is soon over
            return (await store.get("worker.1")).revision > 4

    await eventually(is_renewed)
    renewing.cancel()
    await eventually(lambda: equals(stored(bus), "KeyNotFoundError"))


async def test_key_of_a_dead_owner_expires(bus, monkeypatch, eventually):
    monkeypatch.setattr(module, "TTL_S", 1)
    await claimed(bus, 1)

    await eventually(lambda: equals(stored(bus), "KeyNotFoundError"))
    monkeypatch.setattr(module, "TTL_S", 60)
    await claimed(bus, 2)
    assert await stored(bus) == value(2)


async def test_a_key_beside_a_live_engine_stays(bus, monkeypatch, eventually):
    monkeypatch.setattr(module, "TTL_S", 1)
    await claimed(bus, 1, expires=False)
    await claimed(bus, 1, key="worker.2")
    await eventually(lambda: equals(stored(bus, "worker.2"), "KeyNotFoundError"))
    assert await stored(bus) == value(1)


async def test_withdraws_its_own_key_only(bus):
    ours = await claimed(bus, 1)
    twin = await claimed(bus, 2)
    await ours.withdraw()
    assert await stored(bus) == value(2)
    await twin.withdraw()
    assert await stored(bus) == "KeyNotFoundError"
    await claimed(bus, 3)
    assert await stored(bus) == value(3)


async def test_owner_without_a_claim_withdraws_nothing(bus):
    await claimed(bus, 1)
    refused = announcer(bus, 2)
    await refused.look()
    await refused.withdraw()
    assert await stored(bus) == value(1)


async def test_renews_at_once_when_the_bus_came_back(bus, eventually):
    ours = await claimed(bus, 1)
    renewing = asyncio.create_task(ours.run())
    await bus.js.delete_key_value(SUBJECTS.bucket)
    ours.renew_soon()

    async def is_back():
        return await stored(bus) == value(1)

    await eventually(is_back)
    renewing.cancel()


async def test_announces_itself_again_when_the_bucket_was_wiped(bus, monkeypatch, eventually):
    monkeypatch.setattr(module, "RENEW_S", 0.1)
    ours = await claimed(bus, 1)
    renewing = asyncio.create_task(ours.run())
    await bus.js.delete_key_value(SUBJECTS.bucket)

    async def is_back():
        return await stored(bus) == value(1)

    await eventually(is_back)
    renewing.cancel()
