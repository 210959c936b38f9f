"""A process that forwards, with a tokenizer of its own, before engines that agree or do not."""

import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from router.errors import ConfigError
from router.forward.config import ForwardConfig
from router.forward.request_body import read_completion_request
from router.forward.service import ForwardService
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.token_cache import TokenCache
from router.runtime.process.settings import configured
from support.engines.tokenizing_engine import TokenizingEngine
from support.engines.trained import byte_level, write_tokenizer
from support.fleets.forwarding import RunningForward, Scene
from support.processes.running import RunningRouter
from support.processes.servers import eventually

FOLDER = Path(__file__).parents[3] / "vectors/chat_templates"
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
QUERY = {"nvext": {"annotations": ["query_instance_id"]}}


def tokenizer(name="chatml"):
    return LocalTokenizer(read_files(str(FOLDER / name)), TokenCache(100_000))


@asynccontextmanager
async def scene(nats_server, *engines, **fields):
    fields = {"tokenizer": str(FOLDER / "chatml"), **fields}
    async with RunningRouter(nats_server.url).running() as router, AsyncExitStack() as stack:
        forward = RunningForward(str(router.client.base_url), **fields)
        its = Scene(router, forward)
        for worker_id, engine in enumerate(engines, 1):
            its.engines[worker_id] = await stack.enter_async_context(engine.running())
            await router.worker(worker_id, endpoint=engine.url)
        await stack.enter_async_context(forward.running())
        yield its


async def reported(its, checked=None, **expected):
    """Once every worker is checked, and the detail of readiness says so of each of these kinds."""

    async def says():
        text = (await its.forward.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if 'tokenizer_workers{kind="chat"' in line]
        if sum(float(line.split()[-1]) for line in lines) < (checked or len(its.engines)):
            return None
        detail = (await its.forward.client.get("/ready?verbose")).json()["tokenizers"]
        breaker = detail["standing"].get("default", {})
        return detail if expected.items() <= breaker.items() and breaker else None

    return await eventually(says)


async def tokens(its, path="/v1/chat/completions", **fields):
    """The tokens that a prompt is placed by. Returns None if they are unknown."""
    answer = await its.forward.post(path, {**(CHAT if "chat" in path else {}), **fields, **QUERY})
    assert answer.status_code == 200, answer.text
    return answer.json()["nvext"].get("token_ids")


async def tokenizations(its, outcome):
    return await its.forward.metric(f'kv_router_forward_tokenizations_total{{outcome="{outcome}"}}')


async def test_agreeing_engines_are_not_queried(nats_server):
    engine = TokenizingEngine(tokenizer())
    async with scene(nats_server, engine) as its:
        kinds = dict.fromkeys(("text", "chat", "parts", "tools", "continued"), "agrees")
        assert (await reported(its, **kinds))["problems"] == []
        asked = len(engine.asked)
        _, expected = tokenizer().tokens(as_asked(CHAT))
        assert await tokens(its) == expected
        long = "word " * 4_000  # in a thread
        found = await tokens(its, "/v1/completions", model="default", prompt=long)
        assert found == tokenizer().text_tokens(long)
        assert await tokens(its, "/v1/completions", model="default", prompt=long) == found
        assert len(engine.asked) == asked
        assert await tokenizations(its, "local") == 3
        line = 'kv_router_forward_tokenizer_tokens_total{outcome="known"}'
        assert await its.forward.metric(line) >= len(found)
        line = 'kv_router_forward_tokenizer_workers{kind="chat",model="default",outcome="agrees"}'
        assert await its.forward.metric(line) == 1


async def test_with_a_differing_engine_engines_are_queried(nats_server):
    """A token in front of everything, as where one side adds a beginning of text."""
    agrees, differs = TokenizingEngine(tokenizer()), TokenizingEngine(tokenizer(), front=[9])
    async with scene(nats_server, agrees, differs) as its:
        detail = await reported(its, text="differs", chat="differs")
        assert "worker 2 of 'default': text: only the engine begins with token 9" in str(detail)
        asked = len(agrees.asked) + len(differs.asked)
        assert (await tokens(its))[-5:] == tokenizer().tokens(as_asked(CHAT))[1][-5:]
        assert len(agrees.asked) + len(differs.asked) == asked + 1
        assert await tokenizations(its, "asked") == 1


async def test_engine_differing_in_chats_may_agree_on_texts(nats_server):
    other = read_files(str(FOLDER / "chatml"))
    template = other.templates["default"].replace("im_start|>assistant", "im_start|>model")
    tampered = LocalTokenizer(
        structs.replace(other, templates={"default": template}), TokenCache(1000)
    )
    async with scene(nats_server, TokenizingEngine(tampered)) as its:
        detail = await reported(its, text="agrees", chat="differs", parts="differs")
        assert "is" in detail["problems"][0]
        assert await tokens(its, "/v1/completions", model="default", prompt="a b")
        assert await tokenizations(its, "local") == 1


