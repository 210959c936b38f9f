"""Faults of our own making, in memory: the simulator is worth what it finds of them.

    python -m simulation.mutations          which are found, and by how many runs

Each takes away one safeguard. Some safeguards stand behind others: they are taken away together.
"""

import argparse
import sys
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from router.core.fleet import Beacons
from router.core.membership import Membership
from router.indexer.event_log import EventLog, LogVerdict
from router.indexer.healing import Resync
from router.indexer.rank_index import RankIndex
from router.indexer.trusted_index import TrustedIndex
from router.ingest.event_stream import StreamReader
from router.protocol.events import EventBatch
from router.publisher.batch_order.replay_schedule import ReplaySchedule
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.feed.engine_feed import EngineFeed
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from simulation import run
from simulation.agents import Agent
from simulation.bus import Server
from simulation.clients import SimulatedTransport

_apply_removed = Normalizer._apply_removed
_classify = EventLog.classify
_note_failure = KvEventPublisher._note_failure
_append = Server.append
_drop_before = SimulatedTransport.drop_before


def _gaps_accepted(log, message):
    verdict = _classify(log, message)
    is_ours = isinstance(message, EventBatch) and message.incarnation == log.incarnation
    return LogVerdict.APPLY if verdict is LogVerdict.GAP and is_ours else verdict


def _duplicates_applied(log, message):
    verdict = _classify(log, message)
    is_batch = isinstance(message, EventBatch)
    return LogVerdict.APPLY if verdict is LogVerdict.DUPLICATE and is_batch else verdict


def _parts_mixed(log, checkpoint):
    log._parts.append(checkpoint)
    return checkpoint.part == checkpoint.parts - 1


def _failure_forgotten(publisher, error):
    _note_failure(publisher, error)
    publisher._journal._checkpoint_due = False


def _conflicts_ignored(server, subject, payload, expected_sequence, replaces_history):
    return _append(server, subject, payload, None, replaces_history)


async def _purged_too_far(transport, subject, sequence):
    await _drop_before(transport, subject, sequence + 1)


def _first_removal_counts(normalizer, event):
    """Whatever is removed is gone, however many copies there were."""
    for _ in range(3):
        _apply_removed(normalizer, event)


async def _never_verified(agent):
    """The id is taken for ours."""


async def _restart_unnoticed(reader):
    state = await reader._source.state()
    reader._position = min(reader._position, state.last_sequence)
    return False


def _removals_kept(journal, tier, sequence_hashes):
    return journal._held.remove(tier, sequence_hashes)


UNCHECKED = (Resync, "break_off", lambda *_: None)
"""Counts and digests are not compared."""

MUTATIONS = {
    "gaps are accepted, unchecked": [(EventLog, "classify", _gaps_accepted), UNCHECKED],
    "parts are mixed, unchecked": [(EventLog, "_collect", _parts_mixed), UNCHECKED],
    "removals are not published, unchecked": [(EventJournal, "removed", _removals_kept), UNCHECKED],
    "removals are not published": [(EventJournal, "removed", _removals_kept)],
    "a new stream is not noticed, unchecked": [
        (StreamReader, "_is_new", _restart_unnoticed),
        (EventLog, "classify", _gaps_accepted),
        UNCHECKED,
    ],
    "no checkpoint after a failure": [(KvEventPublisher, "_note_failure", _failure_forgotten)],
    "the purge goes too far, unasked": [
        (SimulatedTransport, "drop_before", _purged_too_far),
        (TrustedIndex, "take_wanted_checkpoints", lambda *_: []),
    ],
    "never lagging": [(RankIndex, "_lag", lambda *_, **__: None)],
    "nothing ever waits": [(KvEventPublisher, "waiting_s", property(lambda _: 0.0))],
    "any report is fresh": [
        (Beacons, "fresh_at_s", lambda beacons, _: max(beacons._sent_s.values(), default=None))
    ],
    "no checkpoint is asked for": [(TrustedIndex, "take_wanted_checkpoints", lambda *_: [])],
    "reports are not compared": [(TrustedIndex, "compare", lambda *_: None)],
    "blocks of the gone stay": [(Membership, "_forget_rank", lambda *_: 0)],
    "an engine's new life is not noticed": [(EngineFeed, "_begin_life", lambda *_: None)],
    "an engine's lost batches are passed over": [(EngineFeed, "_lose", lambda *_: None)],
    "an engine's clear is passed over": [(Normalizer, "_apply_cleared", lambda *_: None)],
    "copies are not counted": [(Normalizer, "_apply_removed", _first_removal_counts)],
    "engines are not probed": [(ReplaySchedule, "is_probe_due", lambda *_: False)],
}
"""What is replaced, by name of the mutation: owner, attribute, replacement."""

HIDDEN = {
    "gaps are accepted": [(EventLog, "classify", _gaps_accepted)],
    "parts are mixed": [(EventLog, "_collect", _parts_mixed)],
    "duplicates are applied, unchecked": [(EventLog, "classify", _duplicates_applied), UNCHECKED],
    "conflicts are ignored": [(Server, "append", _conflicts_ignored)],
    "the purge goes too far": [(SimulatedTransport, "drop_before", _purged_too_far)],
    "a new stream is not noticed": [(StreamReader, "_is_new", _restart_unnoticed)],
    "twins are not looked for": [(Agent, "verify", _never_verified)],
    "a broken rank is called exact": [(EventLog, "break_off", lambda *_: None)],
}
"""The same, but another safeguard stands behind: nothing wrong is answered, or hardly ever."""


@contextmanager
def applied(name):
    """Break it, for a while."""
    with ExitStack() as stack:
        for owner, attribute, replacement in (MUTATIONS | HIDDEN)[name]:
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def first_failure(name, seeds):
    """The first run that finds the mutation, and how many it took; (None, runs) if none does."""
    with applied(name):
        runs = 0
        for result in run.run_seeds(seeds):
            runs += 1
            if result.failures:
                return result, runs
    return None, runs


def main():
    parser = argparse.ArgumentParser(prog="simulation.mutations")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("names", nargs="*", help="only these")
    options = parser.parse_args()
    for name in options.names or (*MUTATIONS, *HIDDEN):
        result, runs = first_failure(name, range(options.runs))
        found = "not found" if result is None else f"seed {result.seed}: {result.failures[0]}"
        print(f"{name:34} {runs:5} runs  {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
