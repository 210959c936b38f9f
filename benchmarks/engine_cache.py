"""Prompts restored in a real vLLM on the CPU: our connector beside those of others.

    VLLM_PYTHON=… PYTHONPATH=.:tests python benchmarks/engine_cache.py [--quick] [--json] [--write]
        [--only layers,restore,faults,full]

Every side is a vLLM server with a cache that holds one of the prompts, so that each pushes out the
one before; the others are stopped while it is measured, since an idle one polls. LMCACHE_PYTHON
names a Python with vLLM and LMCache; without it, or where it does not start, that side is left out,
and the facts say so. Faults are made in what each keeps on disk; a full disk is a file system of
its own, which only root can mount. `--quick` starts one engine, and compares its evicted prompts
with its new ones.
"""

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from command_line import section_parser
from engine_cache_faults import fault_rows, full_rows
from engine_cache_sides import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    SIZE,
    Count,
    Side,
    restored_tokens,
    sides,
)
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row
from timing import Quicker

from support.engines.tiny_llama import write_tiny_llama

PROMPTS = 3
PROMPT_TOKENS = 60 * BLOCK_TOKENS + 5
DECODE_TOKENS = 64
DECODES = 4
REFUSAL = re.compile(r"failed with error '(.*)', please|RuntimeError: (No supported .*)\.$", re.M)
OURS, LAYERED, ON_DISK = "ours", "ours, by layer", "ours, on disk"


class Pass(Struct, frozen=True):
    """What a side took in one round: medians over the prompts, in seconds."""

    cold_s: float
    restored_s: float
    restored_tokens: int
    step_s: float
    """0 if it was not measured."""


class Measured:
    """The passes of all sides, measured once for all sections, in turn."""

    def __init__(self, names: Sequence[str], *, quick: bool) -> None:
        self._names = names
        self._is_quick = quick
        self._rounds = 1 if quick else 5
        self._passes: dict[str, list[Pass]] = {}
        self.facts: dict[str, str] = {}

    def passes(self) -> dict[str, list[Pass]]:
        if not self._passes:
            self._passes = asyncio.run(self._measure())
        if OURS not in self._passes:
            raise RuntimeError(f"ours {self.facts[OURS]}")
        return self._passes

    async def _measure(self) -> dict[str, list[Pass]]:
        with TemporaryDirectory() as folder:
            write_tiny_llama(Path(folder) / "model", SIZE)
            running = [side for side in sides(Path(folder)) if side.name in self._names]
            try:
                for side in running:
                    side.engine.start()
                running = [side for side in running if self._is_up(side)]
                for side in running:
                    side.engine.pause()
                for number in range(-1, self._rounds):  # the first warms up
                    for side in running[:: 1 if number % 2 else -1]:
                        side.engine.resume()
                        found = await measured_pass(side, number, has_steps=not self._is_quick)
                        side.engine.pause()
                        print(f"round {number}, {side.name}: {found}", file=sys.stderr, flush=True)
                        self._passes.setdefault(side.name, []).extend([found] * (number >= 0))
            finally:
                for side in running:
                    side.engine.kill()
        return self._passes

    def _is_up(self, side: Side) -> bool:
        """Return whether it caches; note why not, if it ends, or goes on without a cache."""
        how, is_ready = "starts, and caches nothing", True
        try:
            side.engine.wait()
        except AssertionError:
            how, is_ready = "does not start in time", False
        log = side.engine.log.read_text(errors="replace")
        refusals = [refusal[1] or refusal[2] for refusal in REFUSAL.finditer(log)]
        if is_ready and side.engine.is_running and not refusals:
            return True
        self.facts[side.name] = f"{how}: {refusals[0] if refusals else 'see its log'}"
        print(f"{side.name}: {self.facts[side.name]}", file=sys.stderr, flush=True)
        side.engine.kill()
        return False


async def measured_pass(side: Side, number: int, *, has_steps: bool) -> Pass:
    prompts = [side.prompt(100 * number + place, PROMPT_TOKENS) for place in range(PROMPTS)]
    cold = [await side.timed(prompt, 1) for prompt in prompts]
    await side.settle()
    again = [await side.timed(prompt, 1) for prompt in prompts]
    median = len(prompts) // 2
    return Pass(
        sorted(took_s for took_s, _ in cold)[median],
        sorted(took_s for took_s, _ in again)[median],
        sum(answer.cached_tokens for _, answer in again),
        await decode_step_s(side, number) if has_steps else 0.0,
    )


