"""Workers that give each other blocks: what is forced elsewhere is pulled, not computed again."""

import ssl

import httpx
import pytest

from support.processes.certificates import Authority
from support.processes.servers import eventually

SMALL = {"num-blocks": 64, "max-model-len": 1024}
TEXT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom, " * 8)
CACHED_TOKENS = 288


def prompt(number):
    return list(f"{number}: ".encode()) + TEXT[:300]


def said(path, **settings):
    """The settings of an agent, in a file."""
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
             for key, value in settings.items()]  # fmt: skip
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
async def sharing(fleet, tmp_path):
    """Starts workers that share, and a router that knows their secret."""
    key = tmp_path / "block.key"
    key.write_text("5e" * 32)
    fleet.router_options["block-key-file"] = key

    async def start(workers=2, dp_size=1, settings=(), **options):
        ours = {"share": True, "onboard_always": True, "block_key_file": str(key), **dict(settings)}
        config = said(tmp_path / "agent.toml", **ours)
        await fleet.start(workers, dp_size, config=config, **SMALL, **options)
        return fleet

    return start


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(answer):
    return answer["choices"][0]["token_ids"]


async def source_for(fleet, worker_id, token_ids):
    """What a decision for this worker says of others, once it says anything."""

    async def named():
        decision = await fleet.select(token_ids, allowed_worker_ids=[worker_id])
        return decision.get("source")

    return await eventually(named)


async def counted(fleet, worker_id, name):
    """The sum of a metric over ranks."""
    text = (await fleet.client.get(f"{fleet.endpoints[worker_id]}/metrics")).text
    rows = [row for row in text.splitlines() if row.startswith(f"kv_agent_share_{name}")]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


async def pulled(fleet, worker_id, dp_rank, token_ids, source):
    """Ask a rank, naming another holder."""
    hint = {"kv_transfer_params": {"source": source}}
    return await fleet.complete(worker_id, dp_rank, token_ids, **hint)


@pytest.mark.parametrize("way", ["unix", "tcp", "nixl"])
async def test_request_pinned_elsewhere_pulls_its_blocks(sharing, tmp_path, way):
    settings = {"share_dir": str(tmp_path)} if way == "unix" else {"share_nixl": way == "nixl"}
    fleet = await sharing(settings=settings)
    right = [await fleet.complete(1, 0, prompt(number)) for number in range(2)]
    source = await source_for(fleet, 2, prompt(0))
    assert source == {"worker_id": 1, "dp_rank": 0, "blocks": 18, "tier": "device"}
    answer = await pulled(fleet, 2, 0, prompt(0), source)
    assert (tokens(answer), cached(answer)) == (tokens(right[0]), CACHED_TOKENS)
    unaware = await fleet.complete(2, 0, prompt(1))
    assert (tokens(unaware), cached(unaware)) == (tokens(right[1]), 0)
    assert await counted(fleet, 2, "pulled_blocks_total") == 18
    assert await counted(fleet, 1, "given_blocks_total") == 18
    through_nixl = 18 if way == "nixl" else 0
    assert await counted(fleet, 2, "nixl_pulled_blocks_total") == through_nixl
    assert await counted(fleet, 1, "nixl_given_blocks_total") == through_nixl
    reported = [(await fleet.client.get(f"{fleet.endpoints[n]}/blocksets")).json() for n in (1, 2)]
    [exported], [imported] = reported[0]["exported"], reported[1]["imported"]["0"]
    assert imported == exported
    assert (imported["worker_id"], imported["sets"]["0"]["num_blocks"]) == (1, 64)
    assert await counted(fleet, 2, "blocksets_imported") == 1

    async def is_known():
        decision = await fleet.select(prompt(0), allowed_worker_ids=[2])
        return decision["overlap_blocks"] == 18 and "source" not in decision

    await eventually(is_known)


HAND_OVER = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}


async def test_prefill_keeps_the_blocks_for_the_decode_worker(sharing):
    """In vLLM's words: the one's answer is the other's request, whatever is evicted meanwhile."""
    fleet = await sharing()
    first = await fleet.complete(1, 0, prompt(0), **HAND_OVER)
    said = first["kv_transfer_params"]
    assert (said["do_remote_prefill"], said["do_remote_decode"]) == (True, False)
    assert said["source"] == {"worker_id": 1, "dp_rank": 0, "blocks": 18, "tier": "device"}
    assert len(said["leased"]["block_indices"]) == 18
    assert await counted(fleet, 1, "leased_blocks") == 18
    for number in range(1, 7):
        await fleet.complete(1, 0, prompt(number))
    answer = await fleet.complete(2, 0, prompt(0), kv_transfer_params=said)
    assert (tokens(answer)[0], cached(answer)) == (tokens(first)[0], CACHED_TOKENS)
    assert "kv_transfer_params" not in answer
    assert await counted(fleet, 1, "leased_gets_total") == 2
    assert await counted(fleet, 1, "leases_ended_total") == 1
    assert await counted(fleet, 1, "leased_blocks") == 0
    right = await fleet.complete(1, 0, prompt(0))
    assert tokens(answer) == tokens(right)

    # A lease is of the blocks of its prompt: for another prompt they are not used.
    said = (await fleet.complete(1, 0, prompt(7), **HAND_OVER))["kv_transfer_params"]
    answer = await fleet.complete(2, 0, prompt(8), kv_transfer_params=said)
    assert (cached(answer), tokens(answer)) == (0, tokens(await fleet.complete(1, 0, prompt(8))))


