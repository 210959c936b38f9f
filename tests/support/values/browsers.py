"""A real browser, headless, for pages that are tested as people use them."""

import os
import shutil
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from playwright.async_api import Error, async_playwright

from support.processes.servers import eventually

ARTEFACTS = Path(os.environ.get("KV_ARTEFACTS", Path(__file__).parents[3] / "build/dashboard"))
"""Where screenshots are left."""

PATIENCE_MS = 120_000


def chromium():
    """Where Chromium is, if it is here: `make chromium` installs it."""
    named = os.environ.get("KV_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def browser():
    """Chromium; what it needs beside itself is not downloaded."""
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield opened
        finally:
            await opened.close()


class Tab:
    """A page, and what it complained of; every wait is long, and ends at once when it can."""

    def __init__(self, page):
        self.page = page
        self.complaints = []
        self.hosts = set()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _note(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def until(self, script, argument=None):
        """Until a script is true there."""
        try:
            # Not `wait_for_function`, which the page's own policy refuses.
            await eventually(lambda: self.page.evaluate(script, argument), PATIENCE_MS / 1000)
        except TimeoutError as error:
            text = await self.page.inner_text("body")
            raise AssertionError(f"never: {script} {argument}; the page says: {text}") from error

    async def says(self, selector, text):
        """Until an element says something."""
        await self.until(
            "([s, t]) => document.querySelector(s)?.textContent.includes(t)", [selector, text]
        )

    async def overflows_by(self):
        """How many pixels the page is too wide."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return await self.page.evaluate(script)

    async def picture(self, name, **options):
        """A screenshot, left for people. Chromium takes none where its processes are late."""

        async def is_taken():
            with suppress(Error):
                return await self.page.screenshot(
                    path=ARTEFACTS / f"{name}.png", animations="disabled", **options
                )

        await eventually(is_taken)


@asynccontextmanager
async def tab(opened, url, **options):
    """A page of its own, with storage of its own."""
    context = await opened.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    try:
        page = Tab(await context.new_page())
        await page.page.goto(url)
        yield page
    finally:
        await context.close()
