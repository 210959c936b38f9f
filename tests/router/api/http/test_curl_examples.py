"""Every route as `curl` asks it, and what a router answers."""

import re
from itertools import chain

from router.api.http.routes import ROUTES
from support.values.curl_examples import FILE, SECTIONS, page, request_of


async def test_a_router_answers_what_the_page_shows():
    """`PYTHONPATH=.:tests python tests/support/values/curl_examples.py` writes it anew."""
    assert await page() == FILE.read_text()


def test_every_route_is_shown():
    commands = chain.from_iterable(SECTIONS.values())
    asked = [request_of(each.partition(" | ")[0])[:2] for each in commands]

    def is_shown(route):
        path = re.sub(r"\{[a-z_]+\}", "[^/]+", route.path)
        return any(
            method == route.method and re.fullmatch(path, url.partition("?")[0])
            for method, url in asked
        )

    assert [route.path for route in ROUTES if not is_shown(route)] == []
