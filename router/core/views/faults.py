"""The known faults of workers that callers registered, in sentences. Read-only."""

from collections.abc import Iterator

from router.core.core import RouterCore

MOST_SENTENCES = 8


def faults(core: RouterCore) -> list[str]:
    """Return what is wrong with workers and ranks, at most a few sentences. O(faulty ones)."""
    found = list(_problems(core))
    for rank, fault in core.index.faults():
        worker = core.fleet.get(rank.worker_id)
        if worker is not None and worker.problem is None:
            found.append(f"worker {rank.worker_id} rank {rank.dp_rank}: {fault.text}")
    return _shortened(found)


def _problems(core: RouterCore) -> Iterator[str]:
    for worker_id in sorted(core.fleet.faulty):
        worker = core.fleet.get(worker_id)
        sentence = None if worker is None else worker.problem or worker.caution
        if sentence is not None:
            yield f"worker {worker_id}: {sentence}"


def _shortened(sentences: list[str]) -> list[str]:
    more = len(sentences) - MOST_SENTENCES
    return [*sentences[:MOST_SENTENCES], *([f"and {more} more"] if more > 0 else ())]
