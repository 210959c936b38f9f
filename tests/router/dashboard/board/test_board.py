"""Frames, put together as a page puts them together, are what the core shows."""

from types import SimpleNamespace

import msgspec
import pytest

from router.accuracy.observation import Observation
from router.core.commands import Free, PrefillComplete, RemoveWorker, Select, SelectAndReserve
from router.dashboard.board.board import HISTORY_POINTS, HISTORY_S, Board
from router.dashboard.board.decision_feed import KEPT, SHOWN
from router.dashboard.board.frames import Frame
from router.observability.event_timeline import EventTimeline
from router.observability.health import ServiceStatus
from router.protocol.loads import LoadCounters
from router.protocol.requests import SelectRequest
from router.protocol.values import Scope
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank


@pytest.fixture
def world():
    world = World()
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    return world


@pytest.fixture
def board(world):
    return make(world)


def make(world):
    status = ServiceStatus("", needs_workers=True)
    clock = SimpleNamespace(at=1_000.0)
    timeline = EventTimeline(lambda: clock.at)
    return Board("r", world.core, status, lambda: (7, 400, 300), timeline)


class Page:
    """What a page knows."""

    def __init__(self):
        self.workers, self.ranks, self.events, self.decisions = {}, {}, {}, []

    def take(self, data):
        frame = msgspec.json.decode(data, type=Frame)
        if frame.is_whole:
            self.__init__()
        self.workers.update({each.worker_id: each for each in frame.workers})
        self.ranks.update({(each.worker_id, each.dp_rank): each for each in frame.ranks})
        self.events.update({each.entry_id: each for each in frame.events})
        for gone in frame.gone_workers:
            del self.workers[gone]
        for gone in frame.gone_ranks:
            del self.ranks[gone]
        self.decisions += frame.decisions
        return frame


def frame(board, now_s=0.0):
    for _ in board.look(now_s):
        pass
    return board.frame(now_s, 1_000.0 + now_s)


def decide(world, board, now_s=0.0, **fields):
    request = SelectRequest(token_ids=[*range(16)], **fields)
    placement = world.core.handle(Select(request, prepare(request, ())), now_s)[0]
    board.feed.take("select", request, placement, now_s, 1_000.0)


def test_late_page_equals_a_page_from_the_start(world, board):
    early, late = Page(), Page()
    early.take(frame(board))
    world.cache(rank(2), [*range(16)])
    world.core.handle(RemoveWorker(3, "silent"), 0.0)
    decide(world, board)
    early.take(frame(board, 1.0))
    world.worker(4)
    early.take(frame(board, 2.0))
    late.take(board.whole(1_002.0))
    for page in (early, late):
        assert set(page.workers) == {"1", "2", "4"}
        assert page.ranks["2", 0].device_blocks == 4
        assert [each.decision.worker_id for each in page.decisions] == [2]
    assert (late.workers, late.ranks, late.events) == (early.workers, early.ranks, early.events)


def test_a_frame_without_news_is_small(world, board):
    for worker_id in range(4, 1_004):
        world.worker(worker_id)
    first, second = frame(board), frame(board, 1.0)
    assert len(second) < 1_500 < len(first)
    assert len(board.whole(1_000.0)) < 300 * 1_024


def test_totals_are_those_of_the_router(world, board):
    world.book("a", [*range(16)])
    totals = Page().take(frame(board)).totals
    assert (totals.workers, totals.ranks, totals.active_requests) == (3, 3, 1)
    assert (totals.decisions, totals.prompt_tokens, totals.predicted_cached_tokens) == (7, 400, 300)
    assert (totals.ready, totals.bus_connected) == (True, None)
    assert totals.predicted_hits == 0.75


def test_tokens_that_engines_got_another_way_are_counted_as_unplaced(world, board):
    frame(board)
    before, after = (LoadCounters(prefill_tokens=tokens) for tokens in (0, 1_600))
    world.report_load(rank(1), 1.0, counters=before)
    assert Page().take(frame(board, 1.0)).totals.unplaced is None
    world.report_load(rank(1), 2.0, counters=after)
    assert Page().take(frame(board, 2.0)).totals.unplaced == pytest.approx(0.76, abs=0.01)


def test_history_has_the_hits_of_all_ranks_together(world, board):
    reported = Page().take(frame(board))
    (point,) = reported.history
    assert (point.predicted_hits, point.decisions_per_s) == (reported.totals.predicted_hits, 0.0)


def test_whole_frames_name_their_columns(world, board):
    reported = Page().take(frame(board))
    assert reported.columns is None
    whole = Page().take(board.whole(1_000.0))
    assert whole.columns.ranks[:3] == ("worker_id", "dp_rank", "trust")
    assert (whole.router, whole.number) == ("r", reported.number)