async def decode_step_s(side: Side, number: int) -> float:
    """Return the time of a step of `DECODES` requests."""
    prompts = [side.prompt(100 * number + 50 + place, 100) for place in range(DECODES)]
    await side.settle()
    before_s = asyncio.get_running_loop().time()
    await asyncio.gather(*(side.timed(prompt, DECODE_TOKENS) for prompt in prompts))
    return (asyncio.get_running_loop().time() - before_s) / DECODE_TOKENS


def middle(passes: Sequence[Pass], field: str) -> float:
    values = sorted(getattr(each, field) for each in passes)
    return values[len(values) // 2]


def layer_rows(measured: Measured) -> list[Row]:
    """The same connector, with layers copied one by one and blocks after the step."""
    found = measured.passes()
    ours, whole = found[LAYERED], found[OURS]
    rows = [
        Row(f"{name}, by layer, after the step", 1e3 * middle(ours, field),
            1e3 * middle(whole, field), "ms", 1.1, lower=True)
        for name, field in (("TTFT, cold", "cold_s"), ("TTFT, restored", "restored_s"),
                            ("decode step", "step_s"))
    ]  # fmt: skip
    plain = found["no connector"]
    for name, passes in (("after the step", whole), ("by layer", ours)):
        figures = middle(passes, "step_s"), middle(plain, "step_s")
        label = f"decode step, {name}, no connector"
        rows.append(Row(label, *(1e3 * each for each in figures), "ms", 1.1, lower=True))
    return rows


def restore_rows(measured: Measured) -> list[Row]:
    """Ours, in the same kind of memory, beside each other connector that starts here."""
    found = measured.passes()
    wanted = PROMPTS * restored_tokens(PROMPT_TOKENS)
    rows: list[Row] = []
    for name, passes in found.items():
        if name in {OURS, LAYERED, ON_DISK}:
            continue
        ours = found[OURS if name in {"no connector", "LMCache, in memory"} else ON_DISK]
        shares = [100 * middle(each, "restored_tokens") / wanted for each in (ours, passes)]
        rates = [
            KV_BYTES_PER_TOKEN * restored_tokens(PROMPT_TOKENS) / middle(each, "restored_s") / 1e6
            for each in (ours, passes)
        ]
        times = [1e3 * middle(each, "restored_s") for each in (ours, passes)]
        cold = [1e3 * middle(each, "cold_s") for each in (ours, passes)]
        rows.append(Count(f"hit after eviction, {name}", *shares, "%", 99, lower=False))
        rows.append(Quicker(f"TTFT of an evicted prompt, {name}", *times, "ms", 1, lower=False))
        rows.append(Row(f"TTFT of a new prompt, {name}", *cold, "ms", 1.1, lower=True))
        if name != "no connector":
            rows.append(Row(f"bytes restored, end to end, {name}", *rates, "MB/s", 1, lower=False))
    return rows


def quick_rows(measured: Measured) -> list[Row]:
    """Evicted prompts of our connector beside new ones, in one engine."""
    passes = measured.passes()[OURS]
    wanted = PROMPTS * restored_tokens(PROMPT_TOKENS)
    hit = 100 * middle(passes, "restored_tokens") / wanted
    times = [1e3 * middle(passes, field) for field in ("restored_s", "cold_s")]
    return [
        Count("hit after eviction, computed anew", hit, 0.0, "%", 99, lower=False),
        Quicker("TTFT of an evicted prompt, of a new one", *times, "ms", 2, lower=False),
    ]


ALL = (
    "no connector",
    OURS,
    LAYERED,
    ON_DISK,
    "ExampleConnector",
    "LMCache, in memory",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)


def main() -> int:
    arguments = section_parser(__doc__, ("layers", "restore", "faults", "full")).parse_args()
    measured = Measured([OURS] if arguments.quick else ALL, quick=arguments.quick)
    if arguments.quick or set(arguments.only) & {"layers", "restore"}:
        measured.passes()  # First of all: it finds out which sides start, for the facts.
    every = {
        "layers": Section(
            "layer by layer, beside blocks after the step", partial(layer_rows, measured)
        ),
        "restore": Section("prompts that were evicted", partial(restore_rows, measured)),
        "faults": Section("wrong answers and failed requests", fault_rows),
        "full": Section("a disk with room for half of the prompts", full_rows),
    }
    sections = {name: every[name] for name in arguments.only}
    if arguments.quick:
        sections = {"restore": Section("one engine", partial(quick_rows, measured))}
    scale = f"medians of rounds in turn; prompts of {PROMPT_TOKENS} tokens, 8 kB of KV each"
    return report(sections, Benchmark("engine_cache", "beside", scale, measured.facts), arguments)


if __name__ == "__main__":
    if "VLLM_PYTHON" not in os.environ:
        sys.exit("VLLM_PYTHON names no Python that has vLLM; `make test-vllm` installs one")
    sys.exit(main())
