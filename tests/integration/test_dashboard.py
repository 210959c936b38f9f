"""The dashboard, as people use it: a real fleet, a real browser, real clicks and keys."""

import asyncio
import os
import re
import signal
import time

import httpx
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe

from router.accuracy.observation import Observation
from router.core.commands import UpsertWorker
from router.protocol.values import Scope
from router.tools.up.fleet import FleetPlan, reference_fleet
from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually, free_port, freeze
from support.values.browsers import browser, chromium, tab
from support.values.builders import announcement

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(chromium() is None, reason="no Chromium here: make chromium"),
]

SMALL_MODEL = {"KV_ROUTER_AGENT_NUM_LAYERS": "1", "KV_ROUTER_AGENT_HIDDEN_SIZE": "64"}
SYSTEM = "You are a careful clerk of an old library. Answer in one line, and name the shelf. " * 3
QUESTIONS = ["Where are the maps?", "Who wrote the psalter?", "Is the vault dry?", "And the keys?"]
PICTURED_S = 40.0 if "KV_ARTEFACTS" in os.environ else 0.0
"""Traffic before the pictures of the documentation are taken: curves need some."""

FOUND = re.compile(r"2\d\d tokens, [1-9]")
"""A decision about one of these, of which something was cached."""

RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
NOTES_WHAT_IT_SAYS = """
window.said = [];
const texts = () => ["#status", "#banner"].map(each => document.querySelector(each).textContent);
new MutationObserver(() => said.push(...texts())).observe(
  document.body, { subtree: true, childList: true, characterData: true });
"""

TOKENS = """
[[tokens]]
name = "boss"
token = "boss-boss-boss-boss"
scopes = ["route", "admin", "metrics"]
[[tokens]]
name = "gateway"
token = "gate-gate-gate-gate"
scopes = ["route"]
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def opened():
    async with browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory):
    """A bus, a router, two workers with two tiers each, and OpenAI's interface over them."""
    before = {name: os.environ.get(name) for name in SMALL_MODEL}
    os.environ.update(SMALL_MODEL)
    plan = FleetPlan(
        directory=tmp_path_factory.mktemp("fleet"),
        workers=2,
        dp_size=1,
        num_blocks=512,
        host_cache_blocks=512,
        router_port=free_port(),
        openai_port=free_port(),
    )
    fleet = reference_fleet(plan)
    async with fleet.running(print):
        await fleet.until_ready()
        yield fleet
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest_asyncio.fixture(loop_scope="module")
async def page(opened, fleet):
    async with tab(opened, fleet.router_url) as page:
        await page.says("#status", "Ready")
        yield page


async def ask(fleet, *questions, **fields):
    """Have the fleet answer, so that there is something to see."""
    async with httpx.AsyncClient(base_url=fleet.openai_url, timeout=120) as client:
        for question in questions:
            prompt = question if SYSTEM in question else SYSTEM + question
            body = {"model": "default", "prompt": prompt, "max_tokens": 2, **fields}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


async def talk(fleet, seconds):
    """Visitors of two libraries for a time, each asking one question after the other."""
    await asyncio.gather(
        _visits(fleet, SYSTEM, seconds), _visits(fleet, f"Reading room. {SYSTEM}", seconds)
    )


async def _visits(fleet, system, seconds):
    end_s, visitor = time.monotonic() + seconds, 0
    while not visitor or time.monotonic() < end_s:
        visitor += 1
        said = f"{'' if visitor % 5 else f'Annex {visitor}. '}{system}Visitor {visitor}: "
        for question in QUESTIONS:
            said += f"{question} "
            await ask(fleet, said)


async def another_falls(page, fleet, number):
    """Whether there are more than `count`: in a burst some are skipped."""
    await ask(fleet, "Something new")
    return await page.page.locator("#decisions button").count() > number


async def test_workers_decisions_and_prefixes_are_shown_as_they_are(page, fleet):
    await page.until("document.querySelectorAll('#workers tbody tr').length === 2")
    await page.until("document.querySelectorAll('#workers [data-trust=exact]').length === 2")
    await ask(fleet, *QUESTIONS)
    await page.until("document.querySelectorAll('#decisions button').length >= 4")
    await page.until("document.querySelectorAll('#prefixes tbody tr').length > 0")
    await page.says("#workers-note", "of 2")
    await ask(fleet, "Is it streamed?", stream=True)
    await page.says("#latencies tbody tr:first-child", "predicted")
    await page.says("#ttft-note", "predicted")
    await page.until("document.querySelector('#hits').textContent.includes('%')")
    await page.says("#prefixes thead", "worker-")
    await page.until("document.querySelector('#prefixes .held .device') !== null")
    await page.page.hover("#rate-curve")
    await page.says("#rate-curve .span", " a second")
    assert page.complaints == []
    assert page.hosts == {f"127.0.0.1:{fleet.router_port}"}


