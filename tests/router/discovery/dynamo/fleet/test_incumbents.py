"""What Dynamo's routers say of requests, as they really say it."""

import pytest

from router.core.views.shadow import Shadow
from router.discovery.dynamo.fleet.incumbents import Incumbents
from router.discovery.dynamo.fleet.messages import AddRequest, PrefillLoadHint, SequenceEvent
from router.protocol.values import Rank
from router.sequence.hashing.block_hashes import chain
from support.fleets.dynamo_fleets import SETTINGS, FollowedFleet

NAMES = chain([1, 2, 3]).tolist()


class Watched(FollowedFleet):
    """Two workers, of which the first holds three blocks of 16, and what is said of requests."""

    def __init__(self):
        super().__init__()
        self.store(1, 2, 3, worker_id=7)
        self.store(9, worker_id=8, publisher_id=2)
        self.shadow = Shadow(0.0)
        self.incumbents = Incumbents(self.core, self.fleet, self.shadow, SETTINGS)

    def say(self, change, request_id="r", worker_id=8):
        self.incumbents.take(SequenceEvent(request_id, Rank(worker_id, 0), change), 5.0)

    def active(self, worker_id=8):
        return self.core.tracker.active(Rank(worker_id, 0))

    @property
    def report(self):
        return self.shadow.report(6.0)


@pytest.fixture
def watched():
    return Watched()


def test_a_request_of_1_0_2_is_booked_where_it_went_and_compared(watched):
    watched.say(AddRequest(NAMES, isl=51, overlap=2))
    assert watched.active().active_requests == 1
    assert watched.active().active_prefill_tokens == 51
    assert watched.active(7).active_requests == 0
    (scope,) = watched.report.scopes
    assert (scope.model_name, scope.compared, scope.agreed, scope.isl_tokens) == ("m", 1, 0, 51)
    assert scope.ours.predicted_cached_tokens == 48
    (difference,) = watched.report.differences
    assert (difference.source, difference.claimed_overlap_blocks) == ("bus", 2)
    assert (difference.ours.worker_id, difference.theirs.worker_id) == (7, 8)


def test_of_a_request_of_1_6_1_isl_and_overlap_follow_from_its_prefill(watched):
    watched.say(AddRequest(NAMES, prefill_load_hint=PrefillLoadHint(19)), worker_id=8)
    (difference,) = watched.report.differences
    assert (difference.isl_tokens, difference.claimed_overlap_blocks) == (51, 2)


def test_its_load_counts_in_what_we_would_have_chosen_next(watched):
    for number in range(5):
        watched.say(AddRequest(NAMES, isl=51), request_id=str(number), worker_id=7)
    before = watched.report.scopes[0].agreed
    watched.say(AddRequest(chain([5]).tolist(), isl=16), request_id="next", worker_id=8)
    assert watched.report.scopes[0].agreed == before + 1


def test_incumbent_request_follows_its_real_progress(watched):
    watched.say(AddRequest(NAMES, isl=51))
    watched.say("MarkPrefillCompleted")
    assert watched.active().active_prefill_tokens == 0
    watched.say("Free")
    assert watched.active().active_requests == 0
    watched.say("Free")
    counts = watched.incumbents.counts
    assert (counts.booked, counts.prefill_completed, counts.freed) == (1, 1, 1)
    assert counts.unknown_requests == 1


def test_prefill_that_is_not_tracked_is_none(watched):
    watched.say(AddRequest(NAMES, isl=51, track_prefill_tokens=False))
    assert watched.active().active_prefill_tokens == 0
    assert watched.active().active_requests == 1


def test_unbookable_incumbent_is_counted(watched):
    watched.say(AddRequest(None, isl=51))
    watched.say(AddRequest(NAMES, isl=1 << 60))
    watched.say(AddRequest(NAMES, isl=51), worker_id=99)
    watched.say(AddRequest(NAMES, isl=51))
    watched.say(AddRequest(NAMES, isl=51))
    counts = watched.incumbents.counts
    assert (counts.untracked, counts.unknown_ranks, counts.not_booked) == (2, 1, 1)
    assert counts.booked == 1


def test_other_block_size_is_reported(watched):
    watched.say(AddRequest(NAMES, isl=100))
    assert watched.incumbents.counts.other_block_size == 1
    (sentence,) = watched.fleet.complaints.take(0.0)
    assert sentence.endswith("dynamo_block_size is not 16, as configured")
    assert watched.report.scopes == []


def test_incumbent_without_known_ranks_is_counted():
    heard = FollowedFleet()
    incumbents = Incumbents(heard.core, heard.fleet, Shadow(0.0), SETTINGS)
    incumbents.take(SequenceEvent("r", Rank(7, 0), AddRequest(NAMES, isl=51)), 0.0)
    assert incumbents.counts.unknown_ranks == 1
