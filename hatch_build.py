"""What a package says of itself on an index: README with links that work there, and addresses.

`KV_ROUTER_REPOSITORY=https://…` at build (`make dist REPOSITORY=https://…`) is where the source
is. Links of README then lead there, to the tag of the version. Without it links are plain text,
pictures are left out, and the package has no addresses.

`KV_ROUTER_SHIPPED_KERNELS=FILE` puts compiled kernels (`python -m router.warm --ship`) into the
wheel, which is then for their interpreter and platform alone.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#]+)(#[\w-]+)?\)")
PLATFORM = "manylinux_2_28_x86_64"
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


class ShippedKernels(BuildHookInterface[Any]):
    """Compiled kernels within a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Include the file, and name the interpreter and platform that it is for."""
        path = os.environ.get("KV_ROUTER_SHIPPED_KERNELS")
        if version != "standard" or not path:
            return
        _, interpreter, *_ = Path(path).name.split(".")
        python = interpreter.replace("cpython-", "cp")
        folder = "router/runtime/kernels/shipped"
        build_data["force_include"][path] = f"{folder}/{Path(path).name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"{python}-{python}-{PLATFORM}"


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
