"""Pages of other origins: the named ones reach the endpoint, and no other learns anything."""

import json

import pytest

from router.config.openai import MOST_ORIGINS, CompletionConfig
from router.errors import ConfigError
from router.forward.cors import Cors
from support.engines.upstreams import STREAM_END, STREAM_HEAD, event, response, says
from support.fleets.forwarding import Scene
from support.values.token_files import token_lines, token_of

OURS, OTHER = "https://chat.example.com", "https://evil.example.com"
HEADERS = [
    "content-type: application/json",
    "access-control-allow-origin: *",
    "access-control-allow-credentials: true",
]
ANSWERS = says(response(json.dumps({"id": "x", "choices": []}).encode(), "200 OK", *HEADERS))
STREAMS = says(STREAM_HEAD, event({"id": "i", "choices": []}), event(b"[DONE]"), STREAM_END)
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
    "sec-fetch-site": "cross-site",
}


@pytest.fixture
def scene(nats_server):
    def of(script, **fields):
        return Scene.of(nats_server.url, {1: script}, **fields)

    return of


def cors_of(answer):
    return {
        n: v for n, v in answer.headers.items() if n.startswith("access-control") or n == "vary"
    }


def allowed_to(answer):
    return cors_of(answer).get("access-control-allow-origin")


async def ask(its, method, path, origin, **fields):
    headers = {"origin": origin, "sec-fetch-site": "cross-site", **fields.pop("headers", {})}
    return await its.forward.client.request(method, path, headers=headers, **fields)


async def test_without_the_setting_no_page_is_let_in(scene):
    async with scene(ANSWERS) as its:
        preflight = await ask(its, "OPTIONS", "/v1/completions", OURS, headers=PREFLIGHT)
        assert (preflight.status_code, cors_of(preflight)) == (405, {})
        for path in ("/v1/completions", "/v1/embeddings"):
            answer = await ask(its, "POST", path, OURS, json={"prompt": "x"})
            assert (answer.status_code, cors_of(answer)) == (403, {})
        own = await its.forward.complete()
        assert (own.status_code, cors_of(own)) == (200, {}), "nor by the engine's headers"


async def test_pages_of_named_origins_are_let_in(scene):
    async with scene(ANSWERS, cors_origins=f"http://localhost:3000, {OURS}") as its:
        for path in ("/v1/completions", "/v1/models", "/nothing"):
            preflight = await ask(its, "OPTIONS", path, OURS, headers=PREFLIGHT)
            assert (preflight.status_code, preflight.content) == (204, b"")
            assert cors_of(preflight) == {
                "vary": "Origin",
                "access-control-allow-origin": OURS,
                "access-control-allow-methods": "GET, POST, DELETE",
                "access-control-allow-headers": PREFLIGHT["access-control-request-headers"],
                "access-control-max-age": "600",
            }
        for origin in (OURS, "http://localhost:3000"):
            for path in ("/v1/completions", "/v1/embeddings"):
                answer = await ask(its, "POST", path, origin, json={"prompt": "x"})
                assert (answer.status_code, allowed_to(answer)) == (200, origin)
                exposed = answer.headers["access-control-expose-headers"]
                assert "x-worker-id" in exposed
                assert answer.headers["vary"] == "Origin"
                assert "access-control-allow-credentials" not in answer.headers
        assert not any("origin:" in head for head, _ in its.engines[1].requests)
        models = await ask(its, "GET", "/v1/models", OURS)
        refused = await ask(its, "POST", "/v1/completions", OURS, content=b"{", headers=JSON)
        missing = await ask(its, "GET", "/nothing", OURS)
        for answer, status in ((models, 200), (refused, 400), (missing, 404)):
            assert (answer.status_code, allowed_to(answer)) == (status, OURS)


JSON = {"content-type": "application/json"}