def test_prefixes_come_with_decisions(world, board):
    board.feed.watch(is_watched=True)
    world.cache(rank(1), [*range(16)])
    for _ in range(2):
        decide(world, board)
    reported = Page().take(frame(board))
    assert (reported.prefixes.decisions, reported.prefixes.top) == (1, [])
    assert Page().take(frame(board, 1.0)).prefixes is None
    for second in (2.0, 3.0):
        request = SelectRequest(token_ids=[*range(16)])
        placement = world.core.handle(Select(request, prepare(request, ())), second)[0]
        board.feed.take("select", request, placement, second, 1_000.0)
        reported = Page().take(frame(board, second))
    assert [each.blocks for each in reported.prefixes.top] == [4]


def test_mispredicted_ranks_are_shown_and_noted(world, board):
    page = Page()
    assert page.take(frame(board)).mispredicted == []
    for second in range(20):
        longer = Observation(1, Scope("m", "g"), None, 4, 100, 0, 0, 0, 101, 0)
        world.core.closed_loop.note(longer, lambda: None, float(second))
    reported = page.take(frame(board, 20.0))
    assert {each.causes[0].name for each in reported.mispredicted} == {"chat_template"}
    assert len(reported.mispredicted) > 1
    assert [each.kind for each in reported.events].count("mispredicted") == 1
    assert len(page.take(frame(board, 21.0)).mispredicted) == len(reported.mispredicted)
    late = Page().take(board.whole(1_021.0))
    assert len(late.mispredicted) == len(reported.mispredicted)


def test_what_happened_without_a_viewer_is_remembered(world, board):
    for _ in board.look(0.0):
        pass
    board.sample(0.0, 1_000.0)
    decide(world, board)
    world.core.handle(RemoveWorker(2, "silent"), 0.0)
    world.worker(4)
    for _ in board.look(5.0):
        pass
    board.sample(5.0, 1_005.0)
    page = Page()
    page.take(frame(board, 9.0))
    whole = page.take(board.whole(1_009.0))
    assert set(page.workers) == {"1", "3", "4"}
    assert "worker_joined" in {each.kind for each in whole.events}
    assert [each.decision.worker_id for each in page.decisions] == [3]
    assert [point.at for point in whole.history] == [1_000.0, 1_005.0, 1_009.0]


def test_memory_is_bounded(world, board):
    feed = board.feed
    for second in range(0, 8_000, 4):
        decide(world, board, now_s=float(second))
        for _ in board.look(float(second)):
            pass
        board.sample(float(second), 1_000.0 + second)
    assert len(feed.kept) == KEPT
    whole = Page().take(board.whole(9_000.0))
    assert len(whole.decisions) == SHOWN
    assert len(msgspec.json.decode(board.decisions())) == KEPT
    assert HISTORY_S / 4 <= len(whole.history) <= HISTORY_S / 4 + 1
    for step in range(2 * HISTORY_POINTS):
        board.sample(8_000.0 + step / 10, 9_000.0 + step / 10)
    assert len(Page().take(board.whole(9_200.0)).history) == HISTORY_POINTS


def test_rates_are_means_of_ten_seconds(world):
    decided = [0]
    status = ServiceStatus("", needs_workers=True)
    timeline = EventTimeline(lambda: 0.0)
    board = Board("r", world.core, status, lambda: (decided[0], 0, 0), timeline)
    rates = []
    for second in range(30):
        decided[0] += 20 if second == 10 else 0
        (point,) = Page().take(frame(board, float(second))).history
        rates.append(point.decisions_per_s)
    assert rates[:10] == [0.0] * 10
    assert rates[10:20] == [2.0] * 10
    assert rates[20:] == [0.0] * 10


def test_times_of_booked_requests_are_beside_their_predictions(world, board):
    request = SelectRequest(token_ids=[*range(16)], request_id="a")
    command = SelectAndReserve(request, prepare(request, ()))
    placement = world.core.handle(command, 0.0)[0]
    board.feed.take("select_and_reserve", request, placement, 0.0, 1_000.0)
    board.feed.latencies.report(PrefillComplete("a"), 0.25)
    board.feed.latencies.report(Free("a"), 2.0)
    reported = Page().take(frame(board, 3.0))
    (point,), (model, worker) = reported.history, reported.latencies
    predicted_s = reported.decisions[0].decision.shown[0].predicted.time_to_first_token_s
    assert (point.ttft_s, point.predicted_ttft_s) == (0.25, round(predicted_s, 6))
    assert (model.ttft_s, model.request_s, model.worker_id) == (0.25, 2.0, None)
    assert worker.worker_id == str(placement.rank.worker_id)
    assert Page().take(board.whole(1_003.0)).latencies == reported.latencies
