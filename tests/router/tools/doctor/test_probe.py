"""What the doctor learns from an engine's OpenAI server, and by sending it requests."""

from itertools import count

import pytest

from router.tools.doctor import prober
from support.engines.openai_engine import OpenAiEngine
from support.engines.zmq_engines import Engine, stored
from support.processes.servers import free_port
from support.values.doctoring import examine, says, verdicts, while_repeating

DRAFTS = 'vllm:spec_decode_num_drafts_total{engine="0"}'


@pytest.fixture
def soon(monkeypatch):
    """A probe without an answer need not wait for long."""
    monkeypatch.setattr(prober, "EVENT_WAIT_S", 0.5)


async def probe(engine, **settings):
    zmq = engine.engine
    fields = {"url": engine.url, "probe": True, **settings}
    return await examine(zmq.endpoint, zmq.replay_endpoint, **fields)


async def test_a_healthy_engine_passes_every_probe():
    async with OpenAiEngine().running() as engine:
        seen, found = await probe(engine, block_size=4, model="m")
    assert {str(f.verdict) for f in found.values()} == {"ok"}
    says(found, "server", "ok", "vLLM 0.32.0")
    says(found, "cache config", "ok", "1000 blocks of 4 tokens")
    says(found, "probe", "ok", "3 blocks was published")
    says(found, "reuse", "ok", "12 tokens from the cache")
    says(found, "salt", "ok")
    says(found, "chat template", "ok", "adds 2 tokens", "/tokenize")
    assert (seen.model, seen.engine) == ("m", "vllm")


@pytest.mark.usefixtures("soon")
async def test_silence_after_a_request_is_wrong():
    async with OpenAiEngine(is_silent=True).running() as engine:
        _, found = await probe(engine)
    says(found, "probe", "wrong", "no event was published", '"enable_kv_cache_events":true')
    says(found, "live events", "wrong", "although requests were served")


@pytest.mark.usefixtures("soon")
async def test_an_engine_that_reuses_nothing_is_wrong():
    async with OpenAiEngine(has_caching=False).running() as engine:
        _, found = await probe(engine)
    says(found, "prefix caching", "wrong", "--enable-prefix-caching")
    says(found, "reuse", "wrong", "nothing from the cache", "--enable-prefix-caching")


async def test_an_engine_that_drafts_tokens_is_a_warning():
    text = 'vllm:cache_config_info{block_size="4",num_gpu_blocks="1000"} 1.0\n'
    async with OpenAiEngine(metrics_text=f"{text}{DRAFTS} 0.0\n").running() as engine:
        _, found = await probe(engine)
    says(found, "drafts", "warning", "a block less", "eagle_groups")


async def test_reuse_is_read_from_metrics_where_answers_do_not_say():
    async with OpenAiEngine(reports_cached=False).running() as engine:
        _, found = await probe(engine)
    says(found, "reuse", "ok", "12 tokens")


async def test_a_salt_that_events_do_not_name_is_wrong():
    async with OpenAiEngine(knows_salt="unsaid").running() as engine:
        _, found = await probe(engine)
    says(found, "salt", "wrong", "published without the salt", "every other")


@pytest.mark.usefixtures("soon")
async def test_a_salt_that_the_engine_ignores_is_a_warning():
    async with OpenAiEngine(knows_salt="no").running() as engine:
        _, found = await probe(engine)
    says(found, "salt", "warning", "cache_salt is ignored")


@pytest.mark.usefixtures("soon")
async def test_a_chat_of_other_tokens_is_wrong():
    async with OpenAiEngine(chat_shift=1).running() as engine:
        _, found = await probe(engine)
    says(found, "chat template", "wrong", "not those of /tokenize")


@pytest.mark.usefixtures("soon")
async def test_events_of_another_engine_are_reported_by_the_probe():
    with Engine() as other:
        async with OpenAiEngine(is_silent=True).running() as engine:
            numbers = count()
            _, found = await while_repeating(
                lambda: other.publish(stored([n := next(numbers)], [n] * 4)),
                examine(other.endpoint, url=engine.url, probe=True),
            )
    says(found, "probe", "wrong", "none with the prompt's tokens", "one engine and rank")


async def test_more_copies_than_blocks_are_reported_as_republished():
    async with OpenAiEngine(num_gpu_blocks=3).running() as engine:
        for _ in range(4):
            engine.engine.publish(stored([5, 6], [1, 2, 3, 4, 5, 6, 7, 8]))
        engine.engine.wait()
        zmq = engine.engine
        _, found = await examine(zmq.endpoint, zmq.replay_endpoint, url=engine.url)
    says(found, "copies", "wrong", "room for 3", 'report_mode "full"')


@pytest.mark.parametrize(
    ("models", "model", "verdict", "words"),
    [
        ([{"id": "a"}], "", "ok", "a"),
        ([{"id": "a"}], "b", "wrong", "wrong model: its server serves 'a', not 'b'"),
        ([{"id": "a"}, {"id": "ad", "parent": "a"}], "ad", "wrong", "is an adapter"),
        ([{"id": "a"}, {"id": "ad", "parent": "a"}], "", "ok", "adapters: ad"),
        ([{"id": "a"}, {"id": "b"}], "", "unknown", "give --model"),
    ],
)
async def test_the_model_is_the_one_that_is_served(models, model, verdict, words):
    async with OpenAiEngine(models=models).running() as engine:
        _, found = await examine(engine.engine.endpoint, url=engine.url, model=model, seconds=0.1)
    says(found, "model", verdict, words)


async def test_a_server_that_is_not_there_is_wrong():
    with Engine() as engine:
        url = f"http://127.0.0.1:{free_port()}"
        _, found = await examine(engine.endpoint, url=url, probe=True)
    says(found, "server", "wrong", url, "--url")
    assert "probe" not in verdicts(found)
