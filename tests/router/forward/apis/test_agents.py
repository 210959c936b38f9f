"""The APIs of agents, before engines that serve them as vLLM does."""

import json

import httpx
import pytest

from support.engines.agent_engine import AgentEngine
from support.fleets.agent_scenes import BODIES, agent_scene, body_of
from support.fleets.forwarding import lines
from support.processes.servers import eventually

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
OF_EVENTS = [MESSAGES, RESPONSES]


@pytest.fixture
def scene(nats_server):
    def of(*engines, **fields):
        return agent_scene(nats_server.url, *engines, **fields)

    return of


async def test_whole_and_streamed_answers_are_those_of_the_engine_byte_for_byte(scene):
    engine = AgentEngine()
    async with scene(engine) as its, httpx.AsyncClient(base_url=engine.url) as directly:
        for path in BODIES:
            for stream in (False, True):
                body = body_of(path, stream=stream)
                engine.forget()
                expected = await directly.post(path, json=body)
                engine.forget()
                answer = await its.forward.post(f"{path}?beta=true", body)
                assert answer.status_code == expected.status_code == 200
                assert answer.content == expected.content
                assert "\u2028" in answer.text or "\\u2028" in answer.text
                assert answer.headers["content-type"] == expected.headers["content-type"]
        await its.until_free()


@pytest.mark.parametrize("renders", [True, False])
async def test_what_is_cached_is_predicted_exactly_in_every_api(scene, renders):
    """The turns of a conversation share their beginning, also with the other APIs."""
    engine = AgentEngine(renders=renders)
    async with scene(engine) as its:
        for path in BODIES:
            for turn in range(3):
                body = body_of(path)
                name = {"/v1/completions": None, RESPONSES: "input"}.get(path, "messages")
                if name is not None:
                    more = [{"role": "assistant", "content": "1 2 3"}, body[name][-1]]
                    body[name] = [*body[name], *more * turn]
                predicted, cached = await its.predicted(path, body)
                # An answer in a history was never seen there: an engine's count has to confirm it.
                is_new = path == RESPONSES and turn == 1 and not renders
                assert predicted == (0 if is_new else cached)
                assert cached or not turn
                await its.until_heard()
        assert (len(engine.bodies(f"{CHAT}/render")) > 1) == renders
        assert (len(engine.bodies("/tokenize")) > 1) != renders
        assert len(engine.bodies(f"{MESSAGES}/count_tokens")) == (0 if renders else 1)


async def test_engine_that_counts_other_tokens_of_messages_is_believed_nothing(scene):
    """Its count comes before the first answer; once it counts alike, overlap is claimed again."""
    engine = AgentEngine(renders=False, shift=1)
    async with scene(engine) as its:
        for _ in range(2):
            predicted, _ = await its.predicted(MESSAGES, body_of(MESSAGES))
            assert predicted == 0
            await its.until_heard()
        detail = (await its.forward.client.get("/ready?verbose")).json()["tokenizers"]
        assert "m: /v1/messages with blocks, system, tools" in str(detail["prompts"])
        assert "--enable-scale-out" in str(detail["prompts"])
        engine.shift = 0
        await its.predicted(MESSAGES, body_of(MESSAGES))
        await its.until_heard()
        predicted, cached = await its.predicted(MESSAGES, body_of(MESSAGES))
        assert predicted == cached > 0


# ── Images ───────────────────────────────────────────────────────────────────────────────────────


def with_image(path, data, before="before "):
    """A text, an image and a text again."""
    url = f"data:image/png;base64,{data}"
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        image, text = {"type": "image", "source": source}, "text"
    elif path == RESPONSES:
        image, text = {"type": "input_image", "image_url": url}, "input_text"
    else:
        image, text = {"type": "image_url", "image_url": {"url": url}}, "text"
    texts = [{"type": text, "text": said * 40} for said in (before, "behind ")]
    content = [texts[0], image, texts[1]]
    name = "input" if path == RESPONSES else "messages"
    return {"model": "m", name: [{"role": "user", "content": content}], "max_tokens": 3}


async def test_rendered_images_are_predicted_by_their_hashes(scene):
    engine = AgentEngine()
    async with scene(engine) as its:
        for path, one, other in (
            (CHAT, "AAAA", "BBBB"), (MESSAGES, "CCCC", "DDDD"), (RESPONSES, "EEEE", "FFFF")
        ):  # fmt: skip
            for data, is_known in ((one, False), (one, True), (other, False), (other, True)):
                predicted, cached = await its.predicted(path, with_image(path, data))
                assert predicted == cached
                assert (cached > 300) == is_known
                await its.until_heard()


async def test_without_render_nothing_from_an_image_on_is_claimed(scene):
    engine = AgentEngine(renders=False)
    async with scene(engine) as its:
        for path, text in ((CHAT, "before "), (MESSAGES, "earlier ")):
            before = len("<user\n" + text * 40) // 16 * 16
            for number in range(3):
                predicted, cached = await its.predicted(path, with_image(path, "AAAA", text))
                assert predicted == (before if number else 0)
                assert cached >= predicted
                await its.until_heard()
        detail = (await its.forward.client.get("/ready?verbose")).json()["tokenizers"]
        assert "--enable-scale-out" in str(detail["prompts"])


# ── Ends and errors ──────────────────────────────────────────────────────────────────────────────


