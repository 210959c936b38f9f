"""Writes the vector of TensorRT-LLM's cache events, as its own serializer makes them.

    python tests/trtllm/record_kv_events.py .../tensorrt_llm/_utils.py COMMIT

`tensorrt_llm` cannot be imported without its GPU libraries; `KVCacheEventSerializer` of its
`_utils.py` needs none. The class alone is taken out of that file, of which this repository has no
copy, and gets objects with the attributes of the C++ events. So what an engine does is made up
here; the form in which it is published is TensorRT-LLM's. `source_sha256` is of the class's text.
"""

import ast
import datetime
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

TARGET = Path(__file__).parents[1] / "vectors/trtllm_events.json"
NAME = "KVCacheEventSerializer"
HOW = (
    "the text of the class, copied from that commit, with objects of the attributes of its C++ "
    "events; no engine and no binding was run"
)


def serializer(path):
    """Return the class, and its text."""
    source = path.read_text()
    node = next(each for each in ast.parse(source).body if getattr(each, "name", "") == NAME)
    text = ast.get_source_segment(source, node)
    names = {}
    exec(compile(text, str(path), "exec"), names)
    return names[NAME], text


def data(kind, **fields):
    """Return an object with these attributes, of a class of that name, by which events differ."""
    return type(f"KVCache{kind}Data", (SimpleNamespace,), {})(**fields)


def event(event_id, kind, *, window_size=128, attention_dp_rank=None, **fields):
    return SimpleNamespace(
        event_id=event_id,
        data=data(kind, **fields),
        window_size=window_size,
        attention_dp_rank=attention_dp_rank,
    )


def block(block_hash, tokens, *, extra_id=0, cache_level=0, priority=35):
    unique = [SimpleNamespace(token_id=each, token_extra_id=extra_id) for each in tokens]
    return data(
        "StoredBlock",
        block_hash=block_hash,
        tokens=unique,
        cache_level=cache_level,
        priority=priority,
        lora_id=None,
    )


def changed(old_value, new_value):
    return SimpleNamespace(old_value=old_value, new_value=new_value)


def cases():
    """Return the events of each case: an engine's life, ranks, windows, extra ids."""
    prompt = [block(2**64 - 9, [1, 2, 3, 4]), block(22, [5, 6, 7, 8])]
    steady = changed(35, 35)
    life = [
        event(0, "Created", num_blocks_per_cache_level=[100, 50]),
        event(1, "Stored", parent_hash=None, blocks=prompt),
        event(2, "Stored", parent_hash=22, blocks=[block(33, [9, 10, 11, 12])]),
        event(3, "Updated", block_hash=33, cache_level=changed(0, 1), priority=steady),
        event(4, "Removed", block_hashes=[33, 22]),
    ]
    ranks = [
        event(i // 2, "Removed", attention_dp_rank=i % 2, block_hashes=[i + 1]) for i in range(4)
    ]
    windows = [
        event(0, "Created", num_blocks_per_cache_level=[100, 0]),
        event(1, "Created", num_blocks_per_cache_level=[100, 0], window_size=4096),
        event(2, "Stored", parent_hash=None, blocks=prompt[1:], window_size=4096),
    ]
    extra = [event(0, "Stored", parent_hash=None, blocks=[block(5, [1, 2, 3, 4], extra_id=7)])]
    return {"a life": life, "two ranks": ranks, "two windows": windows, "extra ids": extra}


def main(path, commit):
    found, text = serializer(Path(path))
    vector = {
        "engine": "TensorRT-LLM",
        "source": f"NVIDIA/TensorRT-LLM, tensorrt_llm/_utils.py, {NAME}, commit {commit}",
        "source_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "how": HOW,
        "cases": {name: found.serialize(events) for name, events in cases().items()},
    }
    TARGET.write_text(json.dumps(vector, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
