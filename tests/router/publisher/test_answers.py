"""Questions about one rank, asked over a real bus."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from router.errors import WireError
from router.protocol.catalogue import worker_key
from router.protocol.events import Checkpoint
from router.protocol.loads import decode_load_report
from router.protocol.ranges import (
    Events,
    InvalidRange,
    RangeRefused,
    RangeRequest,
    TooNew,
    decode_range_answer,
    encode_range_request,
)
from router.protocol.subjects import Subjects
from router.protocol.values import SCHEME, Identity, Rank, Tier, unpack_hashes
from router.publisher.journal.journal import EventJournal
from router.publisher.rank_queries import MAX_WAITING, LocalIndex, RankQueryResponder
from support.processes.servers import eventually
from support.values.builders import report

SUBJECTS, RANK = Subjects("test"), Rank(7, 1)
SUBJECT = SUBJECTS.events_wanted(RANK)


class Asked:
    """A rank that answers."""

    def __init__(self):
        self.journal = EventJournal(RANK, 99, Identity(SCHEME, 16))
        self.answers = RankQueryResponder(
            RANK, LocalIndex(self.journal), lambda: report(7, 1, report_id=3)
        )

    @asynccontextmanager
    async def running(self, bus):
        task = asyncio.create_task(self.answers.run(bus, SUBJECTS))
        await eventually(lambda: self.is_listening(bus))
        self.answers.answered = 0
        yield self
        task.cancel()
        await asyncio.wait([task])

    async def is_listening(self, bus):
        try:
            return await bus.client.request(SUBJECTS.load_wanted(RANK), timeout=60)
        except NoRespondersError:
            return None


@pytest.fixture
async def rank(bus):
    async with Asked().running(bus) as rank:
        yield rank


async def ask(bus, request, subject=SUBJECT):
    """Every message of the answer to one question."""
    payload = encode_range_request(request) if isinstance(request, RangeRequest) else request
    inbox = bus.client.new_inbox()
    subscription = await bus.client.subscribe(inbox)
    await bus.client.publish(subject, payload, reply=inbox)
    answers = [decode_range_answer((await subscription.next_msg(timeout=60)).data)]
    while isinstance(answers[0], Checkpoint) and len(answers) < answers[0].parts:
        answers.append(decode_range_answer((await subscription.next_msg(timeout=60)).data))
    await subscription.unsubscribe()
    return answers


async def test_rank_queries_return_events_or_checkpoints(rank, bus):
    for number in range(3):
        rank.journal.stored(Tier.DEVICE, [number], None)
        rank.journal.seal()
    (events,) = await ask(bus, RangeRequest(2))
    assert isinstance(events, Events)
    assert [unpack_hashes(e.sequence_hashes).tolist() for e in events.events] == [[1], [2]]
    assert await ask(bus, RangeRequest(4)) == [TooNew(99, 4, None, 3)]
    assert await ask(bus, RangeRequest(3, 2)) == [InvalidRange(3, 2)]
    (dump,) = await ask(bus, RangeRequest())
    assert (dump.event_id, dump.state) == (3, rank.journal.state)
    assert (rank.answers.answered, rank.answers.refused) == (4, 0)


async def test_a_large_dump_comes_in_parts(rank, bus):
    rank.journal.stored(Tier.DEVICE, range(250_000), None)
    parts = await ask(bus, RangeRequest())
    assert [(part.part, part.parts) for part in parts] == [(0, 3), (1, 3), (2, 3)]
    reported = {
        h for p in parts for b in p.blocks for h in unpack_hashes(b.sequence_hashes).tolist()
    }
    assert reported == set(range(250_000))


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"", "body"),
        (b"garbage", "body"),
        (msgspec.msgpack.encode([1, 2]), "body"),
        (msgspec.msgpack.encode({"start_event_id": -1}), "start_event_id"),
        (msgspec.msgpack.encode({"end_event_id": "7"}), "end_event_id"),
    ],
)
async def test_bad_range_requests_name_field_reason_and_allowed(rank, bus, payload, field):
    (refused,) = await ask(bus, payload)
    assert isinstance(refused, RangeRefused)
    assert (refused.code, refused.field) == ("invalid_field", field)
    assert refused.reason
    assert refused.allowed
    assert rank.answers.refused == 1
    assert isinstance((await ask(bus, RangeRequest()))[0], Checkpoint)


async def test_many_at_once_are_answered_one_by_one_and_too_many_refused(rank, bus):
    """Every request gets an answer, however many there are."""
    rank.journal.stored(Tier.DEVICE, range(250_000), None)
    answers = await asyncio.gather(*(ask(bus, RangeRequest()) for _ in range(3 * MAX_WAITING)))
    kinds = [type(answer[0]) for answer in answers]
    busy = [answer[0] for answer in answers if isinstance(answer[0], RangeRefused)]
    assert kinds.count(Checkpoint) >= MAX_WAITING
    assert busy
    assert {refused.code for refused in busy} == {"busy"}
    assert (rank.answers.answered, rank.answers.refused) == (kinds.count(Checkpoint), len(busy))


async def test_request_without_reply_subject_gets_none(rank, bus):
    await bus.client.publish(SUBJECT, b"garbage")
    await bus.client.publish(SUBJECTS.load_wanted(RANK), b"")
    await ask(bus, RangeRequest())
    assert (rank.answers.answered, rank.answers.refused) == (1, 0)


async def test_agent_replies_only_to_inboxes(rank, bus):
    """Its answer in the event log would be a gap there, in the bucket the end of its worker."""
    reported = []

    async def note(message):
        reported.append(message.subject)

    for subject in ("kv.test.>", "$KV.>"):
        await bus.client.subscribe(subject, cb=note)
    for reply in (SUBJECTS.events(RANK), SUBJECTS.load(RANK), SUBJECTS.key(worker_key(7))):
        for subject in (SUBJECT, SUBJECTS.load_wanted(RANK)):
            await bus.client.publish(subject, b"", reply=reply)
    await ask(bus, RangeRequest())
    await bus.client.request(SUBJECTS.load_wanted(RANK), b"", timeout=60)
    assert set(reported) == {SUBJECT, SUBJECTS.load_wanted(RANK)}
    assert (rank.answers.answered, rank.answers.refused) == (2, 0)


async def test_reports_the_load_when_asked(rank, bus):
    answer = await bus.client.request(SUBJECTS.load_wanted(RANK), b"", timeout=60)
    assert decode_load_report(answer.data) == report(7, 1, report_id=3)


async def test_undelivered_answer_does_not_stop_the_service(rank, bus, nats_server, monkeypatch):
    monkeypatch.setattr("router.publisher.rank_queries.REQUEST_TIMEOUT_S", 0.1)
    subscription = await bus.client.subscribe("question")
    await bus.client.publish("question", b"", reply="nowhere")
    question = await subscription.next_msg(timeout=60)
    nats_server.kill()
    assert not await rank.answers._send(bus, question, b"answer")
    assert rank.answers.undelivered == 1
    nats_server.start()

    async def answers_again():
        try:
            return await ask(bus, RangeRequest())
        except (WireError, NatsError, TimeoutError):
            return None

    (dump,) = await eventually(answers_again)
    assert isinstance(dump, Checkpoint)
