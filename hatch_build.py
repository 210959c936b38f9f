"""What a package says of itself on an index: README with links that work there, and addresses.

`KV_ROUTER_REPOSITORY=https://…` at build (`make dist REPOSITORY=https://…`) is where the source
is. Links of README then lead there, to the tag of the version. Without it links are plain text,
pictures are left out, and the package has no addresses.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#]+)(#[\w-]+)?\)")
PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}


class PublishedMetadata(MetadataHookInterface):
    """The fields that depend on where the source is published."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        repository = os.environ.get("KV_ROUTER_REPOSITORY", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text()
        readme = published(text, repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        metadata["urls"] = addresses(repository, metadata["version"])


def published(text: str, repository: str, version: str) -> str:
    """Return a page of the root folder with links that do not depend on where it is shown."""

    def absolute(link: re.Match[str]) -> str:
        mark, name, path, place = link.groups(default="")
        if not repository:
            return "" if mark else name
        shown = "raw" if mark else "blob"
        return f"{mark}[{name}]({repository}/{shown}/v{version}/{path}{place})"

    return LINK.sub(absolute, text)


def addresses(repository: str, version: str) -> dict[str, str]:
    """Return the addresses of a package, by label."""
    if not repository:
        return {}
    pages = {name: f"{repository}/blob/v{version}/{path}" for name, path in PAGES.items()}
    return {"Source": repository, "Issues": f"{repository}/issues", **pages}
