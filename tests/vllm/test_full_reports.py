"""Clients may have vLLM report again what it holds (`kv_cache_report_mode`): no copy was made."""

import pytest

from support.vllm.vllm_placing import Bench
from support.vllm.vllm_routers import DirectRouter
from support.vllm.vllm_traffic import Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

REQUESTS = 80


async def test_full_reports_are_never_exact_and_wrong(engines, tmp_path, record_property):
    """Neither by a router with the setting, nor by one that finds more copies than blocks."""
    routers = [DirectRouter(tmp_path, report_mode) for report_mode in ("new", "full")]
    try:
        for router in routers:
            await router.attach(engines, report_mode=router.name)
        bench, traffic = Bench(routers, engines, kv_cache_report_mode="full"), Traffic(seed=11)
        for _ in range(REQUESTS):
            ask = traffic.next()
            answer = await bench.place(ask)
            traffic.answered(ask, answer.token_ids)
    finally:
        for router in routers:
            router.close()
    for line in bench.summary():
        record_property("measured", line)
    assert not bench.wrong
    for router in routers:
        outcomes = bench.of(router)
        assert any(each.is_exact and each.cached_tokens for each in outcomes)
        assert any(not each.is_right for each in outcomes)
