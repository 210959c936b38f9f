"""Writes the SGLang captures of the conformance kit: events of its own radix cache and publisher.

    PYTHONPATH=… python tests/sglang/record_kv_events.py    # a Python that can import sglang

SGLang's server needs a GPU; its cache and its publisher do not. Prompts are matched, inserted and
evicted as its scheduler does it; recorded are the tokens that `match_prefix` finds for each prompt,
and the batches that `ZmqEventPublisher` then sends. `router/tools/conformance/corpus/captures.py`
plays them. Of torchvision, which SGLang imports and this does not use, a stand-in is enough.
"""

import datetime
import importlib.machinery
import json
import os
import sys
import tempfile
import time
import types
from array import array
from importlib.metadata import version
from pathlib import Path
from random import Random
from unittest.mock import MagicMock

import zmq

TARGET = Path(__file__).parents[2] / "router/tools/conformance/corpus/captures_sglang.json"
BLOCK_SIZE = 32
REST = 7
"""Tokens behind the whole pages of a prompt: SGLang never reuses all of a prompt."""
CAPACITY_TOKENS = 80 * BLOCK_SIZE
HOW = (
    "its own RadixCache with pages of 32 tokens and room for 80, without a model or a server; "
    "batches as its own ZmqEventPublisher sent them, cached tokens as `match_prefix` found them"
)


def import_sglang():
    """Return SGLang's modules: of the radix cache, its parameters, and the events."""
    from transformers import (  # noqa: F401  before the stand-in, which would confuse them
        AutoImageProcessor,
        AutoProcessor,
        LlamaTokenizerFast,
        ProcessorMixin,
    )

    for name in ("", ".io", ".transforms", ".transforms.functional"):
        stand_in = types.ModuleType(f"torchvision{name}")
        stand_in.__spec__ = importlib.machinery.ModuleSpec(stand_in.__name__, None, is_package=True)
        stand_in.__path__ = []
        stand_in.__getattr__ = lambda _: MagicMock()
        sys.modules[stand_in.__name__] = stand_in
    from sglang.srt.disaggregation import kv_events
    from sglang.srt.mem_cache import base_prefix_cache, radix_cache

    return radix_cache, base_prefix_cache, kv_events


class Recorder:
    """One cache with its publisher, and what happened since `begin`."""

    def __init__(self):
        self._radix, self._params, self._events = import_sglang()
        self._rng = Random(5)
        allocator = types.SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None)
        self._cache = self._radix.RadixCache.create_simulated(
            mock_allocator=allocator, page_size=BLOCK_SIZE, enable_kv_cache_events=True
        )
        self._publisher = self._events.ZmqEventPublisher(0, endpoint="ipc://sglang-events")
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.connect(self._publisher.describe_local_source(BLOCK_SIZE)["endpoint"])
        self._subscriber.subscribe(b"")
        time.sleep(1.0)
        self._steps = []

    def text(self, pages):
        return [self._rng.randrange(512) for _ in range(pages * BLOCK_SIZE + REST)]

    def begin(self):
        """Empty the cache; its batch is not recorded."""
        self.reset()
        self._published()
        self._steps = []

    def reset(self):
        self._cache.reset()

    def ask(self, token_ids, cache_salt=None, output=()):
        """Serve a prompt, and record what it found and published."""
        asked = self._params.MatchPrefixParams(self._key(token_ids[:-1], cache_salt))
        found = self._cache.match_prefix(asked)
        after = [*token_ids, *output]
        further = len(after) // BLOCK_SIZE * BLOCK_SIZE - found.device_prefix_len
        missing = self._cache.total_size() + further - CAPACITY_TOKENS
        self._cache.inc_lock_ref(found.last_device_node)
        if missing > 0:
            self._cache.evict(self._params.EvictParams(num_tokens=missing))
        self._cache.dec_lock_ref(found.last_device_node)
        self._cache.insert(self._params.InsertParams(key=self._key(after, cache_salt)))
        step = {"token_ids": token_ids, "cached_tokens": found.device_prefix_len}
        if cache_salt is not None:
            step["cache_salt"] = cache_salt
        self._steps.append(step | {"batches": [each.hex() for each in self._published()]})

    def run(self, name):
        return {"name": name, "steps": self._steps}

    def close(self):
        self._publisher.shutdown()
        self._context.destroy(linger=0)

    def _key(self, token_ids, cache_salt):
        return self._radix.RadixKey(array("q", token_ids), None, cache_salt=cache_salt)

    def _published(self):
        """Publish what the cache recorded, as the scheduler does; return what was sent."""
        events = self._cache.kv_events.take()
        if not events:
            return []
        self._publisher.publish(self._events.KVEventBatch(ts=time.time(), events=events))
        assert self._subscriber.poll(10_000), "nothing was published"
        return [self._subscriber.recv_multipart()[-1]]


def conversations(recorder):
    recorder.begin()
    system = recorder.text(4)[: 4 * BLOCK_SIZE]
    first, second, answer = system + recorder.text(3), system + recorder.text(2), recorder.text(1)
    recorder.ask(first, output=answer)
    recorder.ask(second)
    turn = first + answer + recorder.text(2)
    recorder.ask(turn)
    for prompt in (first, turn, second, system + recorder.text(1)):
        recorder.ask(prompt)
    return recorder.run("conversations with one system prompt")


def salts(recorder):
    recorder.begin()
    prompt = recorder.text(6)
    for salt in ("tenant-a", None, "tenant-b", "tenant-a", None, "tenant-b"):
        recorder.ask(prompt, salt)
    return recorder.run("one prompt with two salts and without, as cache_salt")


def evictions(recorder):
    recorder.begin()
    prompts = [recorder.text(15) for _ in range(7)]
    for prompt in (*prompts, *reversed(prompts)):
        recorder.ask(prompt)
    return recorder.run("more prompts than the cache holds")


def resets(recorder):
    recorder.begin()
    prompt, other = recorder.text(5), recorder.text(3)
    recorder.ask(prompt)
    recorder.ask(prompt)
    recorder.reset()
    for each in (other, prompt, other):
        recorder.ask(each)
    return recorder.run("the prefix cache reset between requests")


def main():
    os.chdir(tempfile.mkdtemp())
    recorder = Recorder()
    try:
        runs = [script(recorder) for script in (conversations, salts, evictions, resets)]
    finally:
        recorder.close()
    found = {
        "engine": f"SGLang {version('sglang')}",
        "kind": "sglang",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "how": HOW,
        "block_size": BLOCK_SIZE,
        "runs": runs,
    }
    TARGET.write_text(
        json.dumps(found).replace('{"name"', '\n{"name"').replace('{"token_ids"', '\n{"token_ids"')
        + "\n"
    )


if __name__ == "__main__":
    main()
