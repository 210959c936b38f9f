"""A hook of mkdocs: links of pages to files that are not pages, and anchors as GitHub makes them."""

import os
import re
from posixpath import normpath
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]*)(#[\w-]+)?\)")


def on_config(config: Any) -> None:
    """Name headings as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = anchor


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links out of docs/ to `KV_ROUTER_REPOSITORY`; without it they become plain text."""
    repository = os.environ.get("KV_ROUTER_REPOSITORY", "").rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        name, path, place = link.groups(default="")
        if not repository:
            return name
        return f"[{name}]({repository}/blob/HEAD/{normpath('docs/' + path)}{place})"

    return OUTSIDE.sub(absolute, markdown)


def anchor(heading: str, _separator: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
