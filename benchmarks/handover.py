"""Prompts handed over to the worker that decodes: pushed while they are computed, or read after.

    PYTHONPATH=.:tests python benchmarks/handover.py [--quick] [--json] [--write] [--only 2000,8000]

Two fleets of processes, each a bus, a router with its OpenAI endpoint, a prefill and a decode
worker with the reference engine. They differ in one setting: one fleet's decode worker takes no
pushes (`share_lease_s = 0`), and reads the blocks of its peer after the prompt is computed.
Requests are streamed through the routers, in turn, each with a new prompt; the times are what a
user sees, and the hand-over is the router's own: from the prefill worker's answer to the first
piece for the user. `--quick` has 2,000 tokens alone.
"""

import asyncio
import re
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from command_line import section_parser
from msgspec import Struct, json
from report import Benchmark, Section, report
from rows import Row

from support.processes.processes import Fleet, processor_s
from support.processes.servers import NatsServer, eventually, free_port

SECTIONS = {"2000": 2_000, "8000": 8_000}
ROUNDS = {"2000": 9, "8000": 7}
QUICK_ROUNDS = 5
ANSWER_TOKENS = 16
BLOCK_TOKENS = 16
VOCABULARY = 256
PAUSE_S = 0.5
"""After each request: what it stores in slower tiers is not a part of the next one."""
PREFILL, DECODE = 1, 2
MODEL = {
    "num-layers": 4, "hidden-size": 64, "num-heads": 4, "num-kv-heads": 4, "max-model-len": 8448,
    "num-blocks": 1600, "host-cache-blocks": 3200, "max-num-batched-tokens": 256,
}  # fmt: skip


class Seen(Struct, frozen=True):
    """One request, in seconds. `busy_s`: processor time of both workers."""

    first_s: float
    whole_s: float
    hand_over_s: float
    busy_s: float


