"""Bytes on a GPU while it computes: `make test-gpu` runs this.

The engine computes on a stream of its own, as vLLM does, which is busy before everything that it
queues: a copy that does not wait for it reads, or fills, a block too early.
"""

import pytest
import torch

from support.blocks.connectors import groups_of
from support.engines.connector_engine import Engine
from support.engines.connector_load import PREFIXES, random_load

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 2_000_000
"""About a millisecond."""


class BusyEngine(Engine):
    def _work(self, plan, scheduled):
        torch.cuda._sleep(BUSY_CYCLES)
        super()._work(plan, scheduled)


@pytest.fixture(autouse=True)
def engine_stream():
    if not torch.cuda.is_available():
        pytest.fail("torch finds no CUDA device")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.mark.parametrize("layout", [[(4, None)], [(4, None), (4, 9)]])
@pytest.mark.parametrize("seed", range(5))
def test_no_block_differs_while_prompts_are_stored_loaded_preempted_and_given_up(seed, layout):
    engine = BusyEngine(20, 30, groups=groups_of(layout), torch_device="cuda")
    random_load(engine, seed, prompts=100)
    engine.close()


def test_engine_thread_does_not_wait_for_the_device():
    """A copy is queued while the engine's stream is busy for a second."""
    engine = Engine(20, 30, torch_device="cuda")
    engine.add("a", PREFIXES[0])
    engine.step(chunk=40)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(1000 * BUSY_CYCLES)
    busy.record()
    engine.worker.end_step(engine.now_s)
    assert not busy.query()
    torch.cuda.synchronize()
    engine.finish("a")
    engine.drain()
    engine.close()
