"""`kv-router inspect`, against a real router."""

import asyncio
import io
import json

import httpx
import pytest

from router.cli import main
from router.errors import InvalidFieldError
from router.protocol.values import Tier
from router.runtime.security.tls import client_context
from router.sequence.hashing.block_hashes import chain, hash_seed, local_block_hashes, token_array
from router.tools.inspect.arguments import parse_tokens
from support.fleets.direct import DirectEngine, DirectRouter, direct_router
from support.processes.certificates import Authority
from support.processes.servers import equals, eventually, free_port
from support.values.builders import rank

PROMPT = list(range(40))


def hashes(tokens, **seed):
    local = local_block_hashes(token_array(tokens), 4, seed=hash_seed(**seed))
    return chain(local).tolist()


@pytest.fixture
async def fleet(router, eventually):
    """Worker 2 holds 5 of the prompt's 10 blocks on its device, and 2 more on host; worker 3 has
    two ranks, of which the second holds all of it salted.
    """
    workers = [await router.worker(1), await router.worker(2)]
    workers.append(await router.worker(3, data_parallel_size=2))
    names = hashes(PROMPT)
    workers[1].journals[rank(2)].stored(Tier.DEVICE, names[:5], None)
    workers[1].journals[rank(2)].stored(Tier.HOST, names[4:7], names[3])
    workers[2].journals[rank(3, 1)].stored(Tier.DEVICE, hashes(PROMPT, cache_salt="t"), None)
    for worker in workers:
        await worker.deliver()

    async def is_known():
        held = [r["held_blocks"] for r in (await router.view(3))["ranks"]]
        return held == [0, 10] and (await router.view(2))["ranks"][0]["held_blocks"] == 8

    await eventually(is_known)
    return router


@pytest.fixture
def inspect(fleet, capsys):
    async def ask(*question, url=str(fleet.client.base_url)):
        status = await asyncio.to_thread(main, ["inspect", "--url", url, *question])
        said = capsys.readouterr()
        return status, said.out, said.err

    return ask


async def test_a_guarded_router_behind_tls_is_asked_with_token_and_certificate(
    tmp_path, capsys, monkeypatch
):
    authority = Authority(tmp_path)
    (cert_file, key_file), caller = authority.issue("router"), authority.issue("operator")
    tokens, token = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.write_text('[[tokens]]\nname = "o"\ntoken = "a-token-of-o-1234"\nscopes = ["admin"]\n')
    token.write_text("a-token-of-o-1234\n")
    tls = {"tls_cert_file": cert_file, "tls_key_file": key_file}
    router = DirectRouter(token_file=str(tokens), tls_client_ca_file=str(authority.path), **tls)
    url = f"https://127.0.0.1:{router.config.http.http_port}"
    router.client = httpx.AsyncClient(
        base_url=url, verify=client_context(str(authority.path), *caller), timeout=60
    )
    flags = {"token-file": token, "ca-file": authority.path,
             "cert-file": caller[0], "key-file": caller[1]}  # fmt: skip

    async def ask(**without):
        said = [f"--{key}={value}" for key, value in flags.items() if key not in without]
        arguments = ["inspect", "--url", url, *said, "workers"]
        return await asyncio.to_thread(main, arguments), capsys.readouterr().err

    async with router.running():
        assert await ask() == (0, "")
        status, said = await ask(**{"token-file": None})
        assert (status, "authorization: missing" in said) == (1, True)
        assert (await ask(**{"ca-file": None}))[0] == 1
        assert (await ask(**{"cert-file": None, "key-file": None}))[0] == 1
        monkeypatch.setenv("KV_ROUTER_CLIENT_TOKEN_FILE", str(token))
        assert await ask(**{"token-file": None}) == (0, "")
        flags["token-file"] = tmp_path / "nowhere"
        status, said = await ask()
        assert (status, "client_token_file" in said) == (2, True)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(PROMPT))
    return str(path)


def cells(text, first):
    """The columns of the line that begins with these."""
    lines = [line.split() for line in text.splitlines()]
    return next(line for line in lines if line[: len(first)] == first)


async def test_workers_command_shows_the_blocks_of_each_rank(inspect):
    status, text, _ = await inspect("workers")
    assert status == 0
    assert cells(text, ["2", "0"])[6:10] == ["5", "3", "0", "0"]
    assert cells(text, ["3", "1"])[6:10] == ["10", "0", "0", "0"]
    assert cells(text, ["1", "0"])[11] == "exact"


async def test_worker_report_shows_tiers_holes_load_and_bookings(inspect, fleet):
    body = {"token_ids": PROMPT, "request_id": "r1", "allowed_worker_ids": [2]}
    await fleet.post("/select_and_reserve", body)
    status, text, _ = await inspect("worker", "2")
    assert status == 0
    assert "worker 2 (w2): schedulable" in text
    assert "rank 0: exact" in text
    assert "booked: 1 requests, 20 tokens to prefill" in text
    assert "reported: 2 running" in text
    assert cells(text, ["device"])[1:3] == ["5", "0"]
    assert cells(text, ["host"])[1:3] == ["3", "0"]


async def test_blocks_are_listed_with_where_they_are(inspect):
    _, text, _ = await inspect("worker", "2", "--blocks")
    names = hashes(PROMPT)
    blocks = text.partition("block by block:\n")[2].splitlines()
    listed = dict(line.split("  ") for line in blocks)
    where = ["device"] * 4 + ["device host"] + ["host"] * 2
    held = {f"{name:016x}": w for name, w in zip(names, where, strict=False)}
    assert listed == held


