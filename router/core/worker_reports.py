"""Commands of what workers report: events, restored state, loads, beacons and their connections."""

from collections.abc import Callable
from random import Random
from typing import Any

from router.core import commands
from router.core.commands import AnyHandled, Handled
from router.core.effects import FetchWorker, SendBeacon
from router.core.fleet import Beacons, Fleet
from router.core.membership import Membership
from router.core.rank_status import RankStatus
from router.indexer.event_log import LogVerdict
from router.indexer.trusted_index import TrustedIndex
from router.protocol.loads import Beacon
from router.protocol.values import TIERS, unpack_hashes
from router.scheduler.predictor.predictor import Predictor
from router.sequence.active.tracker import Tracker

SETTLED_RANKS = 64
"""Restored ranks checked without a pause."""


class WorkerReports:
    """The handlers of reports, which keep the index, the fleet and learned rates up to date."""

    __slots__ = ("_beacons", "_fleet", "_index", "_membership", "_predictor", "_status", "_tracker")

    def __init__(
        self,
        fleet: Fleet,
        index: TrustedIndex,
        tracker: Tracker,
        predictor: Predictor,
        status: RankStatus,
        membership: Membership,
        rng: Random,
    ) -> None:
        self._beacons = Beacons(rng)
        self._fleet = fleet
        self._index = index
        self._tracker = tracker
        self._predictor = predictor
        self._status = status
        self._membership = membership

    def handlers(self) -> dict[type, Callable[[Any, float], AnyHandled]]:
        """Return the handler of each command."""
        return {
            commands.Apply: self._apply,
            commands.ApplySlice: self._apply_slice,
            commands.BeginFill: self._begin_fill,
            commands.Resume: self._resume,
            commands.Settle: self._settle,
            commands.ApplyLoad: self._apply_load,
            commands.ApplyPolled: self._apply_polled,
            commands.SetConnected: self._set_connected,
            commands.StreamLost: self._stream_lost,
            commands.MarkBeacon: self._mark_beacon,
            commands.Search: self._search,
        }

    def _apply(self, command: commands.Apply, now_s: float) -> Handled[LogVerdict | None]:
        message = command.message
        life_before = self._index.incarnation(message.rank)
        verdict = self._index.apply(message, now_s)
        if verdict is LogVerdict.NEW_LIFE and life_before is not None:
            self._tracker.drop_rank(message.rank)
        if verdict is LogVerdict.APPLY:
            self._status.note(message.rank, now_s, is_trusted=message.hybrid is None)
        else:
            self._membership.note_source(message.rank, now_s)
        return verdict, []

    def _apply_slice(self, _: commands.ApplySlice, __: float) -> Handled[bool]:
        return self._index.apply_slice(), []

    def _begin_fill(self, _: commands.BeginFill, __: float) -> Handled[None]:
        self._index.begin_fill()
        return None, []

    def _resume(self, command: commands.Resume, now_s: float) -> Handled[bool]:
        rank = command.state.rank
        worker = self._fleet.get(rank.worker_id)
        if worker is not None and worker.announcement.source(rank) is not None:
            return False, []
        held = [(int(each.tier), unpack_hashes(each.sequence_hashes)) for each in command.blocks]
        for of_class in command.class_blocks:
            place = TIERS + of_class.class_index
            held.append((place, unpack_hashes(of_class.sequence_hashes)))
        return self._index.resume(command.state, held, now_s), []

    def _settle(self, _: commands.Settle, now_s: float) -> Handled[bool]:
        return self._index.settle(SETTLED_RANKS, now_s), []

    def _apply_load(self, command: commands.ApplyLoad, now_s: float) -> Handled[None]:
        report = command.report
        if not self._fleet.expects(report):
            return None, [FetchWorker(report.worker_id)]
        fresh_at_s = self._beacons.fresh_at_s(report)
        if self._fleet.record_report(report, now_s, fresh_at_s):
            self._index.compare(report, fresh_at_s, now_s)
            self._predictor.observe(report, now_s)
            self._status.note(report.rank, now_s)
        return None, []

    def _apply_polled(self, command: commands.ApplyPolled, now_s: float) -> Handled[bool]:
        report = command.report
        if not self._fleet.record_polled(report, now_s):
            return False, []
        self._predictor.observe(report, now_s)
        self._status.note(report.rank, now_s)
        return True, []

    def _set_connected(self, command: commands.SetConnected, now_s: float) -> Handled[None]:
        self._fleet.set_connected(command.connected, now_s)
        return None, []

    def _stream_lost(self, _: commands.StreamLost, now_s: float) -> Handled[None]:
        announced = [worker.announcement for worker in self._fleet]
        on_bus = [rank for each in announced for rank in each.ranks if each.source(rank) is None]
        self._index.stream_lost(on_bus, now_s)
        return None, []

    def _search(self, command: commands.Search, _: float) -> Handled[None]:
        self._index.find_matches(command.scope, unpack_hashes(command.sequence_hashes))
        return None, []

    def _mark_beacon(self, _: commands.MarkBeacon, now_s: float) -> Handled[Beacon]:
        beacon = self._beacons.next(now_s)
        return beacon, [SendBeacon(beacon)]