@pytest.mark.long
async def test_a_decision_is_explained_and_stays_while_others_fall(page, fleet):
    await ask(fleet, *QUESTIONS)
    await page.until("document.querySelectorAll('#decisions button').length >= 4")
    await page.page.locator("#decisions button", has_text=FOUND).nth(1).click()
    await page.says("#decision h3", "was chosen")
    await page.says("#decision .because", "already holds")
    await page.says("#decision .because", "left to compute")
    assert await page.page.locator("#decision tbody tr").count() == 2
    before = await page.page.inner_text("#decision .because")
    number = await page.page.locator("#decisions button").count()
    await eventually(lambda: another_falls(page, fleet, number))
    assert await page.page.inner_text("#decision .because") == before
    await page.page.click("text=Follow the newest")
    await page.until("document.querySelector('#decisions button').ariaCurrent === 'true'")


@pytest.mark.long
async def test_a_prompt_shows_where_it_would_go_and_books_nothing(page, fleet):
    await ask(fleet, *QUESTIONS)
    await page.page.keyboard.press("t")
    await page.page.fill("#prompt", SYSTEM + QUESTIONS[0])
    await page.page.click("#look button[type=submit]")
    await page.says("#look-answer .note", "Tokenized by the engine of worker-")
    await page.says("#look-answer .because", "already holds")
    await page.says("#announce", "It would go to worker-")
    await page.page.select_option("#look-kind", "tokens")
    await page.page.fill("#prompt", "[1, 2, 3")
    await page.page.press("#prompt", "Control+Enter")
    await page.says("#look-answer .note", "As given: 3 tokens (1, 2, 3)")
    await page.page.fill("#prompt", "1, two, 3")
    await page.page.click("#look button[type=submit]")
    await page.says("#look-answer .refusal", "“two” is not a token id")
    async with httpx.AsyncClient(base_url=fleet.router_url) as client:
        await eventually(lambda: equals(_reservations(client), 0.0))


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_meets_accessibility_rules(opened, fleet, scheme):
    async with tab(opened, fleet.router_url, color_scheme=scheme) as page:
        await page.says("#status", "Ready")
        await ask(fleet, *QUESTIONS)
        await page.until("document.querySelectorAll('#decisions button').length >= 4")
        await page.until("document.querySelector('#prefixes .held .device') !== null")
        await _meets_rules(page, scheme)
        await page.page.click("#drawer-button")
        await page.page.fill("#prompt", SYSTEM + QUESTIONS[1])
        await page.page.click("#look button[type=submit]")
        await page.says("#look-answer h3", "It would go to worker-")
        await _meets_rules(page, f"{scheme}-drawer")


async def _meets_rules(page, name):
    """Its accessibility on a phone, a laptop and a wall; on a phone every column is in sight."""
    for width in (320, 1440, 3840):
        await page.page.set_viewport_size({"width": width, "height": 900})
        assert await page.overflows_by() <= 0
        wide = (
            "[...document.querySelectorAll('.scroller')].filter(e => e.scrollWidth > e.clientWidth)"
        )
        assert await page.page.evaluate(f"{wide}.length") == 0, width
        await page.picture(f"{name}-{width}", full_page=True)
        found = await Axe().run(page.page, options=RULES)
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.long
async def test_pictures_for_the_readme(opened, fleet):
    """`make dashboard-pictures` puts them into docs/pictures."""
    for scheme in ("light", "dark"):
        screen = {"viewport": {"width": 1440, "height": 900}, "device_scale_factor": 0.8}
        async with tab(opened, fleet.router_url, color_scheme=scheme, **screen) as page:
            await page.says("#status", "Ready")
            await page.until("document.querySelectorAll('#workers tbody tr').length === 2")
            await ask(fleet, *QUESTIONS)
            await talk(fleet, PICTURED_S)
            await ask(fleet, *QUESTIONS)
            await page.until("document.querySelectorAll('#decisions button').length >= 4")
            await page.until("document.querySelector('#hits').textContent.includes('%')")
            await page.page.locator("#decisions button", has_text=FOUND).nth(1).click()
            await page.page.evaluate("document.activeElement.blur()")
            await page.page.evaluate("window.scrollTo(0, 0)")
            await page.picture(f"dashboard-{scheme}")


