"""`kv-router up`: a whole fleet on one machine, demonstrated and then kept serving."""

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path

import httpx

from router.tools.up.config import UpConfig
from router.tools.up.demo import report
from router.tools.up.demo.demo import (
    PARALLEL_CONVERSATIONS,
    Demo,
    DemoRow,
    Summary,
    conversations,
)
from router.tools.up.demo.demos import EndpointDemo, EndpointRow, HandedOver, SharingDemo
from router.tools.up.fleet import FleetPlan, LocalFleet, fleet_folder, reference_fleet
from router.tools.up.vllm import vllm_fleet

REQUEST_TIMEOUT_S = 60.0
SLOW_S = 15.0
"""A start that takes longer is explained."""


async def up(config: UpConfig, stop: asyncio.Event) -> None:
    """Start the fleet, run the demonstration, and serve until `stop` is set.

    Children that end are restarted. Raises FleetNotReadyError.
    """
    with fleet_folder(config.data_dir) as directory:
        fleet = _made_fleet(config, directory)
        bus = "" if fleet.bus is None else "a bus, "
        _print(f"starting {bus}a router and {len(fleet.workers)} workers …")
        async with fleet.running(_complain):
            shown = asyncio.create_task(_show_watched(fleet, config))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((shown, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in (shown, stopped):
                task.cancel()
            await asyncio.wait((shown, stopped))
            _print("\nstopping …")
    _print("stopped")
    if not shown.cancelled():
        shown.result()


def _made_fleet(config: UpConfig, directory: Path) -> LocalFleet:
    if config.vllm is not None:
        return vllm_fleet(
            directory, config.vllm, shlex.split(config.vllm_args), (config.port, config.openai_port)
        )
    prefill_workers, others = config.pools
    plan = FleetPlan(
        directory=directory,
        workers=prefill_workers + others,
        prefill_workers=prefill_workers,
        dp_size=config.dp_size,
        num_blocks=config.num_blocks,
        host_cache_blocks=config.host_cache_blocks,
        disk_cache_blocks=config.disk_cache_blocks,
        share=config.share,
        router_port=config.port,
        openai_port=config.openai_port,
    )
    return reference_fleet(plan)


async def _show_watched(fleet: LocalFleet, config: UpConfig) -> None:
    """Run the demonstration with a dashboard connected, so that its decisions are recorded.

    The dashboard samples decisions only while a viewer is connected. A browser opened after the
    demonstration then shows them.
    """
    slow = asyncio.get_running_loop().call_later(SLOW_S, _print, _slow_start(fleet))
    try:
        await fleet.until_ready()
    finally:
        slow.cancel()
    watching = asyncio.create_task(fleet.watch_dashboard())
    try:
        await _show(fleet, config)
        if config.stay:
            await asyncio.Event().wait()
    finally:
        watching.cancel()


def _slow_start(fleet: LocalFleet) -> str:
    return (
        "still starting: the first start on a machine compiles kernels, which its log counts "
        f"(logs: {fleet.directory})"
    )


async def _show(fleet: LocalFleet, config: UpConfig) -> None:
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client:
        demo = Demo(client, fleet.router_url)
        endpoints = await demo.look_around()
        _print(report.fleet_table(fleet, endpoints))
        for sentence in await demo.attachments():
            _print(sentence)
        _print(f"\nwatch it in a browser: {fleet.router_url}/")
        for demonstration in _demonstrations(fleet, config, demo, client):
            await _demonstrate(demonstration)
    _print(report.where_to_go_on(fleet))
    if config.stay:
        _print("Ctrl-C stops everything")


def _demonstrations(
    fleet: LocalFleet, config: UpConfig, demo: Demo, client: httpx.AsyncClient
) -> Iterator[Awaitable[None]]:
    if not config.demo:
        return
    if config.vllm is not None:
        endpoint = EndpointDemo(client, fleet.openai_url, fleet.model_name, are_tokens=False)
        yield _serve(endpoint, demo)
        return
    if config.disaggregated is not None:
        endpoint = EndpointDemo(client, fleet.openai_url, fleet.model_name, are_tokens=True)
        yield _hand_over(endpoint, demo)
        return
    yield _run_both_ways(demo)
    if config.share and config.workers > 1:
        yield _force_elsewhere(SharingDemo(demo))


async def _demonstrate(shown: Awaitable[None]) -> None:
    """Run a demonstration; the end of a child ends it, but not the fleet."""
    try:
        await shown
    except* (httpx.HTTPError, TimeoutError) as group:
        _complain(f"the demonstration was interrupted: {group.exceptions[0]!r}")


async def _run_both_ways(demo: Demo) -> None:
    workload = conversations()
    requests = sum(len(conversation) for conversation in workload)
    _print(f"\n{len(workload)} conversations, {requests} requests, first placed round-robin …")
    await demo.warm_up(workload[0][0].prompt)
    await demo.forget_everything()
    round_robin = await demo.round_robin(workload, _ignore)
    await demo.forget_everything()
    _print(f"… and now by the router:\n\n{report.header()}")
    baseline = {(o.turn.conversation, o.turn.number): o for o in round_robin}
    routed = await demo.by_router(workload, lambda outcome: _print(report.row(outcome, baseline)))
    _sum_up(routed, round_robin)


async def _hand_over(endpoint: EndpointDemo, demo: Demo) -> None:
    workload = conversations()
    requests = sum(len(conversation) for conversation in workload)
    await demo.warm_up(workload[0][0].prompt)
    await demo.forget_everything()
    _print(f"\n{requests} requests: one worker prefills, another decodes …\n")
    _print(report.handed_over_header())
    done: list[HandedOver] = []

    def show(row: EndpointRow) -> None:
        handed_over = HandedOver.of(row)
        if handed_over is not None:
            done.append(handed_over)
            _print(report.handed_over_row(handed_over))

    await endpoint.run(workload, show, users=1)
    _print(f"\n{report.handed_over_sum(done)}")


async def _serve(endpoint: EndpointDemo, demo: Demo) -> None:
    workload = conversations()
    urls = {rank.worker_id: url for rank, url in (await demo.look_around()).items()}
    _print(f"\n{len(workload)} conversations through the OpenAI endpoint …\n")
    _print(report.served_header())
    rows = await endpoint.run(
        workload, lambda row: _print(report.served_row(row, urls)), PARALLEL_CONVERSATIONS
    )
    _print(f"\n{report.served_sum(rows)}")


async def _force_elsewhere(sharing: SharingDemo) -> None:
    longest = [max(turns, key=lambda turn: len(turn.prompt)) for turns in conversations()]
    _print(f"\n{len(longest)} prompts, each forced to another worker than computed it …\n")
    _print(report.forced_header())
    forced = await sharing.run(longest, lambda each: _print(report.forced_row(each)))
    _print(f"\n{report.forced_sum(forced)}")


def _sum_up(routed: Sequence[DemoRow], round_robin: Sequence[DemoRow]) -> None:
    _print(f"\n{report.comparison(Summary.of(routed), Summary.of(round_robin))}")
    _print(f"\n{report.agreement(routed)}")
    explained = max(routed, key=lambda outcome: outcome.cached_tokens).decision
    if explained is not None:
        _print(f"\n{report.explanation(explained)}")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"! {text}\n")
    sys.stderr.flush()


def _ignore(_: DemoRow) -> None:
    """Print nothing: the baseline is shown next to the router's run."""
