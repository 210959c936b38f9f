"""Everything tests and `kv-router up` need comes with the packages."""

import redis.asyncio


async def test_nats_server_is_a_real_one(bus):
    await bus.js.add_stream(name="s", subjects=["s"])
    assert (await bus.js.publish("s", b"x")).seq == 1
    assert bus.client.connected_server_version.major >= 2


async def test_redis_server_is_a_real_one(redis_port):
    async with redis.asyncio.Redis(port=redis_port) as client:
        assert await client.set("key", "first", nx=True)
        assert not await client.set("key", "second", nx=True)
        assert await client.get("key") == b"first"