@pytest.mark.long
async def test_page_works_with_the_keyboard_alone(page):
    keys = page.page.keyboard
    await keys.press("Tab")
    await page.until("document.activeElement.className === 'skip'")
    await keys.press("Enter")
    await page.until("document.activeElement.id === 'main'")
    for _ in range(400):  # decisions and prefixes of other tests are on the way
        await keys.press("Tab")
        if is_there := await page.page.evaluate("document.activeElement.textContent === 'Trust'"):
            break
    assert is_there
    await keys.press("Enter")
    head = "document.querySelector('th[data-column=trust]').ariaSort"
    await page.until(f"{head} === 'descending'")
    await keys.press("Space")
    await page.until(f"{head} === 'ascending'")
    await page.page.focus("#help-button")
    await keys.press("Enter")
    await page.until("document.querySelector('#help').open")
    await keys.press("Escape")
    await page.until("!document.querySelector('#help').open")


@pytest.mark.long
async def test_a_theme_is_chosen_and_kept(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await page.page.evaluate(ground)
    await page.page.select_option("#theme", "dark")
    dark = await page.page.evaluate(ground)
    assert light != dark
    await page.page.reload()
    await page.until(f"{ground} === {dark!r}")


@pytest.mark.long
async def test_silent_worker_appears_on_the_timeline(page, fleet):
    await page.until("document.querySelectorAll('#workers tbody tr').length === 2")
    freeze(fleet.workers[0].pid)
    try:
        await page.says("#events", "removed: ")
        await page.until("document.querySelectorAll('#workers tbody tr').length === 1")
        await page.until("document.querySelector('#events [data-severity=fault]') !== null")
    finally:
        os.kill(fleet.workers[0].pid, signal.SIGCONT)
    await page.says("#events", "worker-1: joined")
    await page.until("document.querySelectorAll('#workers tbody tr').length === 2")


@pytest.mark.long
async def test_page_reconnects_to_a_restarted_router(page, fleet):
    await page.page.evaluate(NOTES_WHAT_IT_SAYS)  # it may be over before it is read
    os.kill(fleet.router.pid, signal.SIGKILL)
    for words in ("Showing data from", "Not connected"):
        await page.until("words => said.some(each => each.includes(words))", words)
    await page.says("#status", "Ready")
    await page.until("document.querySelector('#banner').hidden")


@pytest.mark.long
async def test_page_without_a_token_shows_the_sign_in(opened, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    router = DirectRouter(use_kv_events=False, token_file=str(path))
    url = str(router.client.base_url)
    async with router.running(), tab(opened, url) as page:
        await page.says("#status", "Sign in to watch")
        await page.picture("sign-in")
        await page.page.fill("#token", "wrong-wrong-wrong")
        await page.page.press("#token", "Enter")
        await page.says("#sign-in-why", "unknown token")
        await page.page.fill("#token", "gate-gate-gate-gate")
        await page.page.click("#sign-in button")
        await page.says("#status", "This token may not watch")
        await page.page.fill("#token", "boss-boss-boss-boss")
        await page.page.click("#sign-in button")
        await page.says("#status", "Not ready: no schedulable workers")
        await page.says("#workers-empty", "No workers yet")
        await page.page.click("#drawer-button")
        await page.page.select_option("#look-kind", "tokens")
        await page.page.fill("#prompt", "1 2 3")
        await page.page.click("#look button[type=submit]")
        await page.says("#look-answer .refusal", "no schedulable workers")
        assert await page.page.is_hidden("#sign-in")


@pytest.mark.long
async def test_miswired_engine_is_shown_with_advice(opened):
    router = DirectRouter(use_kv_events=False)
    url = str(router.client.base_url)
    async with router.running(), tab(opened, url) as page:
        await page.says("#status", "Not ready")
        assert await page.page.is_hidden("#findings")
        longer = Observation(1, Scope("m", "g"), None, 4, 100, 0, 0, 0, 101, 0)
        for _ in range(20):
            router.service.host.core.closed_loop.note(longer, lambda: None, time.monotonic())
        await page.says("#findings-list", "Likely the chat template")
        await page.says("#findings-list .concerned", "model m, group g (20 requests)")
        await page.says("#findings-list .concerned", "worker 1 (20 requests)")
        assert await page.page.locator("#findings-list > li").count() == 1
        await page.says("#findings-list", "What to do: render prompts as the engine does")
        await page.says("#events", "likely chat_template")
        await page.picture("findings")
        assert page.complaints == []


@pytest.mark.long
async def test_thousand_workers_can_be_searched_sorted_and_paged(opened):
    async with DirectRouter(use_kv_events=False).running() as router:
        for worker_id in range(1, 1_001):
            announced = announcement(worker_id, model_name=f"m{worker_id % 7}")
            router.service.host.core.handle(UpsertWorker(announced), time.monotonic())
        async with tab(opened, str(router.client.base_url)) as page:
            await page.says("#workers-pages", "1–25 of 1,000 ranks")
            rows = "document.querySelectorAll('#workers tbody tr').length"
            await page.until(f"{rows} === 25")
            await page.until("document.querySelectorAll('#heat-map i').length === 1000")
            await page.page.hover("#heat-map [data-key='7.0']")
            await page.says("#heat-note", "w7: ")
            await page.picture("1000-workers")
            await page.page.click("#heat-map [data-key='7.0']")
            await page.says("#worker-title", "w7")
            await page.page.keyboard.press("Escape")
            await page.page.click("#workers-pages >> text=Next")
            await page.says("#workers-pages", "26–50")
            await page.page.fill("#workers-find", "w77")
            await page.says("#workers-pages", "1–11 of 11 ranks")
            for first in ("w77", "w779"):
                await page.page.click("th[data-column=name] button")
                await page.says("#workers tbody tr:first-child", first)
            await page.page.fill("#workers-find", "nobody is called so")
            await page.says("#workers-empty", "None of 1,000 ranks")
            assert page.complaints == []
            await eventually(lambda: _has_several_frames(router))  # the first has all rows
        bytes_a_frame = await router.metric("kv_router_dashboard_frame_bytes_total")
        frames = await router.metric("kv_router_dashboard_frames_total")
        assert bytes_a_frame / frames < 256 * 1024


@pytest.mark.long
async def test_filters_are_in_the_address_and_the_worst_come_first(opened):
    async with DirectRouter(use_kv_events=False).running() as router:
        for worker_id in range(1, 41):
            body = {"endpoint": f"http://h{worker_id}", "model_name": f"m{worker_id % 2}"}
            await router.post("/workers", {"worker_id": worker_id, "block_size": 4, **body})
        await router.client.patch("/workers/33", json={"lifecycle": "cordoned"})
        async with tab(opened, str(router.client.base_url)) as page:
            await page.says("#workers-pages", "1–25 of 40 ranks")
            await page.says("#workers tbody tr:first-child", "worker 33")
            await page.says("#models", "19 of 20")
            await page.page.keyboard.press("/")
            await page.until("document.activeElement.id === 'workers-find'")
            await page.page.keyboard.press("ArrowDown")
            await page.page.keyboard.press("ArrowDown")
            named = "document.activeElement.textContent"
            await page.until(
                f"{named} === document.querySelectorAll('#workers tbody th button')[1].textContent"
            )
            await page.page.keyboard.press("ArrowUp")
            await page.page.keyboard.press("ArrowUp")
            await page.page.keyboard.type("h1")
            await page.page.select_option("#workers-model", "m1")
            await page.says("#workers-pages", "1–6 of 6 ranks")
            await page.until("location.search === '?find=h1&model=m1'")
            await page.page.reload()
            await page.says("#workers-pages", "1–6 of 6 ranks")
            await page.until("document.querySelector('#workers-find').value === 'h1'")
            await page.page.click("#workers-title")
            await page.page.keyboard.press("?")
            await page.until("document.querySelector('#help').open")
            await page.page.keyboard.press("Escape")
            assert page.complaints == []


@pytest.mark.long
async def test_worker_is_cordoned_and_released_on_the_page(opened):
    async with DirectRouter(use_kv_events=False).running() as router:
        body = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        await router.post("/workers", body)
        async with tab(opened, str(router.client.base_url)) as page:
            await page.page.click("#workers tbody button")
            await page.says("#worker-facts", "schedulable")
            await page.page.click("#worker-orders >> text=Cordon")
            await page.says("#worker-facts", "cordoned")
            view = (await router.client.get("/workers/1")).json()
            assert view["lifecycle"] == "cordoned"
            found = await Axe().run(page.page, options=RULES)
            assert found.violations_count == 0, found.generate_report()
            await page.picture("worker")
            await page.page.click("#worker-orders >> text=Let it serve")
            await page.says("#worker-facts", "schedulable")
            await page.page.click("#worker-close")
            await page.says("#events", "schedulable → cordoned")
            assert page.complaints == []


@pytest.mark.long
async def test_page_opened_after_an_incident_shows_it(opened):
    async with DirectRouter(use_kv_events=False).running() as router:
        body = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        await router.post("/workers", body)
        for number in range(8):
            asked = await router.post("/select", {"token_ids": [number] * 9})
            assert asked.status_code == 200
        await router.client.delete("/workers/1")
        await eventually(lambda: _is_noted(router))
        async with tab(opened, str(router.client.base_url)) as page:
            await page.until("document.querySelectorAll('#decisions button').length > 0")
            await page.says("#events", "removed")


async def _is_noted(router):
    return await router.metric("kv_router_dashboard_shown_decisions_total") >= 1


async def _has_several_frames(router):
    return await router.metric("kv_router_dashboard_frames_total") > 1


async def _reservations(client):
    text = (await client.get("/metrics")).text
    line = next(each for each in text.splitlines() if each.startswith("kv_router_reservations "))
    return float(line.split()[1])