async def test_pages_of_other_origins_stay_out(scene):
    async with scene(ANSWERS, cors_origins=OURS) as its:
        others = (
            OTHER,
            "null",
            f"{OURS}.evil.com",
            OURS.upper(),
            f"{OURS}:8443",
            "http" + OURS[5:],
        )
        for origin in others:
            preflight = await ask(its, "OPTIONS", "/v1/completions", origin, headers=PREFLIGHT)
            assert preflight.status_code in (404, 405)
            answer = await ask(its, "POST", "/v1/completions", origin, json={"prompt": "x"})
            assert answer.status_code == 403
            for each in (preflight, answer, await ask(its, "GET", "/v1/models", origin)):
                assert cors_of(each) == {"vary": "Origin"}, origin
        plain = await its.forward.complete()
        assert (plain.status_code, cors_of(plain)) == (200, {"vary": "Origin"})


async def test_stream_and_refusal_reach_a_page_of_a_named_origin(scene, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(token_lines("page", "route"))
    async with scene(STREAMS, cors_origins=OURS, token_file=str(tokens)) as its:
        preflight = await ask(its, "OPTIONS", "/v1/completions", OURS, headers=PREFLIGHT)
        assert preflight.status_code == 204, "browsers send it without the token"
        other = await ask(its, "OPTIONS", "/v1/completions", OTHER, headers=PREFLIGHT)
        assert other.status_code == 401
        body = {"model": "default", "prompt": "x", "stream": True}
        refused = await ask(its, "POST", "/v1/completions", OURS, json=body)
        assert (refused.status_code, allowed_to(refused)) == (401, OURS)
        token = {"authorization": f"Bearer {token_of('page')}"}
        streamed = await ask(its, "POST", "/v1/completions", OURS, json=body, headers=token)
        assert (streamed.status_code, allowed_to(streamed)) == (200, OURS)
        assert streamed.text.endswith("data: [DONE]\n\n")


async def test_origin_of_the_endpoint_is_not_one_of_the_router(nats_server):
    async with Scene.in_router(nats_server.url, {1: ANSWERS}, cors_origins=OURS) as its:
        assert allowed_to(await ask(its, "POST", "/v1/completions", OURS, json={"prompt": "x"}))
        headers = {"origin": OURS, "sec-fetch-site": "cross-site"}
        answer = await its.router.client.post("/select", json={"token_ids": [1]}, headers=headers)
        assert (answer.status_code, cors_of(answer)) == (403, {})


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "https://*.example.com",
        "https://a.example.com/",
        "https://a.example.com/x",
        "https://A.example.com",
        "https://a.example.com:443",
        "http://a.example.com:80",
        "https://a.example.com:0",
        "https://a.example.com:99999",
        "https://user@a.example.com",
        "ftp://a.example.com",
        "a.example.com",
        "https://",
        "https://a.example.com\r\nx: y",
    ],
)
def test_anything_but_an_exact_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="cors_origins"):
        _ = CompletionConfig(cors_origins=f"https://ok.example.com,{origin}").origins


def test_origins_are_read_as_browsers_send_them():
    text = " https://a.example.com,http://localhost:3000 ,http://[::1]:8080,, "
    found = CompletionConfig(cors_origins=text).origins
    assert found == {b"https://a.example.com", b"http://localhost:3000", b"http://[::1]:8080"}
    many = ",".join(f"http://h{index}" for index in range(MOST_ORIGINS + 1))
    with pytest.raises(ConfigError, match="at most"):
        _ = CompletionConfig(cors_origins=many).origins


@pytest.mark.parametrize("names", [b"", b"a b", b"x\x00", b"n" * 65, b",".join([b"x"] * 65)])
def test_odd_names_of_headers_are_not_allowed_by_a_preflight(names):
    cors = Cors(frozenset((b"http://a",)))
    asked = [
        (b"origin", b"http://a"),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", names),
    ]
    answer = dict(cors.preflight("OPTIONS", asked))
    assert b"access-control-allow-headers" not in answer
    assert cors.preflight("GET", asked) is None
    assert cors.preflight("OPTIONS", asked[:1]) is None
    assert Cors(frozenset()).preflight("OPTIONS", asked) is None
