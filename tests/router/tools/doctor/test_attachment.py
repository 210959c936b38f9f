"""How to attach an engine: what the doctor prints is what router and agent take."""

import shlex

from router.tools.doctor.attachment import attachment
from support.engines.openai_engine import OpenAiEngine
from support.engines.zmq_engines import Engine, stored
from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually, free_port
from support.values.doctoring import examine
from worker_agent.config.bridge import rank_addresses
from worker_agent.config.reference import load_agent_config

PROMPT = stored([1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lora_name=None)


def agent_config(seen):
    command, verb, *flags = shlex.split(attachment(seen).agent)
    assert (command, verb) == ("kv-worker-agent", "run")
    return load_agent_config(flags, {})


async def test_attachment_of_an_engine_with_metrics_configures_an_agent():
    async with OpenAiEngine().running() as engine:
        engine.engine.publish(PROMPT)
        engine.engine.wait()
        zmq = engine.engine
        seen, _ = await examine(
            zmq.endpoint, zmq.replay_endpoint, topic="kv", url=engine.url, seconds=0.1
        )
    config = agent_config(seen)
    (of_rank,) = rank_addresses(config)
    assert (of_rank.engine.events, of_rank.engine.replay) == (zmq.endpoint, zmq.replay_endpoint)
    found = config.agent.engine, config.agent.endpoint, config.engine.topic
    assert found == ("vllm", engine.url, "kv")
    assert config.engine.metrics_url == f"{engine.url}/metrics"
    assert attachment(seen).worker.total_kv_blocks == 1000


async def test_attachment_body_registers_the_engine_at_a_router():
    with Engine(topic="kv@1") as engine:
        engine.publish(PROMPT)
        engine.wait()
        seen, _ = await examine(
            engine.endpoint, engine.replay_endpoint, topic="kv@", model="m", seconds=0.1
        )
        async with DirectRouter().running() as router:
            answer = await router.post("/workers", attachment(seen).worker)
            assert (answer.status_code, answer.json()["lifecycle"]) == (201, "schedulable")
            prompt = PROMPT["token_ids"]
            await eventually(lambda: equals(router.overlaps(prompt, model_name="m"), {(1, 0): 2}))
            await router.until_exact(1)


async def test_an_agent_of_another_rank_gets_rank_0s_ports():
    port, replay_port = free_port(), free_port()
    with Engine(port, replay_port, dp_rank=2) as engine:
        engine.publish(PROMPT)
        engine.wait()
        endpoints = [f"tcp://127.0.0.1:{each + 2}" for each in (port, replay_port)]
        seen, _ = await examine(*endpoints, seconds=0.1, model="m")
    line = attachment(seen).agent.replace("BLOCKS", "100")
    config = load_agent_config(shlex.split(line)[2:], {})
    (of_rank,) = rank_addresses(config)
    assert [of_rank.engine.events, of_rank.engine.replay] == endpoints
    assert of_rank.rank.dp_rank == 2
    assert (config.engine.block_size, config.engine.model_name) == (4, "m")
