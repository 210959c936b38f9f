"""The client, against a real router, over HTTP and NATS, and in its process."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from router.client import (
    ClientSettings,
    EncodedTokens,
    PotentialLoadsRequest,
    ReservationStep,
    ReserveRequest,
    Retries,
    RouterClient,
    SelectRequest,
    UnansweredError,
    Usage,
)
from router.errors import InvalidFieldError
from router.protocol.requests import ConfigOverride
from router.scheduler.errors import NoEndpointsError
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from support.processes.running import RunningRouter
from support.processes.servers import equals, eventually

PROMPT = list(range(100))
IMPATIENT = ClientSettings(retries=Retries(attempts=20, longest_pause_s=5.0))
REQUEST = SelectRequest(token_ids=PROMPT)


async def load(client):
    """Of the one worker: requests, prefill tokens, decode blocks."""
    ((rank,),) = [scope.loads for scope in await client.loads()]
    return rank.active_requests, rank.potential_prefill_tokens, rank.potential_decode_blocks


async def test_prompts_may_be_written_in_json_already(client):
    written = EncodedTokens(msgspec.json.encode(PROMPT))
    assert (await client.select(SelectRequest(token_ids=written))).isl_tokens == 100
    with pytest.raises(InvalidFieldError):
        await client.select(SelectRequest(token_ids=EncodedTokens(b"[1, -1]")))


async def test_the_life_of_a_request(client):
    assert (await client.select(REQUEST)).worker_id == 1
    assert await load(client) == (0, 0, 0)
    async with client.reserve(REQUEST) as reservation:
        assert reservation.decision.endpoint == "http://w1"
        assert await load(client) == (1, 100, 25)
        await reservation.prefill_complete()
        assert await load(client) == (1, 0, 25)
        await reservation.output_block()
        assert await load(client) == (1, 0, 26)
        reservation.usage = Usage(prompt_tokens=100, cached_tokens=0)
    assert await load(client) == (0, 0, 0)
    assert await client.fleet.metric("kv_router_usage_prompt_tokens_total") == 100


async def test_batches_select_and_report_in_one_call(client):
    chosen, refused = await client.select_batch(
        [REQUEST, SelectRequest(token_ids=PROMPT, model_name="zz")]
    )
    assert (chosen.decision.worker_id, refused.status) == (1, 503)
    booked = [await client.select_and_reserve(REQUEST) for _ in range(2)]
    usage = Usage(prompt_tokens=100, cached_tokens=0)
    steps = [
        ReservationStep(step="prefill_complete", request_id=booked[0].request_id, usage=usage),
        ReservationStep(step="free", request_id=booked[1].request_id),
        ReservationStep(step="free", request_id="zz"),
    ]
    assert [each.status for each in await client.report(steps)] == [200, 200, 404]
    assert (await load(client))[:2] == (1, 0)


async def test_progress_and_ends_of_reservations_share_calls(remote_client):
    client = remote_client

    async def tokens():
        yield "first"

    async def serve(reservation):
        async for _ in reservation.follow(tokens()):
            pass
        await reservation.leave()

    reservations = [await client.reserved(REQUEST) for _ in range(16)]
    await asyncio.gather(*map(serve, reservations))
    assert await load(client) == (0, 0, 0)
    lines = (await client.fleet.client.get("/metrics")).text.splitlines()
    calls = [line for line in lines if line.startswith("kv_router_requests_total")]
    batches = [float(line.split()[-1]) for line in calls if "reservations:batch" in line]
    assert 1 <= sum(batches) <= 8
    assert not [line for line in calls if "prefill_complete" in line or "free" in line]


async def test_client_has_the_other_queries(client):
    prompt = PotentialLoadsRequest(token_ids=PROMPT)
    forecast = await client.potential_loads(prompt)
    (rank,) = forecast.loads
    assert (rank.worker_id, rank.potential_prefill_tokens, forecast.warnings) == (1, 100, ())
    scores = await client.overlap_scores(prompt)
    assert (scores.num_blocks, scores.workers[0].device_blocks) == (25, 0)
    (pool,) = await client.capacity()
    assert (pool.model_name, pool.workers, pool.loads[0].worker_id) == ("default", 1, 1)


async def test_fields_without_effect_are_named(client):
    override = ConfigOverride(policy="predictive", prefill_load_scale=2.0)
    asked = SelectRequest(token_ids=PROMPT, router_config_override=override)
    (sentence,) = (await client.select(asked)).warnings
    assert "prefill_load_scale = 2 has no effect: the policy `predictive`" in sentence
    async with client.reserve(asked) as reservation:
        assert reservation.decision.warnings == (sentence,)
    (item,) = await client.select_batch([asked])
    assert item.decision.warnings == (sentence,)
    loads = PotentialLoadsRequest(token_ids=PROMPT, router_config_override=override)
    assert len((await client.potential_loads(loads)).warnings) == 2
    booked = ReserveRequest(token_ids=PROMPT, worker_id=1, router_config_override=override)
    assert len((await client.book(booked)).warnings) == 2
    assert (await client.select(REQUEST)).warnings == ()


async def test_reservations_can_be_looked_after_by_hand(client):
    booked = await client.book(ReserveRequest(token_ids=PROMPT, worker_id=1, request_id="a b"))
    assert (booked.request_id, booked.worker_id) == ("a b", 1)
    await client.prefill_complete("a b")
    await client.output_block("a b", 0.5)
    assert await client.free("a b")
    assert not await client.free("a b")
    decision = await client.select_and_reserve(REQUEST)
    assert await client.free(decision.request_id)


@pytest.mark.parametrize("problem", [ValueError, asyncio.CancelledError])
async def test_reservation_is_freed_after_any_error(client, problem):
    with pytest.raises(problem):
        async with client.reserve(REQUEST):
            raise problem
    assert await load(client) == (0, 0, 0)


async def test_cancelled_reservation_is_freed(client):
    is_inside = asyncio.Event()

    async def hold():
        async with client.reserve(REQUEST):
            is_inside.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await is_inside.wait()
    assert await load(client) == (1, 100, 25)
    holding.cancel()
    await asyncio.wait([holding])
    assert await load(client) == (0, 0, 0)


async def test_errors_are_rebuilt_from_responses(client):
    with pytest.raises(NoEndpointsError) as caught:
        await client.select(SelectRequest(token_ids=PROMPT, model_name="zz"))
    assert (caught.value.model_name, caught.value.http_status) == ("zz", 503)
    pinned = SelectRequest(token_ids=PROMPT, allowed_worker_ids=[7])
    with pytest.raises(NoEndpointsError) as caught:
        await client.select(pinned)
    assert caught.value.removed[0].filter == "allowed_worker_ids"
    with pytest.raises(InvalidFieldError) as caught:
        await client.select(SelectRequest(token_ids=[*PROMPT, -1]))
    assert (caught.value.field, caught.value.http_status) == ("token_ids[100]", 422)
    with pytest.raises(ReservationNotFoundError):
        await client.prefill_complete("nobody")


async def test_a_duplicate_is_the_callers_mistake_and_frees_nothing(client):
    request = SelectRequest(token_ids=PROMPT, request_id="mine")
    async with client.reserve(request):
        with pytest.raises(DuplicateReservationError):
            async with client.reserve(request):
                pass
        assert await load(client) == (1, 100, 25)


async def test_a_booking_without_an_answer_is_made_again_and_once(impatient):
    impatient.link.lose_answers(loses=True)
    reserving = asyncio.create_task(entered(impatient))
    await eventually(lambda: impatient.link.lost >= 1)
    impatient.link.lose_answers(loses=False)
    assert await reserving == (1, 100, 25)
    assert await load(impatient) == (0, 0, 0)


async def entered(client):
    async with client.reserve(SelectRequest(token_ids=PROMPT, request_id="once")):
        return await load(client)


async def test_unanswered_output_block_is_not_repeated(impatient):
    async with impatient.reserve(REQUEST) as reservation:
        impatient.link.lose_answers(loses=True)
        with pytest.raises(UnansweredError) as caught:
            await reservation.output_block()
        assert caught.value.is_maybe_done
        impatient.link.lose_answers(loses=False)
        assert await load(impatient) == (1, 100, 26)


async def test_reservation_cancelled_while_booking_is_freed(impatient):
    impatient.link.lose_answers(loses=True)
    reserving = asyncio.create_task(entered(impatient))
    await eventually(lambda: impatient.link.lost >= 1)
    reserving.cancel()
    await asyncio.wait([reserving])
    impatient.link.lose_answers(loses=False)
    await eventually(lambda: equals(load(impatient), (0, 0, 0)))
    await impatient.finish()


async def test_restarted_router_receives_the_reservation_again(nats_server, connect):
    async with AsyncExitStack() as life, AsyncExitStack() as afterlife:
        first = await life.enter_async_context(RunningRouter(nats_server.url).running())
        await first.worker(1)
        client = await afterlife.enter_async_context(connect(first, nats_server))
        async with client.reserve(REQUEST) as reservation:
            await reservation.prefill_complete()
            await life.aclose()
            second = RunningRouter(nats_server.url)
            await afterlife.enter_async_context(second.running())
            client.link.target = second
            await second.worker(1, incarnation=2)
            assert await load(client) == (0, 0, 0)
            await reservation.output_block()
            assert await load(client) == (1, 0, 26)
        assert await load(client) == (0, 0, 0)


@pytest.fixture
async def deaf(nats_server):
    """A router that does not see the bookings of others."""
    settings = {"name": "deaf", "router_replica_sync": False}
    async with RunningRouter(nats_server.url, **settings).running() as router:
        yield router


async def test_end_of_an_unknown_booking_is_repeated(fleet, deaf, nats_server, connect_http):
    async with connect_http(fleet, nats_server) as client:
        reservation = await client.reserved(REQUEST)
        client.link.turn_to(deaf)
        await reservation.leave()
        client.link.turn_to(fleet)
        await eventually(lambda: equals(load(client), (0, 0, 0)))


async def test_closing_client_waits_until_the_end_is_confirmed(
    fleet, deaf, nats_server, connect_http
):
    """The client is closed as soon as a router has said that it knows nothing of it."""
    async with connect_http(fleet, nats_server) as client:
        reservation = await client.reserved(REQUEST)
        client.link.turn_to(deaf)
        await reservation.leave()
        client.link.turn_to(fleet)
    ((rank,),) = [scope["loads"] for scope in (await fleet.client.get("/loads")).json()]
    assert rank["active_requests"] == 0


async def test_a_router_that_dies_with_a_booking_is_not_waited_for(fleet, bus, nats_server):
    """Without the waiting notice it would take as long as a booking may wait."""
    taken, hour_s = asyncio.Event(), 3600.0

    async def take(message):
        if b"select_and_reserve" in message.data:
            taken.set()

    dead = await bus.client.subscribe("kv.test.router", queue="router", cb=take)
    settings = ClientSettings(timeout_s=1.0, max_wait_s=hour_s)
    async with RouterClient.over_nats(nats_server.url, "test", settings=settings) as client:
        while not taken.is_set():  # they take turns at random
            booking = asyncio.create_task(client.reserved(REQUEST))
            await eventually(lambda: taken.is_set() or booking.done())  # noqa: B023 - at once
            if not taken.is_set():
                await booking.result().leave()
        await dead.unsubscribe()
        reservation = await asyncio.wait_for(booking, 120)
        assert reservation.decision.worker_id == 1
        await reservation.leave()


async def test_a_booking_that_waits_for_room_is_waited_for(nats_server):
    settings = ClientSettings(timeout_s=1.0, max_wait_s=3600.0)
    full = {"router_queue_threshold": 0.5}
    async with (
        RunningRouter(nats_server.url, **full).running() as router,
        RouterClient.over_nats(nats_server.url, "test", settings=settings) as client,
    ):
        await router.worker(1, max_num_batched_tokens=64)
        first = await client.reserved(REQUEST)
        booking = asyncio.create_task(client.reserved(REQUEST))
        await eventually(lambda: waits(router))
        done, _ = await asyncio.wait([booking], timeout=2 * settings.timeout_s)
        assert not done
        assert waits(router)
        await first.leave()
        await (await booking).leave()


async def test_booking_that_waits_too_long_in_the_process_is_withdrawn(nats_server):
    settings = ClientSettings(timeout_s=0.2, max_wait_s=0.2, retries=Retries(attempts=1))
    full = {"router_queue_threshold": 0.5}
    async with RunningRouter(nats_server.url, **full).running() as router:
        commands = router.service.commands
        async with RouterClient.in_process(commands, settings=settings) as client:
            await router.worker(1, max_num_batched_tokens=64)
            first = await client.reserved(REQUEST)
            with pytest.raises(UnansweredError) as caught:
                await client.reserved(REQUEST)
            assert caught.value.is_maybe_done
            assert len(router.service.host.core.waiting) == 0
            await first.leave()
            await eventually(lambda: equals(load(client), (0, 0, 0)))


def waits(router):
    return len(router.service.host.core.waiting) == 1


async def test_ids_may_be_any_text_that_a_path_can_say(client):
    for request_id in ("ünïcode 🙂", "a?b#c%2F"):
        async with client.reserve(SelectRequest(token_ids=PROMPT, request_id=request_id)):
            assert await load(client) == (1, 100, 25)
        assert await load(client) == (0, 0, 0)


async def test_an_id_with_a_slash_is_refused_over_http_before_it_is_booked(fleet):
    async with RouterClient.over_http(str(fleet.client.base_url)) as client:
        with pytest.raises(InvalidFieldError):
            await client.select_and_reserve(SelectRequest(token_ids=PROMPT, request_id="a/b"))


async def test_rate_limited_client_retries_after_the_given_time(nats_server):
    async with (
        RunningRouter(nats_server.url, default_requests_per_s=5.0).running() as router,
        RouterClient.over_http(str(router.client.base_url), settings=IMPATIENT) as client,
    ):
        await asyncio.gather(*(client.loads() for _ in range(8)))
        refused = 'kv_router_refusals_total{code="rate_limited",interface="http"}'
        await eventually(lambda: router.metric(refused))


async def test_a_stream_is_followed(client):
    """25 full blocks: after every 4th token another."""

    async def stream(tokens):
        for each in range(tokens):
            yield each

    async with client.reserve(REQUEST) as reservation:
        followed = [each async for each in reservation.follow(stream(9))]
        assert followed == list(range(9))
        await eventually(lambda: equals(load(client), (1, 0, 27)))
        async for _ in reservation.follow(stream(2), lambda _: 2):
            pass
        await eventually(lambda: equals(load(client), (1, 0, 28)))
    assert reservation.missed_reports == 0
    assert await load(client) == (0, 0, 0)
