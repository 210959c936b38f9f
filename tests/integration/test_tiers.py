"""A worker with blocks in several tiers: what it publishes and finds, and what a kill leaves."""

import httpx

from support.processes.servers import eventually

SMALL = {
    "num-blocks": 64,
    "max-model-len": 512,
    "onboard-timeout-s": 60,
}
TEXT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom, " * 8)


def prompt(number):
    return list(f"{number}: ".encode()) + TEXT[:300]


async def held_by_worker(fleet):
    """What the agent says it holds, by tier."""
    dump = (await fleet.client.get(f"{fleet.endpoints[1]}/dump")).json()
    return {tier: set(hashes) for tier, hashes in dump["ranks"]["0"].items() if hashes}


def tier_of(event):
    """As the agent calls it: the router's dump has Dynamo's names."""
    return event["storage_tier"].removesuffix("_pinned")


async def held_by_index(fleet):
    """What the router believes, by tier."""
    events = [event for scope in (await fleet.get("/dump")).values() for event in scope["events"]]
    return {
        tier_of(event): {
            block["block_hash"] for block in event["event"]["data"]["stored"]["blocks"]
        }
        for event in events
    }


async def until_published(fleet, is_there):
    """Until the router knows what the worker holds, and that is what it is to be."""

    async def is_told():
        try:
            held = await held_by_worker(fleet)
        except httpx.HTTPError:
            return False
        return is_there(held) and held == await held_by_index(fleet) and held

    return await eventually(is_told)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_blocks_outlive_a_kill_and_the_router_knows_in_which_tier(fleet, tmp_path):
    config = tmp_path / "agent.toml"
    config.write_text("onboard_always = true\n")  # however slow the disk is just now
    tiers = {
        "config": config,
        "host-cache-blocks": 100, "host-cache-dir": tmp_path,
        "disk-cache-blocks": 400, "disk-cache-dir": tmp_path,
    }  # fmt: skip
    await fleet.start(workers=1, **SMALL, **tiers)
    said = [(await fleet.complete(1, 0, prompt(number)))["choices"] for number in range(8)]
    held = await until_published(fleet, lambda held: len(held["disk"]) == 8 * 19)
    assert len(held["host"]) == 100
    overlap = (await fleet.select(prompt(0)))["overlap"]
    assert (overlap["gpu"], overlap["disk"]) == (0, 288)
    fleet.workers[1].kill()
    fleet.workers[1].start()
    again = await until_published(fleet, lambda now: now.get("disk") == held["disk"])
    assert again == {tier: held[tier] for tier in ("host", "disk")}
    for number in range(8):
        predicted = await fleet.select(prompt(number))
        assert predicted["overlap"]["disk"] == 288
        assert predicted["predicted_cached_blocks"] == 288 // 16
        answer = await fleet.complete(1, 0, prompt(number))
        assert (answer["choices"], cached(answer)) == (said[number], 288)
    await until_published(fleet, lambda now: len(now["disk"]) == 8 * 19)
