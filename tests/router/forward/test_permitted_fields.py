"""What callers may make engines do, and learn of each other's prompts, through a forwarder."""

import json
from contextlib import asynccontextmanager

import pytest

from router.forward.apis.api import APIS, COMPLETIONS
from router.forward.apis.passed import PASSED
from router.forward.errors import SteeringRefusedError
from router.forward.permitted_fields import OF_TENANTS, STEERING, permitted
from router.forward.request_body import read_completion_request
from router.runtime.security.caller import ANYBODY, Caller
from support.engines.upstreams import response
from support.fleets.forwarding import Scene
from support.values.token_files import token_lines, token_of

ACME, EVIL, GATEWAY, STEERER = map(token_of, ("acme", "evil", "gateway", "steerer"))
TOKENS = "".join(
    (
        token_lines("acme", "route", tenant="acme"),
        token_lines("evil", "route", tenant="evil"),
        token_lines("gateway", "route metrics"),
        token_lines("steerer", "route steer"),
    )
)
JSON = "content-type: application/json"
TENANT = Caller("t", frozenset(("route",)), "t")
TOKEN = Caller("g", frozenset(("route",)))


def asked(**fields):
    body = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    return read_completion_request(COMPLETIONS, body)


@pytest.mark.parametrize("name", sorted(STEERING))
def test_steering_field_is_refused_without_the_scope(name):
    for caller in (TENANT, TOKEN):
        with pytest.raises(SteeringRefusedError) as refusal:
            permitted(asked(**{name: None}), caller)
        assert refusal.value.field == name
    assert permitted(asked(**{name: 1}), ANYBODY) == (asked(**{name: 1}), [])


def test_priority_hint_is_refused_without_the_scope():
    hint = {"nvext": {"agent_hints": {"priority": 0, "osl": 7}}}
    with pytest.raises(SteeringRefusedError, match=r"nvext\.agent_hints\.priority"):
        permitted(asked(**hint), TOKEN)
    osl = {"nvext": {"agent_hints": {"osl": 7}}}
    assert permitted(asked(**osl), TENANT) == (asked(**osl), [])


def test_unknown_fields_of_tenants_alone_are_dropped():
    given = asked(temperature=0.5, next_years_field=1, chat_template="x", also=[2])
    assert permitted(given, TOKEN) == (given, [])
    kept, dropped = permitted(given, TENANT)
    assert dropped == ["also", "next_years_field"]
    assert kept == asked(temperature=0.5, chat_template="x")


def test_tables_do_not_overlap():
    assert OF_TENANTS.keys() == {*APIS, *PASSED}
    assert all(OF_TENANTS[path].isdisjoint(STEERING) for path in PASSED)
    for api in APIS.values():
        assert not OF_TENANTS[api.path] & STEERING
        assert OF_TENANTS[api.path] >= {api.prompt, *api.prompt_fields, *api.limits}


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_steering_holds_for_every_api(api):
    prompt = {"prompt": "x", "messages": [{}], "input": "x"}[api.prompt]
    fields = {api.prompt: prompt, "stream": False}
    given = [
        read_completion_request(api.path, json.dumps({**fields, **more}).encode())
        for more in ({}, {"x_new": 1}, {"priority": 1})
    ]
    assert permitted(given[1], TENANT) == (given[0], ["x_new"])
    with pytest.raises(SteeringRefusedError):
        permitted(given[2], TENANT)


# ── A forwarder with tokens ──────────────────────────────────────────────────────────────────────


async def engine(upstream, writer):
    """One token a character."""
    head, body = upstream.requests[-1]
    answer = {"id": "x", "choices": [{"index": 0, "text": "hi"}]}
    if " /tokenize " in head:
        answer = {"tokens": [ord(each) for each in json.loads(body)["prompt"]]}
    writer.write(response(json.dumps(answer).encode(), "200 OK", JSON))
    await writer.drain()


@asynccontextmanager
async def guarded(nats_server, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with Scene.of(nats_server.url, {1: engine}, token_file=str(path)) as its:
        yield its


async def complete(its, token, **fields):
    headers = {"authorization": f"Bearer {token}"}
    return await its.forward.complete(headers=headers, **{"prompt": "hello", **fields})


def sent(its, path):
    """The bodies that the engine was sent at a path."""
    requests = its.engines[1].requests
    return [json.loads(body) for head, body in requests if f" {path} " in head]


async def test_callers_steer_no_engine_without_the_scope(nats_server, tmp_path):
    params = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 5600}
    async with guarded(nats_server, tmp_path) as its:
        for token in (ACME, GATEWAY):
            for field in ({"kv_transfer_params": params}, {"priority": -100}):
                answer = await complete(its, token, **field)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (422, "steering_refused")
                assert error["param"] == next(iter(field))
        assert its.engines[1].requests == []
        answer = await complete(its, STEERER, kv_transfer_params=params, priority=-100)
        assert answer.status_code == 200
        [body] = sent(its, "/v1/completions")
        assert (body["kv_transfer_params"], body["priority"]) == (params, -100)


async def test_fields_in_no_table_are_dropped_for_tenants_with_a_warning(nats_server, tmp_path):
    async with guarded(nats_server, tmp_path) as its:
        fields = {"temperature": 0, "cache_salt": "acme", "x_new": 1, "bad\r\nname": 2}
        for _ in range(4):  # also once bodies are cached
            answer = await complete(its, ACME, **fields)
            assert answer.status_code == 200
            warning = "2 dropped; no tenant may send x_new"
            assert answer.headers["x-dropped-fields"] == warning
        its.forward.client.headers["authorization"] = f"Bearer {GATEWAY}"
        assert await its.forward.metric("kv_router_forward_dropped_fields_total") == 8
        for body in sent(its, "/v1/completions"):
            assert body["temperature"] == 0
            assert body.keys().isdisjoint({"x_new", "bad\r\nname"})
        answer = await complete(its, GATEWAY, x_new=1)
        assert "x-dropped-fields" not in answer.headers
        assert sent(its, "/v1/completions")[-1]["x_new"] == 1


async def test_forbidden_request_is_refused_before_it_is_tokenized(nats_server, tmp_path):
    async with guarded(nats_server, tmp_path) as its:
        answer = await complete(its, EVIL, cache_salt="acme")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert its.engines[1].requests == []


async def test_prompt_cached_for_one_tenant_or_salt_is_unknown_to_another(nats_server, tmp_path):
    async with guarded(nats_server, tmp_path) as its:
        for count, token, salt in (
            (1, ACME, "acme"), (1, ACME, "acme"),
            (2, EVIL, "evil"), (2, EVIL, "evil"),
            (3, GATEWAY, None), (4, GATEWAY, "acme"), (4, GATEWAY, "acme"),
        ):  # fmt: skip
            answer = await complete(its, token, cache_salt=salt)
            assert answer.status_code == 200, answer.text
            assert len(sent(its, "/tokenize")) == count
