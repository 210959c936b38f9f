"""What a vLLM with the connector does, run by run: `python vllm_runs.py RUN MODEL ARGUMENTS`, under
vLLM's own Python. The last line of the output is the answer, as JSON.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from random import Random

from router.protocol.values import Tier
from support.vllm.vllm_stepped import BLOCK_SIZE, SteppedEngine

WORDS = range(2, 500)
PROMPT_BLOCKS = (3, 7, 12, 20)


def prompts():
    """Four, of which two begin alike, and none with whole blocks only."""
    rng = Random(1)
    begun = rng.choices(WORDS, k=BLOCK_SIZE * 5)
    return [
        (begun if place % 2 else []) + rng.choices(WORDS, k=BLOCK_SIZE * blocks + 5 + place)
        for place, blocks in enumerate(PROMPT_BLOCKS)
    ]


def ask_all(engine):
    """Each alone; what they answer, and how many tokens of them were not computed."""
    asked = [engine.ask(prompt, 12) for prompt in prompts()]
    return {"tokens": [tokens for tokens, _ in asked], "cached": [count for _, count in asked]}


def plain(model, num_blocks=80):
    """Without the connector: what is right."""
    return ask_all(SteppedEngine(model, None, num_blocks))


def tiers(model, extra, num_blocks=80):
    """From every tier in turn: what is faster is emptied before."""
    engine = SteppedEngine(model, extra, num_blocks)
    passes = {"cold": ask_all(engine)}
    engine.evict()
    passes["held"] = engine.held()
    passes["host"] = ask_all(engine)
    for name, emptied in (("disk", [Tier.HOST]), ("remote", [Tier.HOST, Tier.DISK])):
        engine.evict()
        engine.empty(*emptied)
        engine.evict()
        passes[name] = ask_all(engine)
    engine.check()
    loaded = {each.tier.name: each.up.blocks for each in engine.manager.stack.status()}
    return passes | {"loaded": loaded, "counts": engine.counts()}


def again(model, extra, num_blocks=80):
    """Another engine, with what others, or a former life, left in the tiers."""
    engine = SteppedEngine(model, extra, num_blocks)
    answer = ask_all(engine)
    engine.check()
    return answer | {"late_looks": engine.leader_side.late_looks}


def renamed(model, extra):
    """With other weights, nothing of before is found."""
    engine = SteppedEngine(model, extra)
    ask_all(engine)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    asked = ask_all(engine)
    engine.evict()
    later = ask_all(engine)
    engine.check()
    return {"at first": asked["cached"], "later": later["cached"]}


def hybrid(model, extra, seed, num_requests):
    """Prompts that repeat, continue, or leave each other, over an engine that evicts."""
    engine, rng = SteppedEngine(model, extra, num_blocks=112, max_model_len=1088), Random(seed)
    known, asked = [], []
    for _ in range(num_requests):
        kind = rng.choice(["new", "again", "turn", "sibling"]) if known else "new"
        prompt, answer = rng.choice(known) if known else ([], [])
        if kind == "new":
            prompt = rng.choices(WORDS, k=rng.randrange(40, 900))
        elif kind == "turn":
            prompt = (prompt + answer + rng.choices(WORDS, k=rng.randrange(10, 90)))[-1000:]
        elif kind == "sibling":
            prompt = prompt[: rng.randrange(len(prompt))] + rng.choices(WORDS, k=60)
        if rng.random() < 0.5:
            engine.evict()
        answer, cached = engine.ask(prompt, 12)
        asked.append({"prompt": prompt, "cached": cached, "tokens": answer})
        known.append((prompt, answer))
    engine.check()
    counts = {} if extra is None else engine.counts()
    return {"asked": asked, "loaded": counts.get("matched_tokens", 0), "counts": counts}


def turmoil(model, extra, seed, num_blocks=34):
    """Requests come, are given up and preempted at any time; in the end all blocks are back."""
    engine, rng = SteppedEngine(model, extra, num_blocks, max_model_len=1024), Random(seed)
    engine.poll()  # the tiers have started
    alive, right = {}, {}
    for _ in range(400):
        if rng.random() < 0.25 and len(alive) < 8:
            which = rng.randrange(len(PROMPT_BLOCKS))
            tokens = prompts()[which][: rng.choice([100, 200, 300])]
            alive[engine.add(tokens, rng.choice([1, 100, 250]))] = tuple(tokens)
        if alive and rng.random() < 0.04:
            key = rng.choice([*alive])
            engine.abort(key)
            del alive[key]
        engine.step()
        for key in [key for key in alive if is_over(engine, key)]:
            right.setdefault(alive.pop(key), []).append(engine.outputs.pop(key))
    engine.settle()
    for key, tokens in alive.items():
        right.setdefault(tokens, []).append(engine.outputs.pop(key))
    engine.check()
    return {
        "preemptions": engine.preemptions,
        "requests": sum(map(len, right.values())),
        "differing": sum(map(differing, right.values())),
        "counts": {} if extra is None else engine.counts(),
    }


def differing(answers):
    """Whether the same prompt was answered in several ways, as far as all of them go."""
    length = min(map(len, answers))
    return len({tuple(answer[:length]) for answer in answers}) > 1


def is_over(engine, key):
    return key in engine.outputs and not any(
        request.startswith(key) for request in engine.scheduler.requests
    )


def failing(model, extra, first_bad, num_blocks=80):
    """Loads of every prompt fail from a block on, torn: where it was to be there is noise."""
    engine = SteppedEngine(model, extra, num_blocks)
    cold = ask_all(engine)
    engine.evict()
    host = engine.contents()
    with torn_loads(first_bad):
        failed = ask_all(engine)
        engine.evict()
    later = ask_all(engine)
    engine.check()
    wrong = sum(host.get(name, now) != now for name, now in engine.contents().items())
    runs = {"cold": cold, "failed": failed, "later": later}
    return runs | {"wrong": wrong, "counts": engine.counts()}


@contextmanager
def torn_loads(first_bad):
    """In each load the blocks from `first_bad` on do not come; all of its blocks on the device are
    scribbled over first.
    """
    from worker_agent.connector.mover import StackMover

    land = StackMover._land

    def torn(mover, load, now_s):
        operation, loading = load.operation, load.loading
        scribble(mover._device, operation.blocks)
        lost = len(loading.outcomes) - first_bad
        loading.outcomes[first_bad:] = ["torn"] * lost
        loading.loaded = min(loading.loaded, first_bad)
        land(mover, load, now_s)

    StackMover._land = torn
    try:
        yield
    finally:
        StackMover._land = land


def scribble(device, blocks):
    """Noise of finite numbers: kernels multiply what is masked by zero."""
    import torch

    noise = torch.randn(len(blocks), device.block_bytes // 2).to(torch.bfloat16)
    device.scatter(blocks, noise.view(torch.uint8))


def poison(model, extra, is_protected):
    """A load fails in a step that computes from it, as vLLM's own loads within a step do: what the
    step computed is wrong, the engine computes it again, and the tiers are to have none of it.
    """
    engine = SteppedEngine(model, extra, max_num_batched_tokens=256, max_num_seqs=4)
    prompt = Random(7).choices(WORDS, k=900)
    right, _ = engine.ask(prompt)
    engine.evict()
    clean = engine.contents()
    engine.empty(Tier.HOST)
    engine.evict()
    planted = Planted(engine, at_step=2, is_protected=is_protected)
    recomputed, _ = engine.ask(prompt)
    planted.remove()
    engine.evict()
    dirty = sum(clean[name] != now for name, now in engine.contents().items() if name in clean)
    loaded, cached = engine.ask(prompt)
    engine.check()
    return {
        "recomputed": recomputed == right,
        "dirty": dirty,
        "kept": len(clean),
        "loaded": loaded == right,
        "cached": cached,
        "counts": engine.counts(),
    }


class Planted:
    """Before a step of a request its first block is spoilt, and after it said to have failed."""

    def __init__(self, engine, at_step, is_protected):
        from worker_agent.connector.vllm_parts.worker_side import WorkerSide
        from worker_agent.connector.worker import ConnectorWorker

        self._side, self._worker = WorkerSide, ConnectorWorker
        self._before = WorkerSide.begin, ConnectorWorker.end_step, ConnectorWorker._cancel_stores
        begin, end, _ = self._before
        steps = []

        def begun(side, message):
            begin(side, message)
            steps.append(blocks_of_running(engine))
            if len(steps) == at_step:
                scribble(side.worker._mover._device, steps[-1][:1])

        def ended(worker, now_s):
            if len(steps) == at_step and not worker._scheduler.progress.is_over:
                worker._load_errors.update(steps[-1][:1])
            end(worker, now_s)

        WorkerSide.begin, ConnectorWorker.end_step = begun, ended
        if not is_protected:
            ConnectorWorker._cancel_stores = lambda worker: None  # noqa: ARG005

    def remove(self):
        begin, end, cancel = self._before
        self._side.begin = begin
        self._worker.end_step, self._worker._cancel_stores = end, cancel


def blocks_of_running(engine):
    keys = [each.request_id for each in engine.scheduler.running]
    return [*engine.scheduler.kv_cache_manager.get_block_ids(keys[0])[0]] if keys else []


RUNS = {
    each.__name__: each for each in (plain, tiers, again, hybrid, renamed, turmoil, failing, poison)
}

if __name__ == "__main__":
    name, model, *arguments = sys.argv[1:]
    answer = RUNS[name](Path(model), *map(json.loads, arguments))
    print("\n" + json.dumps(answer))  # noqa: T201 it is what the test reads
