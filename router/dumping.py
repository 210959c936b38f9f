"""Reads a core's index out in slices; others get their turn between two of them."""

import asyncio

from router.core import RouterCore
from router.indexer.dumps import IndexDump
from router.protocol.values import Scope


async def dumped(core: RouterCore, only: Scope | None = None) -> IndexDump:
    """What is held from now on till the end, in one scope or in all. Raises IndexDisabledError."""
    event_ids, slices = core.index.event_ids(), []
    for scope, part in core.dump_slices():
        if only in (None, scope):
            slices.append((scope, part))
        await asyncio.sleep(0)
    return IndexDump(event_ids, slices)