async def test_without_an_engines_tokens_ours_are_unverified(nats_server):
    async with scene(nats_server, TokenizingEngine(None)) as its:
        await reported(its, text="unverified", chat="unverified")
        assert await tokens(its) == tokenizer().tokens(as_asked(CHAT))[1]
        for _ in range(3):  # it counts 7 tokens
            assert (await its.forward.post("/v1/chat/completions", CHAT)).status_code == 200

        async def is_miscounted():
            detail = (await its.forward.client.get("/ready?verbose")).json()["tokenizers"]
            return detail["miscounted"] == ["default: /v1/chat/completions"]

        await eventually(is_miscounted)
        assert await tokens(its) is None


async def test_engine_that_refuses_our_tokens_does_not_agree(nats_server):
    async with scene(nats_server, TokenizingEngine(tokenizer(), refuses=True)) as its:
        detail = await reported(its, text="agrees", chat="differs")
        assert "only the engine refuses a prompt" in str(detail["problems"])
        assert await tokens(its) is None  # placed by length alone
        assert await tokenizations(its, "failed") == 1


async def test_a_worker_that_comes_later_is_checked(nats_server):
    first, second = TokenizingEngine(tokenizer()), TokenizingEngine(tokenizer(), front=[5])
    async with scene(nats_server, first) as its, second.running():
        await reported(its, chat="agrees")
        assert await tokens(its) == tokenizer().tokens(as_asked(CHAT))[1]
        await its.router.worker(2, endpoint=second.url)
        await reported(its, chat="differs")


async def test_hanging_engine_does_not_delay_the_check(nats_server):
    hanging, other = TokenizingEngine(tokenizer(), hangs=True), TokenizingEngine(tokenizer())
    async with scene(nats_server, hanging) as its, other.running():
        await eventually(lambda: hanging.began)
        await its.router.worker(2, endpoint=other.url)
        await reported(its, checked=1, chat="agrees")


async def test_other_block_size_is_a_problem_and_counted(nats_server):
    async with scene(nats_server, TokenizingEngine(tokenizer(), block_size=99)) as its:
        detail = await reported(its, chat="agrees")
        (problem,) = detail["problems"]
        assert problem.endswith("tokens in the router, of 99 in the engine")
        line = "kv_router_forward_tokenizer_mismatched_block_sizes"
        assert await its.forward.metric(line) == 1


NO_MESSAGES = [
    ([5], "messages[0]", "Invalid type for 'messages[0]': expected object, but got int"),
    ([{"content": "x"}], "messages[0]", "Missing required parameter: 'messages[0].role'."),
    ([{"role": 5}], "messages[0].role", "expected str, but got int instead."),
    ([{"role": "user", "content": 5}], "messages[0].content", "but got int instead."),
    ([{"role": "user", "content": [5]}], "messages[0].content[0]", "but got int instead."),
]


async def test_messages_that_are_none_are_refused_as_openai_does(nats_server):
    async with scene(nats_server, TokenizingEngine(tokenizer())) as its:
        await reported(its, chat="agrees")
        for messages, param, message in NO_MESSAGES:
            answer = await its.forward.post("/v1/chat/completions", {**CHAT, "messages": messages})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert message in error["message"]
            assert error["type"] == "invalid_request_error"
        # What a role may be is for the template to say.
        odd = [{"role": "x", "content": None}, *CHAT["messages"]]
        answer = await its.forward.post("/v1/chat/completions", {**CHAT, "messages": odd})
        assert answer.status_code == 200


async def test_template_error_is_a_refusal(nats_server):
    engine = TokenizingEngine(tokenizer("mistral"))
    async with scene(nats_server, engine, tokenizer=f"default={FOLDER / 'mistral'}") as its:
        await reported(its, chat="agrees")
        twice = {**CHAT, "messages": CHAT["messages"] * 2}
        answer = await its.forward.post("/v1/chat/completions", twice)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "messages"
        assert "roles must alternate user/assistant" in error["message"]


async def test_images_are_for_the_engine_to_count(nats_server):
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
    async with scene(nats_server, TokenizingEngine(None)) as its:
        await reported(its, chat="unverified")
        assert await tokens(its, messages=messages) is None
        answer = await its.forward.post("/v1/chat/completions", {**CHAT, "messages": messages})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("/nowhere", "/nowhere: No such file"),
        ("m=", "MODEL=PATH"),
        ("=x", "MODEL=PATH"),
        ("a={chatml},,b={chatml}", "MODEL=PATH"),
        ("{chatml},{chatml}", "two for all other models"),
        ("m={chatml},m={chatml}", "two for model 'm'"),
        ("{broken}", "a file of `tokenizers`"),
        ("{config}", "tokenizer_config.json"),
        ("{template}", "chat template 'default'"),
        ("{several}", "chat_template: Expected"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_said_at_start(setting, said, tmp_path):
    good = byte_level()
    paths = {"chatml": FOLDER / "chatml", "broken": tmp_path / "broken"}
    write_tokenizer(paths["broken"], good)
    (paths["broken"] / "tokenizer.json").write_text("{")
    for name, config in (("config", None), ("template", "{% if %}"), ("several", 5)):
        paths[name] = write_tokenizer(tmp_path / name, good, chat_template=config)
    (paths["config"] / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError) as caught:
        ForwardService(configured(ForwardConfig, tokenizer=setting.format(**paths)))
    assert caught.value.key == "tokenizer"
    assert said in str(caught.value)


def as_asked(body):
    return read_completion_request("/v1/chat/completions", json.dumps(body).encode())