class Side:
    """A fleet, whose decode worker takes pushes or not."""

    def __init__(self, folder: Path, *, is_pushed: bool) -> None:
        folder.mkdir()
        self.is_pushed = is_pushed
        self._bus = NatsServer(folder / "nats")
        self._port = free_port()
        self._key = folder / "block.key"
        self._key.write_text("5e" * 32)
        self._fleet = Fleet(folder, self._bus.url)
        self._fleet.client.timeout = httpx.Timeout(300)
        self._random = Random(1)

    async def start(self) -> None:
        self._bus.start()
        fleet = self._fleet
        fleet.router_options = {"block-key-file": self._key, "openai-port": self._port}
        await fleet.start(1, role="prefill", config=self._config("prefill"), **MODEL)
        fleet.add_worker(DECODE, role="decode", config=self._config("decode"), **MODEL)
        await fleet.until_ready(2)
        await eventually(self._is_handed_over)

    def _config(self, role: str) -> Path:
        lines = ["share = true", "onboard_always = true", f'block_key_file = "{self._key}"']
        if role == "decode" and not self.is_pushed:
            lines.append("share_lease_s = 0")
        config = self._key.with_name(f"{role}.toml")
        config.write_text("\n".join(lines))
        return config

    async def close(self) -> None:
        await self._fleet.close()
        self._bus.kill()

    async def _is_handed_over(self) -> bool:
        """True once a prompt takes the way that is measured: workers find each other first."""
        before = await self._pushed_blocks()
        try:
            await self.ask(500)
        except (AssertionError, httpx.HTTPError):
            return False
        return (await self._pushed_blocks() > before) == self.is_pushed

    async def measured(self, tokens: int) -> Seen:
        """Ask once, and check that the prompt was handed over as this side does it."""
        before, busy_s = await self._pushed_blocks(), self._busy_s()
        seen = await self.ask(tokens)
        pushed = await self._pushed_blocks() - before
        assert pushed >= tokens // BLOCK_TOKENS if self.is_pushed else pushed == 0, pushed
        return Seen(*seen, self._busy_s() - busy_s)

    async def ask(self, tokens: int) -> tuple[float, float, float]:
        """Return the times to the first token, of all, and of the hand-over."""
        prompt = [self._random.randrange(VOCABULARY) for _ in range(tokens)]
        body = {
            "model": "default", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        handed_over_s, first_s, cached = await self._hand_over_s(), 0.0, 0
        url, began_s = f"http://127.0.0.1:{self._port}/v1/completions", time.monotonic()
        async with self._fleet.client.stream("POST", url, json=body) as stream:
            assert stream.headers.get("x-prefill-worker-id") == f"{PREFILL}", stream.headers
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.monotonic() - began_s
                    usage: dict[str, Any] = json.decode(line[6:]).get("usage") or {}
                    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", cached)
        whole_s = time.monotonic() - began_s
        assert cached >= tokens - 2 * BLOCK_TOKENS, f"{cached} of {tokens} tokens handed over"
        return first_s, whole_s, await self._hand_over_s() - handed_over_s

    async def _hand_over_s(self) -> float:
        return await self._metric(f"http://127.0.0.1:{self._port}", "hand_over_seconds_sum")

    async def _pushed_blocks(self) -> float:
        return await self._metric(self._fleet.endpoints[PREFILL], "pushed_blocks_total")

    async def _metric(self, url: str, name: str) -> float:
        text = (await self._fleet.client.get(f"{url}/metrics")).text
        found = re.findall(rf"^\w*_{name}(?:{{.*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    def _busy_s(self) -> float:
        return sum(
            processor_s(self._fleet.workers[worker].popen.pid) for worker in (PREFILL, DECODE)
        )


async def measure(sizes: list[int], rounds: list[int]) -> list[list[Row]]:
    """Return the rows of each number of tokens."""
    with TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            sides = [Side(Path(folder) / f"{pushed}", is_pushed=pushed) for pushed in (True, False)]
            for side in sides:
                stack.push_async_callback(side.close)
                await side.start()
            return [
                await _rows(sides, tokens, count)
                for tokens, count in zip(sizes, rounds, strict=True)
            ]


async def _rows(sides: list[Side], tokens: int, rounds: int) -> list[Row]:
    seen: dict[bool, list[Seen]] = {side.is_pushed: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 else sides[::-1]:
            await asyncio.sleep(PAUSE_S)
            seen[side.is_pushed].append(await side.measured(tokens))

    def row(name: str, field: str, unit: str, scale: float) -> Row:
        ours, peer = (median(getattr(e, field) for e in seen[p]) * scale for p in (True, False))
        return Row(f"{tokens:,} tokens, {name}", ours, peer, unit, 1.0, lower=True)

    return [
        row("hand-over", "hand_over_s", "ms", 1e3),
        row("first token", "first_s", "ms", 1e3),
        row("whole request", "whole_s", "ms", 1e3),
        row("processor of both", "busy_s", "ms", 1e3),
    ]


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    names = arguments.only[:1] if arguments.quick else arguments.only
    rounds = [QUICK_ROUNDS if arguments.quick else ROUNDS[name] for name in names]
    scale = (
        f"medians of {rounds} interleaved requests, {ANSWER_TOKENS} tokens each; "
        "one prefill and one decode worker, 256 tokens a step"
    )
    measured: dict[str, list[Row]] = {}

    def rows_of(name: str) -> list[Row]:
        if not measured:
            found = asyncio.run(measure([SECTIONS[each] for each in names], rounds))
            measured.update(zip(names, found, strict=True))
        return measured[name]

    def section(name: str) -> Section:
        return Section(f"prompts of {SECTIONS[name]:,} tokens", lambda: rows_of(name))

    benchmark = Benchmark("handover", "blocks read after", scale)
    return report({name: section(name) for name in names}, benchmark, arguments)


if __name__ == "__main__":
    sys.exit(main())
