"""What each connector answers when the store on disk lies, dies or is full."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx
from engine_cache_sides import (
    BLOCK_TOKENS,
    Count,
    Side,
    example,
    ours_on_disk,
    restored_tokens,
    sides,
)
from rows import Row

from support.engines.tiny_llama import TINY, write_tiny_llama

PROMPTS = 4
PROMPT_TOKENS = 40 * BLOCK_TOKENS + 5
ANSWER_TOKENS = 8
FLIP_EVERY_BYTES = 4096
T = TypeVar("T")

KEPT_PROMPTS = 2
"""For which a full disk has room."""
PROMPT_BYTES = restored_tokens(PROMPT_TOKENS) * TINY.layers * 2 * TINY.kv_heads * 32 * 2
SPARE_BYTES = 256 * 1024
"""Room for a journal and for the heads of files, but not for a prompt."""


def lie(path: Path) -> None:
    """Flip a bit in every page."""
    with path.open("r+b") as file:
        for place in range(FLIP_EVERY_BYTES - 1, path.stat().st_size, FLIP_EVERY_BYTES):
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())


def die(path: Path) -> None:
    """Lose all its bytes."""
    os.truncate(path, 0)


FAULTS: dict[str, Callable[[Path], None]] = {"lies": lie, "dies": die}
MAKERS: tuple[Callable[[Path], Side], ...] = (ours_on_disk, example)


def fault_rows() -> list[Row]:
    """Wrong answers and failed requests, of `PROMPTS` prompts asked again after the fault."""
    return asyncio.run(_rows())


async def _rows() -> list[Row]:
    with TemporaryDirectory() as name, ExitStack() as undo:
        folder = Path(name)
        write_tiny_llama(folder / "model")
        plain = sides(folder)[0]
        damaged = {fault: [_made(make, folder, fault) for make in MAKERS] for fault in FAULTS}
        every = [plain, *(side for pair in damaged.values() for side in pair)]
        for side in every:
            undo.callback(side.engine.kill)
            side.engine.start()
        for side in every:
            side.engine.wait()
        right = [await _answer(plain, number) for number in range(PROMPTS)]
        rows: list[Row] = []
        for fault, pair in damaged.items():
            ours, theirs = [await _asked_again(side, FAULTS[fault], right) for side in pair]
            rows += [
                Count(f"the store {fault}: {label}, ExampleConnector", mine, other,
                      f"of {PROMPTS}", 0, lower=True)
                for label, mine, other in zip(LABELS, ours, theirs, strict=True)
            ]  # fmt: skip
        return rows


LABELS = ("wrong answers", "failed requests")


def _made(make: Callable[[Path], Side], folder: Path, fault: str) -> Side:
    own = folder / fault
    own.mkdir(exist_ok=True)
    if not (own / "model").exists():
        (own / "model").symlink_to(folder / "model")
    return make(own)


async def _answer(side: Side, number: int) -> list[int]:
    _, answer = await side.timed(side.prompt(number, PROMPT_TOKENS), ANSWER_TOKENS)
    return answer.token_ids


async def _asked_again(
    side: Side, damage: Callable[[Path], None], right: list[list[int]]
) -> tuple[int, int]:
    """Return the numbers of wrong answers and of failed requests, after the fault."""
    assert side.store is not None
    for number in range(PROMPTS):
        await _answer(side, number)
    await side.settle()
    for path in side.store.rglob("*"):
        if path.is_file() and not path.name.endswith((".journal", ".secret")):
            damage(path)
    wrong = failed = 0
    for number in range(PROMPTS):
        try:
            wrong += await _answer(side, number) != right[number]
        except (httpx.HTTPError, AssertionError):
            failed += 1
    print(f"{side.name}, {damage.__name__}: {wrong} wrong, {failed} failed", file=sys.stderr)
    return wrong, failed


def full_rows() -> list[Row]:
    """The same prompts with a disk for `KEPT_PROMPTS`, asked again from the last to the first."""
    if os.geteuid():
        print("full: left out, for only root can mount a small file system", file=sys.stderr)
        return []
    kept_blocks = KEPT_PROMPTS * restored_tokens(PROMPT_TOKENS) // BLOCK_TOKENS
    size_bytes = KEPT_PROMPTS * PROMPT_BYTES + SPARE_BYTES
    with TemporaryDirectory() as name, ExitStack() as undo:
        folder = Path(name)
        write_tiny_llama(folder / "model")
        pair = ours_on_disk(folder, kept_blocks), example(folder)
        for side in pair:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", f"{side.store}"],
                check=True,
            )
            undo.callback(subprocess.run, ["umount", f"{side.store}"], check=True)
        return asyncio.run(_full(sides(folder)[0], *pair))


async def _full(plain: Side, ours: Side, other: Side) -> list[Row]:
    right = await _alone(plain, _answers)
    found = [await _alone(side, partial(_when_full, right=right)) for side in (ours, other)]
    bounds = zip((*LABELS, RESTORED), (0, 0, 50), ("of 8", "of 8", "%"), *found, strict=True)
    return [
        Count(f"the store is full: {label}, ExampleConnector", mine, theirs, unit, goal,
              lower=label != RESTORED)
        for label, goal, unit, mine, theirs in bounds
    ]  # fmt: skip


RESTORED = "tokens not computed again"


async def _alone(side: Side, ask: Callable[[Side], Awaitable[T]]) -> T:
    """Ask a side while no other runs."""
    try:
        side.engine.start()
        side.engine.wait()
        return await ask(side)
    finally:
        side.engine.kill()


async def _answers(side: Side) -> list[list[int]]:
    return [await _answer(side, number) for number in range(PROMPTS)]


async def _when_full(side: Side, right: list[list[int]]) -> tuple[float, float, float]:
    """Return wrong answers, failed requests, and the percentage that was not computed again."""
    assert side.store is not None
    if side.stored is not None:
        _fill(side.store)  # It has reserved its file, and all else finds no room.
    wrong = failed = again_tokens = 0
    for number in [*range(PROMPTS), *reversed(range(PROMPTS))]:
        try:
            _, answer = await side.timed(side.prompt(number, PROMPT_TOKENS), ANSWER_TOKENS)
            wrong += answer.token_ids != right[number]
            again_tokens += answer.cached_tokens
            await side.settle()
        except (httpx.HTTPError, AssertionError) as error:
            failed += 1
            print(f"{side.name}: {error!r}"[:300], file=sys.stderr)
    share = 100 * again_tokens / (PROMPTS * restored_tokens(PROMPT_TOKENS))
    print(f"{side.name}, full: {wrong} wrong, {failed} failed, {share:.0f} %", file=sys.stderr)
    return wrong, failed, share


def _fill(folder: Path) -> None:
    """Leave no room on its file system."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
