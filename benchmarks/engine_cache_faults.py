"""What each connector answers when the store on disk lies or dies."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from engine_cache_sides import BLOCK_TOKENS, Count, Side, example, ours_on_disk, sides
from rows import Row

from support.engines.tiny_llama import write_tiny_llama

PROMPTS = 4
PROMPT_TOKENS = 40 * BLOCK_TOKENS + 5
ANSWER_TOKENS = 8
FLIP_EVERY_BYTES = 4096


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
