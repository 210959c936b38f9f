"""Attacks of a tenant on another, on engines and on the capacity of all, against every process."""

import pytest

from attack.guarded_fleet import ATTACKER, GATEWAY, KEY, OPERATOR, SLOW, VICTIM
from router.sequence.hashing.block_hashes import hash_seed, sequence_hashes, token_array
from support.processes.servers import until

pytestmark = pytest.mark.attack

PROMPT = list(range(64))
TEXT = "What is the meaning of this? " * 4
COMPLETION = {"model": "default", "prompt": TEXT, "max_tokens": 1}


def salted(name, **fields):
    return {"token_ids": PROMPT, "cache_salt": name, **fields}


def test_salts_and_hashes_of_another_tenant_are_refused(fleet):
    hashes = {"sequence_hashes": [1, 2, 3, 4], "isl_tokens": 64, "cache_salt": ATTACKER}
    probes = ({"token_ids": PROMPT}, salted(VICTIM), hashes)
    with fleet.client("router", ATTACKER) as client:
        for path in ("/select", "/select_and_reserve", "/overlap_scores", "/potential_loads"):
            for number, probe in enumerate(probes):
                reply = client.ask("POST", path, {**probe, "request_id": f"x{number}"})
                assert (reply.status, reply.code) == (403, "forbidden")
        reply = client.ask("POST", "/select", salted(ATTACKER, tenant=VICTIM))
        assert (reply.status, reply.code) == (403, "forbidden")
        for path in ("/select", "/dashboard/look"):
            look = {"text": TEXT, "cache_salt": VICTIM}
            assert client.ask("POST", path, look).status in (403, 422)
    with fleet.client("indexer", ATTACKER) as client:
        assert client.ask("POST", "/query", salted(VICTIM)).status == 403
        assert client.ask("POST", "/query_by_hash", {"block_hashes": [1]}).status == 403


def tokenizations(fleet, process):
    rows = fleet.metrics(process).splitlines()
    return [each for each in rows if each.startswith("kv_router_forward_tokenizations_total")]


@pytest.mark.parametrize("process", ["forwarder", "tokenizing", "worker"])
def test_completions_under_anothers_salt_are_refused_before_tokenization(fleet, process):
    """Also at an engine itself, if a tenant's token is known there."""
    chat = {"messages": [{"role": "user", "content": TEXT}], "model": "default", "max_tokens": 1}
    tokenized = tokenizations(fleet, process)
    bodies = {"/v1/completions": COMPLETION, "/v1/chat/completions": chat}
    if process != "worker":  # its engine does not serve the APIs of agents
        responses = {"input": TEXT, "model": "default"}
        bodies |= {"/v1/messages": chat, "/v1/messages/count_tokens": chat}
        bodies["/v1/responses"] = responses
    with fleet.client(process, ATTACKER) as client:
        for path, body in bodies.items():
            for salt in (VICTIM, None):
                reply = client.ask("POST", path, {**body, "cache_salt": salt})
                assert (reply.status, reply.code) == (403, "forbidden")
    assert tokenizations(fleet, process) == tokenized


def test_requests_and_selections_of_another_tenant_cannot_be_used(fleet):
    with fleet.client("router", VICTIM) as victim, fleet.client("router", ATTACKER) as attacker:
        booked = victim.ask("POST", "/select_and_reserve", salted(VICTIM, request_id="r"))
        assert booked.status == 200
        assert victim.ask("POST", "/select", salted(VICTIM, selection_id="s")).status == 200
        for stolen in ("r", "victim/r", "victim%2Fr", "../victim/r", "r%00"):
            path = f"/reservations/{stolen}"
            assert attacker.ask("DELETE", path).status in (403, 404)
            for step in ("prefill_complete", "output_block"):
                assert attacker.ask("POST", f"{path}/{step}", {}).status in (403, 404)
            steps = {"steps": [{"step": "free", "request_id": stolen}]}
            [result] = attacker.ask("POST", "/reservations:batch", steps).json()["results"]
            assert result["status"] == 404
        for selection in ("s", "victim/s"):
            reply = attacker.ask("POST", "/reservations", {"selection_id": selection})
            assert reply.status == 404
        assert victim.ask("POST", "/reservations", {"selection_id": "s"}).status == 201
        for request_id in "rs":
            assert victim.ask("DELETE", f"/reservations/{request_id}").status == 200


@pytest.mark.parametrize("process", ["forwarder", "tokenizing"])
def test_callers_steer_no_engine(fleet, process):
    """A transfer from a host of the caller's choice, priority, and fields of next year."""
    params = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 5600}
    for name, salt in ((ATTACKER, ATTACKER), (GATEWAY, None)):
        with fleet.client(process, name) as client:
            for field in (
                {"kv_transfer_params": params}, {"priority": -100},
                {"nvext": {"agent_hints": {"priority": 9}}},
            ):  # fmt: skip
                reply = client.ask(
                    "POST", "/v1/completions", {**COMPLETION, "cache_salt": salt, **field}
                )
                assert (reply.status, reply.code) == (422, "steering_refused")
    with fleet.client(process, ATTACKER) as client:
        unknown = {"x_next_year": 1, "bad\r\nname": 2}
        body = {**COMPLETION, "cache_salt": ATTACKER, **unknown}
        reply = client.ask("POST", "/v1/completions", body)
    assert dict(reply.headers)["x-dropped-fields"] == "2 dropped; no tenant may send x_next_year"


def test_tenant_goes_ahead_of_no_other(fleet):
    with fleet.client("router", ATTACKER) as client:
        for field, said in (
            ({"strict_priority": 1}, "strict_priority"),
            ({"router_config_override": {"track_prefill_tokens": False}}, "track_prefill_tokens"),
        ):
            body = {"token_ids": PROMPT, "cache_salt": ATTACKER, **field}
            for path in ("/select", "/select_and_reserve"):
                reply = client.ask("POST", path, body)
                assert reply.status == 403
                assert said in reply.json()["error"]


def test_batches_evade_no_rate(fleet):
    with fleet.client("router", SLOW) as client:
        batch = {"requests": [{"token_ids": PROMPT}] * 3}
        assert client.ask("POST", "/select:batch", batch).status == 200
        reply = client.ask("POST", "/select", {"token_ids": PROMPT})
        assert (reply.status, reply.code) == (429, "rate_limited")
        assert int(dict(reply.headers)["retry-after"]) > 1


def test_hashes_of_blocks_on_the_bus_and_in_dumps_are_keyed(fleet):
    """One who knows a prompt cannot find it in a dump, or on the bus."""
    with fleet.client("forwarder", VICTIM) as victim, fleet.client("router", OPERATOR) as operator:
        body = {**COMPLETION, "prompt": TEXT, "cache_salt": VICTIM}
        assert victim.ask("POST", "/v1/completions", body).status == 200
        until(lambda: b"block_hash" in operator.ask("GET", "/dump").body)
        dump = operator.ask("GET", "/dump").body
        seed = hash_seed(cache_salt=VICTIM)
        public = sequence_hashes(token_array(list(TEXT.encode())), 16, seed=seed).tolist()
        # They are the right ones: an operator finds the block by its public name.
        assert operator.ask("GET", f"/blocks/{public[4]}").json()["holders"]
    assert [each for each in public if str(each).encode() in dump] == []
    assert KEY.encode() not in dump
