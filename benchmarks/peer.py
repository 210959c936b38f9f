"""The peer: the Rust index of PyPI's `ai-dynamo-runtime`, in an environment of its own.

That environment has everything our index needs as well, so both run in one process. It is pinned to
one core: the peer's calls hop between threads, and take long or short by chance unless all of them
share a core.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from conformance.environments import python_of

HERE = Path(__file__).resolve().parent
VENV = HERE / ".peer-venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = HERE / "peer-requirements.txt"


def enter() -> None:
    """Run the command again in the peer's environment, unless it is; then pin to one core."""
    if not (VENV.exists() and os.path.samefile(sys.prefix, VENV)):
        python_of(VENV, REQUIREMENTS)
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        os.execve(PYTHON, [str(PYTHON), *sys.argv], environment)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class PeerTree:
    """The peer's tree. It knows a block by its holder's name for it and by its local hash."""

    def __init__(self) -> None:
        tree = dynamo().RadixTree()
        self.apply = tree.apply_event
        """Apply an encoded event of a worker; visible on return."""
        self.find = tree.find_matches
        """Search by a list of local hashes."""
        self.drop = tree.remove_worker

    def depths(self, local_hashes: list[int]) -> dict[int, int]:
        """Leading blocks held, by worker."""
        return {
            worker_id: depth for (worker_id, _), depth in self.find(local_hashes).scores.items()
        }


def peer_block_hashes(token_ids: list[int], block_size: int) -> list[int]:
    """The peer's local hashes of a prompt."""
    return dynamo().compute_block_hash_for_seq(token_ids, block_size)


def dynamo() -> ModuleType:
    """The peer's module; exists in its own environment alone."""
    return importlib.import_module("dynamo.llm")


def stored_event(
    event_id: int, parent: int | None, local_hashes: Sequence[int], sequence_hashes: Sequence[int]
) -> bytes:
    """Consecutive blocks after `parent`, as the peer reads them."""
    blocks = ",".join(
        [
            f'{{"block_hash":{sequence_hash},"tokens_hash":{local_hash},"mm_extra_info":null}}'
            for sequence_hash, local_hash in zip(sequence_hashes, local_hashes, strict=True)
        ]
    )
    stored = f'{{"parent_hash":{json.dumps(parent)},"blocks":[{blocks}]}}'
    return f'{{"event_id":{event_id},"data":{{"stored":{stored}}},"dp_rank":0}}'.encode()


def removed_event(event_id: int, sequence_hashes: Sequence[int]) -> bytes:
    """Blocks that a worker no longer holds, as the peer reads them."""
    hashes = ",".join(map(str, sequence_hashes))
    removed = f'{{"block_hashes":[{hashes}]}}'
    return f'{{"event_id":{event_id},"data":{{"removed":{removed}}},"dp_rank":0}}'.encode()