async def test_blocks_are_free_again_if_no_decode_worker_takes_them(sharing):
    fleet = await sharing(workers=1, settings={"share_lease_s": 1.0})
    for number in range(3):
        await fleet.complete(1, 0, prompt(number), **HAND_OVER)
    assert await counted(fleet, 1, "leases_granted_total") == 1  # half of the blocks at most
    assert await counted(fleet, 1, "leases_refused_total") == 2

    async def is_free():
        return await counted(fleet, 1, "leased_blocks") == 0

    await eventually(is_free)
    assert await counted(fleet, 1, "leases_expired_total") == 1


async def test_shared_memory_is_read_where_it_lies(sharing, tmp_path):
    host = {"host-cache-blocks": 200, "host-cache-dir": tmp_path}
    fleet = await sharing(settings={"share_dir": str(tmp_path)}, **host)
    right = [await fleet.complete(1, 0, prompt(0))]

    async def is_stored():
        dump = await fleet.client.get(f"{fleet.endpoints[1]}/dump")
        return len(dump.json()["ranks"]["0"]["host"]) >= 18

    await eventually(is_stored)
    for number in range(1, 8):
        await fleet.complete(1, 0, prompt(number))

    async def is_only_on_the_host():
        decision = await fleet.select(prompt(0), allowed_worker_ids=[2])
        source = decision.get("source")
        return source and (source["blocks"], source["tier"]) == (18, "host_pinned") and source

    source = await eventually(is_only_on_the_host)
    answer = await pulled(fleet, 2, 0, prompt(0), source)
    assert (tokens(answer), cached(answer)) == (tokens(right[0]), CACHED_TOKENS)
    assert await counted(fleet, 1, "mapped_blocks_total") == 18


async def test_sharing_works_over_tls_and_between_ranks(sharing, fleet, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("worker")
    settings = {
        "tls_cert_file": certificate, "tls_key_file": key, "share_ca_file": str(authority.path),
    }  # fmt: skip
    await fleet.client.aclose()
    fleet.client = httpx.AsyncClient(verify=ssl.create_default_context(cafile=authority.path))
    fleet.scheme = "https"
    fleet = await sharing(workers=1, dp_size=2, settings=settings)
    right = await fleet.complete(1, 0, prompt(0))
    source = {"worker_id": 1, "dp_rank": 0, "blocks": 18, "tier": "device"}
    answer = await pulled(fleet, 1, 1, prompt(0), source)
    assert (tokens(answer), cached(answer)) == (tokens(right), CACHED_TOKENS)


async def test_blocks_of_another_order_are_refused_and_computed(sharing, tmp_path):
    fleet = await sharing(workers=1)  # Tokens first.
    right = await fleet.complete(1, 0, prompt(0))
    heads_first = {"kv-page": "hnd", "config": tmp_path / "agent.toml"}
    fleet.add_worker(2, **SMALL, **heads_first)
    await fleet.until_ready(2)

    async def refused():
        answer = await fleet.client.get(f"{fleet.endpoints[2]}/blocksets")
        return answer.json()["refused"]

    [refusal] = await eventually(refused)
    assert refusal["worker_id"] == 1
    assert "kv_page" in refusal["reason"]
    source = {"worker_id": 1, "dp_rank": 0, "blocks": 18, "tier": "device"}
    answer = await pulled(fleet, 2, 0, prompt(0), source)
    assert (tokens(answer), cached(answer)) == (tokens(right), 0)


async def test_stalled_peer_is_not_awaited(sharing):
    fleet = await sharing(settings={"onboard_timeout_s": 4.0})
    right = [await fleet.complete(1, 0, prompt(number)) for number in range(3)]
    sources = [await source_for(fleet, 2, prompt(number)) for number in range(3)]
    first = await pulled(fleet, 2, 0, prompt(0), sources[0])  # connected from now on
    assert cached(first) == CACHED_TOKENS
    fleet.workers[1].pause()
    late = await pulled(fleet, 2, 0, prompt(1), sources[1])
    assert (tokens(late), cached(late)) == (tokens(right[1]), 0)
    fleet.workers[1].kill()
    gone = await pulled(fleet, 2, 0, prompt(2), sources[2])
    assert (tokens(gone), cached(gone)) == (tokens(right[2]), 0)
    assert await counted(fleet, 2, "pull_failures_total") > 0
