"""Named engines and surroundings that a router does not know, to try policies on.

Rows differ in one thing each, but for the last. Numbers are typical of what operators report, and
tuned to no policy.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from router.simulator.block_cache import LayerGroups
from router.simulator.disturbances import CALM, Disturbances
from router.simulator.engine_model import (
    MockerTiming,
    StepModel,
    gemma_27b,
    llama_8b,
    llama_70b,
    qwen_next_80b,
    reference_engine,
)
from router.simulator.scenario import Background, Failure, Incident, LoadSources, Scenario


class Physics(Struct, frozen=True, kw_only=True):
    """A fleet of equal engines, and everything about them that is not in a trace.

    `meaning`: a line for reports. `engine`: the name of the model. `layers`: of a hybrid model.
    """

    meaning: str
    engine: str = "70b"
    model: StepModel = llama_70b()
    layers: tuple[LayerGroups, ...] = ()
    workers: int = 16
    disturbances: Disturbances = CALM
    loads: LoadSources = LoadSources()
    background: Background | None = None
    incidents: tuple[Incident, ...] = ()

    def scenario(self, *, arrival_speed: float, routers: int, seed: int) -> Scenario:
        """Return the scenario of one run."""
        return Scenario(
            models=(self.model,) * self.workers,
            layers=self.layers,
            arrival_speed=arrival_speed,
            routers=routers,
            loads=self.loads,
            disturbances=self.disturbances,
            background=self.background,
            incidents=self.incidents,
            seed=seed,
        )


def _mocker(workers: int) -> Physics:
    model = MockerTiming(capacity_tokens=3_000 * 512)
    return Physics(
        meaning="NVIDIA's replay timing", engine="NVIDIA's mocker", model=model, workers=workers
    )


_PAUSES = Disturbances(pause_interval_s=60.0, pause_s=3.0)
_SMALL_CACHE = replace(llama_70b(), capacity_tokens=300_000)
_RESTARTS = tuple(Failure(60.0 + 90.0 * i, i, 15.0) for i in range(4))

PHYSICS: Mapping[str, Physics] = MappingProxyType(
    {
        "plain": Physics(meaning="the formula that the predictor knows"),
        "8b": Physics(meaning="the same formula for a model of 8 B", engine="8b", model=llama_8b()),
        "mocker-16": _mocker(16),
        "mocker-4": _mocker(4),
        "mocker-2": _mocker(2),
        "tiled": Physics(
            meaning="the reference engine, measured, 16 times as fast: whole tiles",
            engine="the reference engine",
            model=reference_engine(16.0),
        ),
        "noise": Physics(meaning="steps vary by 30 %", disturbances=Disturbances(noise=0.3)),
        "stragglers": Physics(
            meaning="one step in 500 takes 20 times as long",
            disturbances=Disturbances(straggling=0.002, straggler_factor=20.0),
        ),
        "pauses": Physics(
            meaning="each engine stops for 3 s once a minute",
            disturbances=_PAUSES,
        ),
        "warm-up": Physics(
            meaning="20 s before the first step of a life, 2 s for each new shape; four restarts",
            disturbances=Disturbances(start_s=20.0, shape_s=2.0),
            incidents=_RESTARTS,
        ),
        "unknown-chunk": Physics(
            meaning="steps of 2,048 tokens, which no report states",
            loads=LoadSources(shows_chunk=False),
        ),
        "preemption": Physics(
            meaning="a cache of 300,000 tokens, and no room kept for outputs",
            model=_SMALL_CACHE,
            disturbances=Disturbances(is_preempting=True),
        ),
        "deferring": Physics(
            meaning="prompts are admitted when a step has room for them, as by vLLM",
            disturbances=Disturbances(is_deferring=True),
        ),
        "speculation": Physics(
            meaning="three tokens drafted in a step; a request accepts 0 to 3 of them",
            disturbances=Disturbances(draft_tokens=3, draft_s=0.004),
        ),
        "background": Physics(
            meaning="0.1 requests a second on each engine that no router knows of",
            background=Background(requests_per_s=0.1),
        ),
        "lying": Physics(
            meaning="every second engine reports three times its busy time",
            loads=LoadSources(busy_factors=(3.0, 1.0)),
        ),
        "all-lying": Physics(
            meaning="every engine reports three times its busy time",
            loads=LoadSources(busy_factors=(3.0,)),
        ),
        "lost": Physics(meaning="one load report in ten is lost", loads=LoadSources(lost=0.1)),
        "polled": Physics(
            meaning="no agents: vLLM's metrics, polled each second",
            loads=LoadSources(source="polled"),
        ),
        "silent": Physics(
            meaning="agents that report nothing of the load", loads=LoadSources(source="none")
        ),
        "windows": Physics(
            meaning="Gemma 3 on vLLM: windows of 1,024 tokens beside full attention",
            engine="Gemma 3 27B",
            model=gemma_27b(),
            layers=(LayerGroups("window", 6, 1_024),),
            workers=8,
            disturbances=Disturbances(is_deferring=True),
        ),
        "states": Physics(
            meaning="Qwen3-Next on vLLM: states beside full attention",
            engine="Qwen3-Next 80B A3B",
            model=qwen_next_80b(),
            layers=(LayerGroups("state", 3),),
            workers=2,
            disturbances=Disturbances(is_deferring=True),
        ),
        "everything": Physics(
            meaning="noise, pauses, warm-up, preemption, requests from elsewhere, polled, lost",
            model=_SMALL_CACHE,
            disturbances=replace(_PAUSES, noise=0.3, shape_s=2.0, is_preempting=True),
            loads=LoadSources(source="polled", lost=0.1),
            background=Background(requests_per_s=0.05),
            incidents=_RESTARTS,
        ),
    }
)