async def test_rank_report_is_available_as_json(inspect):
    status, text, _ = await inspect("--json", "rank", "3", "1", "--blocks")
    (reported,) = json.loads(text)["ranks"]
    assert (status, reported["dp_rank"], reported["tiers"]["device"]["blocks"]) == (0, 1, 10)
    assert reported["blocks"] == {"device": sorted(hashes(PROMPT, cache_salt="t"))}
    assert int(reported["tiers"]["device"]["digest"], 16)


async def test_prompt_report_shows_where_each_prefix_breaks(inspect, prompt_file):
    status, text, _ = await inspect("prompt", "--tokens", prompt_file)
    assert status == 0
    assert cells(text, ["2", "0"])[:10] == ["2", "0", "10", "x", "4", "5", "7", "7", "7", "7"]
    assert "at block 7: tokens 28 to 31" in text
    assert "at block 0: tokens 0 to 3" in text
    salted = (await inspect("prompt", "--tokens", prompt_file, "--salt", "t"))[1]
    best = salted.splitlines()[3].split()
    assert best[:10] == ["3", "1", "10", "x", "4", "10", "10", "10", "10", "9"]
    assert "holds every full block" in salted


async def test_prompt_report_says_which_group_of_a_split_it_goes_to(prompt_file, capsys):
    fields = {"use_kv_events": False, "group_splits": "default=blue:1+green:3"}
    async with DirectRouter(**fields).running() as router:
        body = {"worker_id": 1, "endpoint": "http://w", "block_size": 4, "routing_group": "blue"}
        assert (await router.post("/workers", body)).status_code == 201
        asked = ["inspect", "--url", str(router.client.base_url), "prompt", "--tokens", prompt_file]
        assert await asyncio.to_thread(main, asked) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "requests of group default are split: this one goes to blue, whose share is 0.25, by the "
        "beginning of the prompt; no worker for it: green"
    )


async def test_options_may_stand_behind_the_question(fleet, capsys):
    asked = ["inspect", "workers", "--url", str(fleet.client.base_url), "--json"]
    assert await asyncio.to_thread(main, asked) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


async def test_tokens_may_come_from_standard_input(inspect, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("0 1 2\n3, 4"))
    _, text, _ = await inspect("--json", "prompt", "--tokens", "-")
    assert [w["device_blocks"] for w in json.loads(text)["workers"]] == [0, 1, 0, 0]


async def test_unknown_model_is_an_error_unlike_a_cold_prompt(inspect, prompt_file):
    status, _, complaint = await inspect("prompt", "--tokens", prompt_file, "--model", "zz")
    assert status == 1
    assert "zz" in complaint, complaint


async def test_a_block_is_found_however_it_is_written(inspect):
    name = hashes(PROMPT)[6]
    for written in (str(name), hex(name)):
        status, text, _ = await inspect("block", written)
        assert (status, cells(text, ["2", "0"])[4]) == (0, "host")
    assert "no rank holds it" in (await inspect("block", "--", "-5"))[1]
    _, text, _ = await inspect("--json", "block", str(hashes(PROMPT)[0]))
    assert [h["fastest_tier"] for h in json.loads(text)["holders"]] == ["device"]


async def test_unknown_worker_or_block_exits_with_1(inspect):
    status, _, error = await inspect("worker", "9")
    assert (status, "worker 9 not found" in error) == (1, True)
    status, _, error = await inspect("rank", "3", "7")
    assert (status, "worker 3 has no rank 7 (it has 0, 1)" in error) == (1, True)
    status, _, error = await inspect("workers", url=f"http://127.0.0.1:{free_port()}")
    assert (status, "no router there" in error) == (1, True)


async def test_other_server_is_not_taken_for_a_router(inspect, nats_server):
    status, _, error = await inspect("workers", url=f"http://127.0.0.1:{nats_server.port}")
    assert (status, "no router there" in error) == (1, True)


@pytest.mark.parametrize(
    "question",
    [["worker", "x"], ["worker"], ["rank", "1"], ["block", "0xzz"], ["block", str(2**64)], []],
)
def test_invalid_query_exits_with_2(question):
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *question])
    assert stopped.value.code == 2


@pytest.mark.parametrize("text", ["", "[1, -1]", "1 x", "[1.5]", str(2**32), '["1"]'])
def test_invalid_tokens_are_refused(text):
    with pytest.raises(InvalidFieldError) as refused:
        parse_tokens(text)
    assert refused.value.field == "tokens"


def test_a_missing_file_ends_with_2(tmp_path, capsys):
    assert main(["inspect", "prompt", "--tokens", str(tmp_path / "none")]) == 2
    assert "tokens" in capsys.readouterr().err


async def test_direct_router_report_shows_its_engines(capsys):
    engine = DirectEngine(5)
    async with direct_router(engine) as router:
        engine.cache(range(8))
        await eventually(lambda: equals(router.overlaps(range(8)), {(5, 0): 2}))
        assert (await router.post("/workers", {"worker_id": 6})).status_code == 201
        url = str(router.client.base_url)
        assert await asyncio.to_thread(main, ["inspect", "--url", url, "worker", "5"]) == 0
        reported = capsys.readouterr().out
        for question in (["worker", "6"], ["workers"]):
            assert await asyncio.to_thread(main, ["inspect", "--url", url, *question]) == 0
        listed = capsys.readouterr().out
    assert (
        f"engine: following, {engine.endpoint(0)} (replay {engine.replay_endpoint(0)})" in reported
    )
    assert cells(reported, ["device"])[1] == "2"
    assert "worker 6" in listed
    assert "not chosen: endpoint is required" in listed
    assert cells(listed, ["6", "-", "worker", "6"])[6] == "incomplete"