async def test_client_that_vanishes_frees_its_booking_in_every_api(scene):
    engine = AgentEngine()
    engine.pause_s = 0.05
    async with scene(engine) as its:
        for number, path in enumerate(BODIES, 1):
            body = body_of(path, stream=True, max_tokens=50, max_output_tokens=50)
            async with its.forward.client.stream("POST", path, json=body) as answer:
                await anext(answer.aiter_bytes())
                assert await its.booked()
            await its.until_free()
            await eventually(lambda number=number: engine.gone == number)


async def test_stream_that_its_engine_breaks_off_ends_with_an_error_of_its_api(scene):
    engine = AgentEngine()
    engine.breaks_after = 3
    async with scene(engine) as its:
        for path in OF_EVENTS:
            await _breaks_off(its, path)
        await its.until_free()


async def _breaks_off(its, path):
    answer = await its.forward.post(path, body_of(path, stream=True))
    assert answer.status_code == 200
    *_, last, end = answer.text.split("\n\n")
    assert (last.split("\n")[0], end) == ("event: error", "")
    said = json.loads(lines(last)[0])
    assert said["type"] == "error"
    assert "worker 1" in str(said)
    assert "[DONE]" not in answer.text


async def test_before_the_first_event_another_worker_is_tried(scene):
    broken, sound = AgentEngine(), AgentEngine()
    async with scene(broken, sound) as its:
        for path in OF_EVENTS:
            broken.breaks_after = None
            await its.forward.post(path, body_of(path), headers={"x-worker-id": "1"})
            await its.until_heard()
            broken.breaks_after = 0
            answer = await its.forward.post(path, body_of(path, stream=True))
            assert (answer.headers["x-worker-id"], answer.headers["x-forward-attempts"]) == (
                "2",
                "2",
            )
            assert len(broken.bodies(path)) == 2


async def test_refusals_have_the_format_of_their_api(scene):
    async with scene(AgentEngine()) as its:
        for path in OF_EVENTS:
            await _refuses(its, path)


async def _refuses(its, path):
    for body, status in (
        ({"model": "m"}, 400),
        (body_of(path, model="x"), 404),
        ({**body_of(path), "max_tokens": "x"}, 400),
        ({**body_of(path), "max_tokens": None, "input": "x", "tools": [{"type": "z"}]}, 400),
    ):
        answer = await its.forward.post(path, body)
        assert answer.status_code == status, answer.text
        said = answer.json()
        assert (said.get("type") == "error") == (path == MESSAGES)
        assert said["error"]["message"]
        assert ("param" in said["error"]) == (path == RESPONSES)


async def test_token_of_anthropics_clients_goes_to_engines_as_bearer(scene):
    engine = AgentEngine(key="secret")
    async with scene(engine) as its:
        for path in BODIES:
            answer = await its.forward.post(path, body_of(path), headers={"x-api-key": "secret"})
            assert answer.status_code == 200, path
            answer = await its.forward.post(path, body_of(path), headers={"x-api-key": "wrong"})
            assert (answer.status_code, "Unauthorized" in answer.text) == (401, True)
        count = await its.forward.post(
            f"{MESSAGES}/count_tokens?beta=true",
            {"model": "m", "messages": body_of(MESSAGES)["messages"]},
            headers={"x-api-key": "secret"},
        )
        assert count.json()["input_tokens"] > 20
        await its.until_free()


async def test_switched_off_render_is_said_before_the_first_request(scene, caplog):
    async with scene(AgentEngine(renders=False), probe_interval_s=60.0) as its:

        async def is_said():
            detail = (await its.forward.client.get("/ready?verbose")).json()["tokenizers"]
            return "--enable-scale-out" in str(detail["prompts"])

        await eventually(is_said)
        assert "start vLLM with --enable-scale-out" in caplog.text
        assert [path for path, _ in its.engines[1].asked] == [f"{CHAT}/render"]


async def test_engine_without_an_api_is_passed_over_and_the_refusal_says_so(scene):
    """As of a model for embeddings, or an engine of an earlier version."""
    without, engine = AgentEngine(serves=()), AgentEngine()
    async with scene(without, engine) as its:
        for path in BODIES:
            for _ in range(3):
                answer = await its.forward.post(path, body_of(path))
                assert (answer.status_code, answer.headers["x-worker-id"]) == (200, "2")
            pinned = await its.forward.post(path, body_of(path), headers={"x-worker-id": "1"})
            assert (pinned.status_code, pinned.json()["error"]["code"]) == (404, "route_not_served")
            assert (pinned.json().get("type") == "error") == (path == MESSAGES)
        await its.until_free()


async def test_where_an_engine_chooses_the_rank_nothing_of_it_is_claimed(scene):
    engine = AgentEngine()
    async with scene(engine) as its:
        answer = await its.forward.post(RESPONSES, body_of(RESPONSES))
        assert answer.headers["x-data-parallel-rank"] == "0"
        without_events = {"kv_events_endpoints": None, "replay_endpoints": None}
        ranks = {**engine.registration(2), **without_events, "data_parallel_size": 2}
        assert (await its.router.post("/workers", ranks)).status_code < 300
        for path in (CHAT, RESPONSES):
            target = {"x-worker-id": "2"}
            answer = await its.forward.post(path, body_of(path), headers=target)
            assert answer.headers["x-worker-id"] == "2"
            is_said = "x-data-parallel-rank" in answer.headers
            assert is_said == ("x-predicted-cached-tokens" in answer.headers) == (path == CHAT)
        await its.until_free()
