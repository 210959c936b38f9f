"""Streams captured from real engines, with the engine's own count of reused tokens as the truth.

`captures_*.json`: engine and version, how and when it was captured, and runs. A run is a list of
requests, each with the tokens that the engine reused, and then the batches that it published, as
they left its socket (msgpack, in hex). Played are the same events, field for field; token ids and
block names move to a range of the scenario's own, and salts get the form of each system's front end
(`Marks`). The prompts are random tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from router.tools.conformance.corpus.cache import (
    CLEARED,
    COPIES,
    LIKE_COPIES,
    REANNOUNCED,
    TAIL,
)
from router.tools.conformance.corpus.identity import SALT, SALT_ONCE, SGLANG_SALT
from router.tools.conformance.corpus.wire import WIDE
from router.tools.conformance.steps import (
    BLOCK_SIZE,
    Ask,
    EngineSpec,
    Event,
    Prompt,
    Publish,
    Salt,
    Scenario,
    Step,
)

GROUP = "captured from real engines"
WINDOWS = "a hybrid model with sliding windows"
CAUSES = {
    "conversations with one system prompt": TAIL,
    "one prompt with two salts and without": SALT,
    "one prompt with two salts and without, as cache_salt": SGLANG_SALT,
    "a prompt of 60 blocks with a salt": SALT_ONCE,
    "more prompts than the cache holds": TAIL,
    "four equal requests at once, then others until blocks are evicted": COPIES,
    "the prefix cache reset between requests": CLEARED,
    "kv_cache_report_mode full, then others until blocks are evicted": REANNOUNCED,
    "more prompts than the cache holds; 32-byte hashes": WIDE,
    "a Gemma 3 kind, windows of 64 tokens beside full attention": WINDOWS,
    "a Gemma 4 kind, windows in larger blocks than full attention": WINDOWS,
    "a Qwen3-Next kind, linear attention beside full attention": "a hybrid model with states",
    "a Llama 4 kind, chunks of 128 tokens beside full attention": "a hybrid model with chunks",
}


class Request(Struct, frozen=True):
    """A request to the engine.

    `cached_tokens`: None for equal requests at once. `batches`: published after it, in hex.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int | None
    batches: list[str]
    cache_salt: str | None = None


class Run(Struct, frozen=True):
    """Requests to an engine whose cache was empty before."""

    name: str
    steps: list[Request]
    reannounces: bool = False
    is_hybrid: bool = False
    chunk_tokens: int | None = None


class Capture(Struct, frozen=True):
    """Runs of one engine, of one kind (`EngineSpec`)."""

    engine: str
    date: str
    how: str
    block_size: int
    runs: list[Run]
    kind: str = "vllm"


def scenarios() -> Iterator[Scenario]:
    """Return one scenario for every run of every capture."""
    for path in sorted(Path(__file__).parent.glob("captures_*.json")):
        capture = msgspec.json.decode(path.read_bytes(), type=Capture)
        assert capture.block_size == BLOCK_SIZE
        for i, run in enumerate(capture.runs):
            yield Scenario(
                f"{capture.engine}: {run.name}",
                GROUP,
                tuple(_steps(run)),
                (
                    EngineSpec(
                        capture.kind,
                        reannounces=run.reannounces,
                        is_hybrid=run.is_hybrid,
                        chunk_tokens=run.chunk_tokens,
                    ),
                ),
                cause=CAUSES[run.name],
                unknowable=LIKE_COPIES if run.reannounces else "",
                note="" if i else f"captured on {capture.date} from {capture.how}.",
            )


def _steps(run: Run) -> Iterator[Step]:
    """Ask what the engine reused for each prompt that it had seen before, or found blocks of.

    Hybrid models may find nothing of what they hold: of theirs, ask for each prompt of which it had
    seen the first block. An engine always computes a prompt's last token, so a block that ends with
    it is not asked for.
    """
    seen: set[tuple[int, ...]] = set()
    for request in run.steps:
        token_ids = request.token_ids
        known = token_ids[:BLOCK_SIZE] if run.is_hybrid else token_ids
        if request.cached_tokens is not None and (request.cached_tokens or known in seen):
            if run.is_hybrid and len(token_ids) % BLOCK_SIZE == 0:
                token_ids = token_ids[:-1]
            prompt = Prompt(token_ids, cache_salt=request.cache_salt)
            yield Ask(prompt, (request.cached_tokens // BLOCK_SIZE,))
        seen.add(known)
        for batch in request.batches:
            _, events, *rank = msgspec.msgpack.decode(bytes.fromhex(batch))
            yield Publish(tuple(map(_with_salts, events)), rank=rank[0] if rank else None)


def _with_salts(event: Event) -> Event:
    """Return an event with the strings among its extra keys, all of which are salts, marked."""
    if not (isinstance(event, dict) and event.get("extra_keys")):
        return event
    return event | {"extra_keys": [_salted(keys) for keys in event["extra_keys"]]}


def _salted(keys: list[Any] | None) -> list[Any] | None:
    return keys and [Salt(key) if isinstance(key, str) else key for key in keys]
